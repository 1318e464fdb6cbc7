"""Products, routing and the expert layer inside JAX: under `jit`, `grad`, `checkpoint`, `scan` and `shard_map`.

    y = ragged_dot(lhs, rhs, group_sizes)      names and meaning of jax.lax.ragged_dot
    y = grouped_mm(x, w, offs)                 end offsets, as in the rest of this library
    dw = grouped_mm_wgrad(x, dy, offs)

    routing = route(expert_idx, num_experts)   the stable order of assignments by expert
    xs = permute(x, routing)                   rows into that order
    y = combine(ys, routing, weights)          and back, weighted and added
    h = silu_mul(gate_up)
    y = expert_ffn(x, w_gate_up, w_down, expert_idx, expert_weight)      all of it

On CUDA devices these are the kernels of this library; elsewhere `jax.lax.ragged_dot` and `jax.numpy`, with the same
results for the same arguments, so one model file runs anywhere. Importing this imports JAX and tells XLA the names of
the calls: a program that was exported or cached needs that before it is loaded.
"""

from typing import Any

import jax.numpy as jnp

from .. import _call, _problem
from ..errors import ArgumentError
from . import _arguments, _axes, _fallback, _handler, _lowering, _products, _row_wire, _wire
from ._wire import SCHEDULE_TARGET as SCHEDULE
from ._wire import ScheduleCall
from .layer import combine, expert_ffn, permute, route, silu_mul

__all__ = [
    "SCHEDULE", "TARGETS", "combine", "expert_ffn", "grouped_mm", "grouped_mm_wgrad", "permute", "ragged_dot", "route",
    "silu_mul",
]  # fmt: skip

TARGETS = (*_wire.TARGETS, *_row_wire.TARGET.values())

_handler.register()


def ragged_dot(
    lhs: Any,
    rhs: Any,
    group_sizes: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    group_offset: Any = None,
    out_sharding: Any = None,
) -> Any:
    """Multiplies every group's rows by that group's matrix: `jax.lax.ragged_dot`, for any sizes.

        y[r] = lhs[r] @ rhs[g]   for the group_sizes[g] rows r of group g, which follow those of group g - 1

    Differentiable once in `lhs` and `rhs` by `jax.grad`; both gradients are products of the same schedule. Two calls
    with the same sizes inside one `jit` build one schedule; under `jax.checkpoint` the recomputation builds it again,
    unless the policy keeps it, a few KB: `jax.checkpoint_policies.save_only_these_names(cupy_gmm.jax.SCHEDULE)`. Call
    it inside `shard_map` where arrays are sharded: under plain `jit` XLA gathers them first.

    Args:
        lhs: (rows, K) bfloat16 or float16, rows sorted by group.
        rhs: (G_local, K, N), dtype of `lhs`. G_local is that of `group_sizes`, unless `group_offset` is given.
        group_sizes: (G,) integers, rows of each group. The content is not checked: the running maximum of the running
            sum, clamped to [0, rows], is where groups end, whatever the integers are.
        precision: As for `jax.lax.ragged_dot`; bfloat16 and float16 are always summed in float32.
        preferred_element_type: dtype of the result, bfloat16, float16 or float32; default the dtype of `lhs`.
        group_offset: Index in `group_sizes` of `rhs[0]`: an int, or an int32 array of one element. Rows of groups
            without local weights come out zero.
        out_sharding: None.

    Returns:
        y, (rows, N). Rows past the last group are exact +0. Other dtypes of the operands or of the result than those
        above go to `jax.lax.ragged_dot` on every platform, at a copy of `rhs`, with the same meaning of sizes.

    Raises:
        ArgumentError: A shape or value does not fit.
        DtypeError: `group_sizes` or `group_offset` has a dtype that is not offered.
        UnsupportedError: `jax.vmap`, or a second derivative; the call is larger than the kernels count.

    Numerics:
        As `cupy_gmm.grouped_mm`; elsewhere than on CUDA float32 sums in the order of XLA, one rounding. The gradient
        that comes in is rounded to the dtype of `lhs` first. Without the kernels a NaN or infinity in the weights of a
        group that has rows reaches all rows.

    Cost:
        On CUDA three launches for the first product of some sizes and one for every further one; weight gradients, and
        all products of the portable path, with a memset of a few words. Nothing is allocated, compiled or waited for in
        the call, and XLA can replay it in a command buffer. Kernels are compiled when XLA loads the program. New sizes
        trace nothing anew.

    Source:
        kernels/grouped_mm.cuh, kernels/grouped_mm_wgrad.cuh.
    """
    lhs, rhs, sizes = (
        _arguments.array(name, value) for name, value in (("lhs", lhs), ("rhs", rhs), ("group_sizes", group_sizes))
    )
    _arguments.ragged(lhs, rhs, sizes)
    if out_sharding is not None:
        raise ArgumentError(
            f"`out_sharding` is {out_sharding!r}: expected None; call inside `jax.shard_map`, where each device has "
            "its own rows."
        )
    schedule_groups = sizes.shape[0]
    host_offset, offset = _arguments.offset(group_offset, schedule_groups, "group_sizes")
    _arguments.ragged_groups(rhs.shape[0], schedule_groups, host_offset, exact=group_offset is None)
    if sizes.dtype not in (jnp.int32, jnp.int64):
        sizes = sizes.astype("int32")
    wanted = None if preferred_element_type is None else jnp.dtype(preferred_element_type).name
    dtype = lhs.dtype.name
    offered = dtype == rhs.dtype and dtype in _problem.INPUT_DTYPES and (wanted or dtype) in _problem.OUTPUT_DTYPES
    if offered:
        problem = _problem.forward(_arguments.view(lhs), _arguments.view(rhs), None, wanted)
        return _forward(problem, lhs, rhs, sizes, True, host_offset, offset, None)
    call = ScheduleCall(lhs.shape[0], schedule_groups, True, sizes.dtype == jnp.int64, host_offset)
    table = _fallback.schedule(
        sizes, host_offset if offset is None else offset, rows=call.rows, sizes=True, words=call.words
    )
    return _fallback.grouped_mm(lhs, rhs, table, schedule_groups=schedule_groups, out_dtype=wanted, precision=precision)


def grouped_mm(
    x: Any, w: Any, offs: Any, *, out_dtype: Any = None, group_offset: Any = 0, config: str | None = None
) -> Any:
    """Multiplies every group's rows by that group's weights: `cupy_gmm.grouped_mm` as JAX traces it.

        y[r] = x[r] @ w[g]   for rows r of group g,   offs[g - 1] <= r < offs[g]

    Differentiable once in `x` and `w`, as `ragged_dot` is.

    Args:
        x: (rows, K) bfloat16 or float16, rows sorted by group.
        w: (G_local, K, N), dtype of `x`.
        offs: (G,) int32 or int64 **end** offsets. The content is not checked: the running maximum clamped to
            [0, rows] counts. For sizes call `ragged_dot`.
        out_dtype: bfloat16, float16 or float32; default the dtype of `x`.
        group_offset: Index in `offs` of `w[0]`: an int, or an int32 array of one element. Rows of groups without local
            weights come out zero.
        config: Name of a shipped tuning point to force on CUDA; not for the gradients.

    Returns:
        y, (rows, N). Rows at or past the last end are exact +0.

    Raises:
        ArgumentError: A shape or value does not fit.
        DtypeError: A dtype is not offered.
        UnsupportedError: `jax.vmap`, or a second derivative; the call is larger than the kernels count.

    Numerics:
        As `ragged_dot`.

    Cost:
        As `ragged_dot`, with one launch less.

    Source:
        kernels/grouped_mm.cuh, kernels/grouped_mm_wgrad.cuh.
    """
    x, w, offs = (_arguments.array(name, value) for name, value in (("x", x), ("w", w), ("offs", offs)))
    groups = _problem.offsets(_arguments.view(offs))
    problem = _problem.forward(_arguments.view(x), _arguments.view(w), None, out_dtype)
    host_offset, offset = _arguments.offset(group_offset, groups)
    if offset is None:
        _problem.group_range(problem, groups, host_offset)
    return _forward(problem, x, w, offs, False, host_offset, offset, config)


def grouped_mm_wgrad(
    x: Any, dy: Any, offs: Any, *, out_dtype: Any = None, num_groups: int | None = None, group_offset: Any = 0,
    config: str | None = None,
) -> Any:  # fmt: skip
    """Weight gradient of `grouped_mm`, for those who write their own rules: every group's rows are the reduction axis.

        dw[g] = x[rows of g].T @ dy[rows of g]

    Not differentiable itself.

    Args:
        x: (rows, K) bfloat16 or float16, as given to `grouped_mm`.
        dy: (rows, N), dtype of `x`.
        offs: (G,) int32 or int64 **end** offsets; see `grouped_mm`.
        out_dtype: bfloat16, float16 or float32; default the dtype of `x`.
        num_groups: G_local; default all groups from `group_offset` on.
        group_offset: Index in `offs` of `dw[0]`: an int, or an int32 array of one element, which needs `num_groups`.
        config: Name of a shipped tuning point to force on CUDA.

    Returns:
        dw, (G_local, K, N). An empty group's matrix is exact +0; rows past the last end add nothing.

    Raises:
        ArgumentError: A shape or value does not fit.
        DtypeError: A dtype is not offered.
        UnsupportedError: `jax.vmap`, or a derivative; the call is larger than the kernels count.

    Numerics:
        As `cupy_gmm.grouped_mm_wgrad`; elsewhere than on CUDA float32 sums in the order of XLA, one rounding.

    Cost:
        As `grouped_mm`, with scratch for the partial sums of split groups.

    Source:
        kernels/grouped_mm_wgrad.cuh.
    """
    x, dy, offs = (_arguments.array(name, value) for name, value in (("x", x), ("dy", dy), ("offs", offs)))
    ends = _arguments.view(offs)
    schedule_groups = _problem.offsets(ends)
    host_offset, offset = _arguments.offset(group_offset, schedule_groups)
    groups = _call.local_groups(num_groups, None, ends, None, host_offset if offset is None else None)
    problem = _problem.weight_gradient(_arguments.view(x), _arguments.view(dy), None, out_dtype, groups, False)
    if offset is None:
        _problem.group_range(problem, schedule_groups, host_offset)
    call = _products.call_of(problem, schedule_groups, config)
    if 0 in (*problem.out_shape, problem.rows):
        return jnp.zeros(problem.out_shape, problem.out_dtype)
    table = _products.table(offs, False, problem.rows, host_offset, offset)
    return _lowering.product(*_axes.alike(x, dy, table), call=call)


def _forward(
    problem: _problem.Problem, x: Any, w: Any, offs: Any, sizes: bool, host_offset: int, offset: Any, config: str | None
) -> Any:
    call = _products.call_of(problem, offs.shape[0], config)
    return _products.forward(x, w, lambda: _products.table(offs, sizes, problem.rows, host_offset, offset), call)
