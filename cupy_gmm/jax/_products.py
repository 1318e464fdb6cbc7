"""Calls of products from arguments that are checked: what `ragged_dot`, `grouped_mm` and the layer share."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from .. import _heuristics, _problem
from . import _gradients, _lowering
from ._wire import NONE, ProductCall, ScheduleCall


def call_of(problem: _problem.Problem, schedule_groups: int, config: str | None) -> ProductCall:
    """What travels with a product; a forced tuning point must be one of its operation."""
    if config is not None:
        _heuristics.forced(config, problem.op)
    return ProductCall(
        problem.op, problem.rows, problem.k, problem.n, problem.groups, schedule_groups, problem.dtype,
        problem.out_dtype, False, config or NONE,
    )  # fmt: skip


def table(offs: Any, sizes: bool, rows: int, host_offset: int, offset: Any) -> Any:
    """What all products over the same rows share; there must be rows.

    Args:
        offs: End offsets or sizes.
        sizes: Whether it is sizes.
        rows: Rows of x.
        host_offset: Index of the first local group, or -1 where it is traced.
        offset: The traced one, or None.
    """
    call = ScheduleCall(rows, offs.shape[0], sizes, offs.dtype == jnp.int64, host_offset)
    return _lowering.schedule(offs, offset, call)


def forward(x: Any, w: Any, shared: Callable[[], Any], call: ProductCall) -> Any:
    """The forward product with its gradients.

    Args:
        x: (rows, k).
        w: (groups, k, n).
        shared: Gives the table; not called where nothing is multiplied: XLA has no address for nothing.
        call: Facts of the product.
    """
    if 0 in (call.rows, call.k, call.n, call.groups):
        return jnp.zeros((call.rows, call.n), call.out_dtype)
    return _gradients.grouped_mm(x, w, shared(), call)
