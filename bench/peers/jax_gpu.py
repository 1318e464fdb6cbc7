"""Peers that JAX ships: the Mosaic-GPU ragged dot of Pallas, and `jax.lax.ragged_dot`. Forward products only.

JAX launches on a stream of its own that it does not hand out. Both directions of DLPack order streams: JAX waits for
torch's stream when it takes the group sizes over, and torch's stream waits for the result when torch takes that. So the
events that time every other contender stand around a call of JAX too, in the same rounds on the same card; what the way
there and back costs is measured by a call that only adds 1 to the group sizes, and taken off. That leans towards JAX by
the two or three microseconds that this addition itself takes.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

import torch

from bench.peers import Calls, Unavailable
from bench.work import Work

BLOCK_K, BLOCK_N, STEPS = 64, 128, 5


@functools.cache
def imported() -> Any:
    """The module jax, which must not take the card's memory for itself."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    try:
        import jax
    except ImportError as error:
        raise Unavailable(f"JAX cannot be imported: {error}") from error
    try:
        jax.devices("cuda")
    except RuntimeError as error:
        raise Unavailable(f"JAX has no CUDA device: {error}") from error
    return jax


def _crossed(work: Work, function: Callable[..., Any], *arrays: Any) -> Callable[[], torch.Tensor]:
    jax = imported()
    counts = torch.tensor(work.problem.counts, dtype=torch.int32, device=work.x.device)
    jitted = jax.jit(function)
    return lambda: torch.from_dlpack(jitted(*arrays, jax.dlpack.from_dlpack(counts)))


def _operands(work: Work) -> tuple[Any, Any]:
    if work.op != "forward":
        raise Unavailable("forward products only")
    jax = imported()
    return jax.dlpack.from_dlpack(work.x), jax.dlpack.from_dlpack(work.other)


def crossing(work: Work) -> Callable[[], torch.Tensor]:
    """From torch's stream to JAX's and back around nothing."""
    return _crossed(work, lambda counts: counts + 1)


def points(n: int) -> list[tuple[int, int]]:
    """(block_m, grid_block_n) to try: tall and short blocks in panels as wide as N allows, tall ones in narrow panels.

    Tracing and compiling one takes over a second, so there are no more of them.
    """
    widest = next(width for width in (8, 4, 2, 1) if n % (width * BLOCK_N) == 0 or width == 1)
    return list(dict.fromkeys([(128, widest), (64, widest), (128, min(2, widest))]))


def mosaic(n: int) -> dict[str, Callable[[Any, Any, Any], Any]]:
    """`jax.experimental.pallas.ops.gpu.ragged_dot_mgpu` for so many columns, by shape of block: y of x, w and sizes."""
    try:
        from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu
    except ImportError as error:
        raise Unavailable(f"the Mosaic-GPU ragged dot cannot be imported: {error}") from error

    def of(block_m: int, grid_block_n: int) -> Callable[[Any, Any, Any], Any]:
        def product(x: Any, w: Any, counts: Any) -> Any:
            return ragged_dot_mgpu.ragged_dot(
                x, w, group_sizes=counts, block_m=block_m, block_n=BLOCK_N, block_k=BLOCK_K,
                max_concurrent_steps=STEPS, grid_block_n=grid_block_n,
            )  # fmt: skip

        return product

    return {f"{m}x{BLOCK_N}/{width}": of(m, width) for m, width in points(n)}


def pallas(work: Work) -> Calls:
    """The same, in several shapes of block."""
    x, w = _operands(work)
    return {name: _crossed(work, product, x, w) for name, product in mosaic(work.problem.n).items()}


def ragged_dot(work: Work) -> Calls:
    """The public operator."""
    jax = imported()
    return {"": _crossed(work, jax.lax.ragged_dot, *_operands(work))}
