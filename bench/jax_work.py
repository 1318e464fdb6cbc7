"""What JAX programs the benchmark times: chains of products that XLA can neither merge nor drop, and an expert layer.

`bench.jax_products` runs them; knows no CuPy and no clock.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from bench import shapes
from bench.shapes import Problem
from cupy_gmm import counts

CHAIN_MICROS = 6_000
# examples/model.py: FULL, with the counts of a real router
TOKENS, TOP_K, HIDDEN, INNER = 16384, 2, 512, 512
LAYER_COUNTS = counts.scale(shapes.problem("dsv3-up").counts, TOKENS * TOP_K)


def length(problem: Problem) -> int:
    """Products of a chain: enough that its start and its end do not count, and that the card stays hot."""
    flops, moved = 2 * problem.rows * problem.k * problem.n, 2 * problem.groups * problem.k * problem.n
    return max(8, min(64, math.ceil(CHAIN_MICROS / (max(flops / 600e12, moved / 4e12) * 1e6))))


def chain(
    dot: Callable[..., Any], products: int, rebuilt: bool, begin: Callable[..., Any], end: Callable[..., Any]
) -> Callable[..., Any]:
    """So many products in a row, each into a result of its own: the last one, and what `end` makes of all.

    Nothing else is launched between `begin`, which all depend on, and `end`. The barriers make one operand of each
    depend on the result before, so that no two are the same call.

    Args:
        dot: Product of x, w and `groups`.
        products: How many.
        rebuilt: Whether each has `groups` of its own, and so a schedule, or all have the same.
        begin: Gives the groups back.
        end: Takes all results.
    """

    def run(x: Any, w: Any, groups: Any) -> Any:
        groups, results = begin(groups), []
        for _ in range(products):
            y = dot(x, w, groups)
            if rebuilt:
                groups, y = jax.lax.optimization_barrier((groups, y))
            else:
                x, y = jax.lax.optimization_barrier((x, y))
            results.append(y)
        return y, end(*results)

    return run


def calls_in(text: str, target: str) -> int:
    """How often a compiled program calls a target."""
    return text.count(f'custom_call_target="{target}')


def layer(dot: Callable[..., Any]) -> Callable[..., Any]:
    """Loss and all gradients of one expert layer, jitted."""

    def loss(x: Any, gate_up: Any, down: Any, sizes: Any) -> Any:
        gate, up = jnp.split(dot(x, gate_up, sizes).astype(jnp.float32), 2, axis=1)
        y = dot((jax.nn.silu(gate) * up).astype(x.dtype), down, sizes)
        return (y.astype(jnp.float32) ** 2).mean()

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))


def distance(got: Any, want: Any) -> float:
    """Size of the difference over the size of what is wanted."""
    got, want = (each.astype(jnp.float32) for each in (got, want))
    return float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))
