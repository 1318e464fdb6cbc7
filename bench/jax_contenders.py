"""What `bench.jax_products` times: the product inside a program of JAX, from CuPy, and what JAX ships."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import cupy_gmm.jax
from bench.jax_clock import Clock
from bench.jax_work import calls_in, chain
from bench.shapes import Problem
from cupy_gmm.jax import _wire

CUBLAS_ONLY = {"xla_gpu_enable_triton_gemm": False}


def programs(arrays: tuple[Any, ...], products: int, clock: Clock, out: dict[str, str]) -> dict[str, Any]:
    """Both chains, compiled, and the groups that they take; where XLA merged or dropped products, `out` says so."""
    found: dict[str, Any] = {}
    x, w, sizes = arrays
    kinds = {
        "ours": (cupy_gmm.jax.ragged_dot, sizes),
        "ours_schedule": (cupy_gmm.jax.grouped_mm, jnp.cumsum(sizes, dtype=jnp.int32)),
    }
    for name, (dot, groups) in kinds.items():
        rebuilt = name != "ours"
        run = chain(dot, products, rebuilt, clock.begin, clock.end)
        compiled = jax.jit(run).lower(x, w, groups).compile()
        text = compiled.as_text()
        seen = calls_in(text, _wire.PRODUCT_TARGET["grouped_mm"]), calls_in(text, _wire.SCHEDULE_TARGET)
        if jax.default_backend() == "gpu" and seen != (products, products if rebuilt else 1):
            out[name] = f"XLA made {seen} products and schedules of a chain of {products}"
            continue
        found[name] = functools.partial(compiled, x, w, groups)
    return found


def from_cupy(arrays: tuple[Any, ...], products: int) -> tuple[dict[str, Callable[[], None]], Any]:
    """The same products from CuPy on the same memory; and where the last result lies."""
    import cupy
    import ml_dtypes

    x, w, sizes = (cupy.from_dlpack(each) for each in arrays)
    offs = cupy_gmm.offs_from_sizes(sizes)
    results = [cupy.empty((x.shape[0], w.shape[2]), ml_dtypes.bfloat16) for _ in range(products)]

    def run(rebuilt: bool) -> None:
        groups = offs if rebuilt else cupy_gmm.make_schedule(offs, x.shape[0])
        for out in results:
            cupy_gmm.grouped_mm(x, w, groups, out=out)

    return {"cupy": lambda: run(False), "cupy_schedule": lambda: run(True)}, results[-1]


def pallas(problem: Problem, arrays: tuple[Any, ...], points: int, out: dict[str, str]) -> dict[str, Any]:
    """JAX's own kernel in so many shapes of block, those that work: calls of one product."""
    found: dict[str, Any] = {}
    if not points:
        return found
    try:
        from bench.peers import Unavailable, jax_gpu, sentence
    except ImportError as error:
        out["pallas"] = f"the peers cannot be imported: {error}"
        return found
    try:
        offered = jax_gpu.mosaic(problem.n)
    except Unavailable as error:
        out["pallas"] = sentence(error)
        return found
    for name, product in list(offered.items())[:points]:
        try:
            call = jax.jit(product).lower(*arrays).compile()
            jax.block_until_ready(call(*arrays))
        except Exception as error:
            out[f"pallas:{name}"] = sentence(error)
            continue
        found[f"pallas:{name}"] = functools.partial(call, *arrays)
    return found


def of_lax(function: Any, arrays: tuple[Any, ...], autotune: bool, out: dict[str, str]) -> Callable[[], Any]:
    """A call of what JAX compiles of it, run once."""
    lowered = function.lower(*arrays)
    try:
        compiled = lowered.compile(compiler_options=None if autotune else CUBLAS_ONLY)
    except jax.errors.JaxRuntimeError as error:  # another jaxlib may not know the option
        out["ragged_dot"] = f"compiled with all of XLA's tuning: {str(error)[:80]}"
        compiled = lowered.compile()
    call = functools.partial(compiled, *arrays)
    jax.block_until_ready(call())
    return call


def last_of(clock: Clock, program: Callable[[], Any]) -> Any:
    """The result of the last product of a chain."""
    found: list[Any] = []
    clock.inside(lambda: found.append(program()))
    return jax.block_until_ready(found[0][0])


def as_words(array: Any) -> Any:
    """The bits of a bfloat16 array of JAX or CuPy, for CuPy."""
    import cupy

    return (array if isinstance(array, cupy.ndarray) else cupy.from_dlpack(array)).view(np.uint16)
