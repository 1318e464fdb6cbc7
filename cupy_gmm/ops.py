"""The grouped products: validate, plan, launch. Reads like a table of contents; each step has its own module."""

from typing import Any

from . import _arrays, _call, _checks, _host, _problem, _schedule, _warm
from ._config import GROUPED_MM, WGRAD
from ._schedule import Schedule, async_status, make_schedule

__all__ = ["Schedule", "async_status", "grouped_mm", "grouped_mm_wgrad", "make_schedule", "offs_from_sizes"]

_OUT = frozenset({"out"})


def grouped_mm(
    x: Any,
    w: Any,
    offs: Any,
    *,
    out: Any = None,
    out_dtype: Any = None,
    group_offset: Any = 0,
    check: str | None = None,
    config: str | None = None,
) -> Any:
    """Multiplies every group's rows by that group's weights, in one launch.

        y[r] = x[r] @ w[g]   for rows r of group g,   offs[g - 1] <= r < offs[g]

    The input gradient is the same call with the weights read transposed: `grouped_mm(dy, w.mT, offs)`.

    Args:
        x: (rows, K) bfloat16 or float16, rows sorted by group; any strides and alignment (16-byte aligned rows are
            fast).
        w: (G_local, K, N), dtype of `x`; any strides: `w.mT` of a contiguous (G, N, K) array is as fast.
        offs: (G,) int32 or int64 **end** offsets on the device of `x`, `offs[-1] <= rows`, or a `Schedule`. For counts
            [3, 0, 5] pass [3, 3, 8] (`offs_from_sizes`), without a leading 0, which would be one more group. The
            content is not checked unless `check` says so: the running maximum clamped to [0, rows] counts, whatever
            the integers are.
        out: (rows, N) array to write, any strides without overlap, not read-only, not an input.
        out_dtype: bfloat16, float16 or float32; default the dtype of `out`, else of `x`.
        group_offset: Index in `offs` of `w[0]`: an int, or an int32 device array of one element. Rows of groups without
            local weights come out zero.
        check: None; "async": findings about `offs` are kept for `async_status`; "sync": waits and raises.
        config: Name of a shipped tuning point to force.

    Returns:
        y, (rows, N) in the framework and on the device of `x`. Rows at or past the last end are exact +0.

    Raises:
        ArgumentError: A shape, stride, device or value does not fit; with check="sync" also malformed `offs`.
        DtypeError: A dtype is not offered.
        UnsupportedError: The call is larger than the kernels count.
        CompileError: A kernel could not be compiled or loaded.

    Numerics:
        float32 accumulation in steps of 16 along K from 0, one rounding to nearest even. The same bits on every run;
        a row's bits depend neither on its group's size nor on the tuning point.

    Cost:
        Two launches (schedule or a memset, product), on Hopper with a Schedule of the same stream one; never waits. The
        first call of a kind compiles (cached on disk).

    Source:
        kernels/grouped_mm.cuh.
    """
    result, memo = _warm.call(GROUPED_MM, x, w, offs, out, out_dtype, group_offset, check, config)
    if result is not None:
        return result
    if x is None or w is None or offs is None:
        _checks.required(("x", x), ("w", w), ("offs", offs))
    schedule = offs if type(offs) is Schedule else None
    host_offset, device_offset = _schedule.split_group_offset(group_offset)
    if check is not None:
        _problem.check_mode(check)
    site, views = _arrays.locate(
        ("x", x), ("w", w), ("offs", schedule.table if schedule else offs), ("out", out),
        ("group_offset", device_offset), writable=_OUT,
    )  # fmt: skip
    xv, wv, ov, outv, gv = views
    if site.is_cpu:
        problem = _problem.forward(xv, wv, outv, out_dtype)
        if outv is not None:
            _call.check_aliasing(xv, wv, outv)
        offsets = _call.host_offsets(problem, schedule, ov, gv, host_offset, check)
        native = _host.grouped_mm(site, problem, views, offsets, config)
        return out if out is not None else site.finish(native)
    key = _call.key(GROUPED_MM, xv, wv, ov, outv, out_dtype, schedule, site.device, config, host_offset, False)
    plan = _call.plans.get(key)
    if plan is None:
        problem = _problem.forward(xv, wv, outv, out_dtype)
        plan = _call.new_plan(key, problem, views, schedule, host_offset, config, site)
    result = _call.run(plan, site, views, out, schedule, host_offset, check)
    if memo is not None:
        _warm.keep(memo, plan, ov, schedule, host_offset)
    return result


def grouped_mm_wgrad(
    x: Any,
    dy: Any,
    offs: Any,
    *,
    out: Any = None,
    accumulate: bool = False,
    out_dtype: Any = None,
    num_groups: int | None = None,
    group_offset: Any = 0,
    check: str | None = None,
    config: str | None = None,
) -> Any:
    """Weight gradient of `grouped_mm`: every group's rows are the reduction axis.

        dw[g] = x[rows of g].T @ dy[rows of g]   (+ dw[g] with accumulate)

    Args:
        x: (rows, K) bfloat16 or float16, as given to `grouped_mm`; any strides and alignment.
        dy: (rows, N), dtype of `x`.
        offs: (G,) int32 or int64 **end** offsets on the device of `x`, or a `Schedule`; see `grouped_mm`.
        out: (G_local, K, N) array to write or add to: any strides without overlap, so also the `.mT` of a (G, N, K)
            array.
        accumulate: Add to `out` in float32 before the one rounding; the bytes of an empty group stay as they are.
        out_dtype: bfloat16, float16 or float32; default the dtype of `out`, else of `x`.
        num_groups: G_local; default that of `out`, else all groups from `group_offset` on.
        group_offset: Index in `offs` of `dw[0]`: an int, or an int32 device array of one element.
        check: None, "async" or "sync"; see `grouped_mm`.
        config: Name of a shipped tuning point to force.

    Returns:
        dw, (G_local, K, N) in the framework of `x`. An empty group's matrix is exact +0; rows past the last end add
        nothing.

    Raises:
        ArgumentError: A shape, stride, device or value does not fit; with check="sync" also malformed `offs`.
        DtypeError: A dtype is not offered.
        UnsupportedError: The call is larger than the kernels count.
        CompileError: A kernel could not be compiled or loaded.

    Numerics:
        float32 accumulation in steps of 16 along a group's rows, one rounding. A group much longer than the mean may be
        summed in pieces of a length fixed by (rows, K, N), added in order: the same bits on every run.

    Cost:
        Two launches (schedule or a memset, product), never waits; the first call of a kind compiles (cached on disk).

    Source:
        kernels/grouped_mm_wgrad.cuh.
    """
    result, memo = _warm.call(WGRAD, x, dy, offs, out, out_dtype, group_offset, check, config, accumulate, num_groups)
    if result is not None:
        return result
    if x is None or dy is None or offs is None:
        _checks.required(("x", x), ("dy", dy), ("offs", offs))
    schedule = offs if type(offs) is Schedule else None
    host_offset, device_offset = _schedule.split_group_offset(group_offset)
    if check is not None:
        _problem.check_mode(check)
    site, views = _arrays.locate(
        ("x", x), ("dy", dy), ("offs", schedule.table if schedule else offs), ("out", out),
        ("group_offset", device_offset), writable=_OUT,
    )  # fmt: skip
    xv, dyv, ov, outv, gv = views
    groups = _call.local_groups(num_groups, outv, ov, schedule, host_offset)
    if site.is_cpu:
        problem = _problem.weight_gradient(xv, dyv, outv, out_dtype, groups, accumulate)
        if outv is not None:
            _call.check_aliasing(xv, dyv, outv)
        offsets = _call.host_offsets(problem, schedule, ov, gv, host_offset, check)
        native = _host.grouped_mm_wgrad(site, problem, views, offsets, config)
        return out if out is not None else site.finish(native)
    key = _call.key(
        WGRAD, xv, dyv, ov, outv, out_dtype, schedule, site.device, config, host_offset, (accumulate, groups)
    )
    plan = _call.plans.get(key)
    if plan is None:
        problem = _problem.weight_gradient(xv, dyv, outv, out_dtype, groups, accumulate)
        plan = _call.new_plan(key, problem, views, schedule, host_offset, config, site)
    result = _call.run(plan, site, views, out, schedule, host_offset, check)
    if memo is not None:
        _warm.keep(memo, plan, ov, schedule, host_offset)
    return result


def offs_from_sizes(group_sizes: Any) -> Any:
    """End offsets of group sizes: their running sum.

    Args:
        group_sizes: (G,) int32 or int64 rows of each group, any framework, on the device or the CPU. The
            content is not checked: a negative size makes the offsets decrease, which `check=` of the products reports.

    Returns:
        (G,) int32 end offsets in the framework and on the device of `group_sizes`; sums past the int32 range saturate.

    Raises:
        ArgumentError: Not one axis.
        DtypeError: Not int32 or int64.

    Cost:
        One launch, never waits.

    Source:
        kernels/schedule.cu.
    """
    return _schedule.running_sum(group_sizes)
