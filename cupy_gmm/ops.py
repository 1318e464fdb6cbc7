"""The grouped products: validate, plan, launch. Reads like a table of contents; each step has its own module."""

from typing import Any

from . import _arrays, _host, _launch, _plan, _problem, _schedule
from ._config import GROUPED_MM, WGRAD
from ._params import PARAMS_POINTERS
from ._schedule import Schedule, async_status, make_schedule
from .errors import ArgumentError

__all__ = ["Schedule", "async_status", "grouped_mm", "grouped_mm_wgrad", "make_schedule", "offs_from_sizes"]

_OUT = frozenset({"out"})
_plans: dict[tuple[Any, ...], _plan.Plan] = {}


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
        x: (rows, K) bfloat16 or float16, rows sorted by group; any strides and alignment (16-byte aligned rows are fast).
        w: (G_local, K, N), dtype of `x`; any strides: `w.mT` of a contiguous (G, N, K) array is as fast.
        offs: (G,) int32 or int64 **end** offsets on the device of `x`, `offs[-1] <= rows`, or a `Schedule`. For counts
            [3, 0, 5] pass [3, 3, 8] (`offs_from_sizes`). The content is not checked unless `check` says so: the running
            maximum clamped to [0, rows] counts, whatever the integers are.
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
        float32 accumulation in steps of 16 along K from 0, one rounding to nearest even. The same bits on every run; a row's
        bits depend neither on its group's size nor on the tuning point.

    Cost:
        Two launches (schedule or a memset, product), never waits; the first call of a kind compiles (cached on disk).

    Source:
        kernels/grouped_mm.cuh.
    """
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
        offsets = _host_offsets(schedule, ov, gv, host_offset, xv, len(wv.shape) and wv.shape[0], check)
        native = _host.grouped_mm(site, xv, wv, outv, out_dtype, offsets, config)
        return out if out is not None else site.finish(native)
    key = _key(GROUPED_MM, xv, wv, ov, outv, out_dtype, schedule, site.device, config, host_offset, False)
    plan = _plans.get(key)
    if plan is None:
        problem = _problem.forward(xv, wv, outv, out_dtype)
        plan = _plans[key] = _new_plan(problem, xv, ov, gv, schedule, host_offset, config, site)
    return _run(plan, site, views, out, schedule, host_offset, check)


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
        out: (G_local, K, N) array to write or add to: any strides without overlap, so also the `.mT` of a (G, N, K) array.
        accumulate: Add to `out` in float32 before the one rounding; the bytes of an empty group stay as they are.
        out_dtype: bfloat16, float16 or float32; default the dtype of `out`, else of `x`.
        num_groups: G_local; default that of `out`, else all groups from `group_offset` on.
        group_offset: Index in `offs` of `dw[0]`: an int, or an int32 device array of one element.
        check: None, "async" or "sync"; see `grouped_mm`.
        config: Name of a shipped tuning point to force.

    Returns:
        dw, (G_local, K, N) in the framework of `x`. An empty group's matrix is exact +0; rows past the last end add nothing.

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
    schedule = offs if type(offs) is Schedule else None
    host_offset, device_offset = _schedule.split_group_offset(group_offset)
    if check is not None:
        _problem.check_mode(check)
    site, views = _arrays.locate(
        ("x", x), ("dy", dy), ("offs", schedule.table if schedule else offs), ("out", out),
        ("group_offset", device_offset), writable=_OUT,
    )  # fmt: skip
    xv, dyv, ov, outv, gv = views
    groups = _local_groups(num_groups, outv, ov, schedule, host_offset)
    if site.is_cpu:
        offsets = _host_offsets(schedule, ov, gv, host_offset, xv, groups, check)
        native = _host.grouped_mm_wgrad(site, xv, dyv, outv, out_dtype, groups, accumulate, offsets, config)
        return out if out is not None else site.finish(native)
    key = _key(WGRAD, xv, dyv, ov, outv, out_dtype, schedule, site.device, config, host_offset, (accumulate, groups))
    plan = _plans.get(key)
    if plan is None:
        problem = _problem.weight_gradient(xv, dyv, outv, out_dtype, groups, accumulate)
        plan = _plans[key] = _new_plan(problem, xv, ov, gv, schedule, host_offset, config, site)
    return _run(plan, site, views, out, schedule, host_offset, check)


def offs_from_sizes(group_sizes: Any) -> Any:
    """End offsets of group sizes: their running sum.

    Args:
        group_sizes: (G,) int32 or int64 rows of each group, any framework, on the device or the CPU.

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


def _key(
    op: str, a: Any, b: Any, offs: Any, out: Any, out_dtype: Any, schedule: Schedule | None, device: int, config: Any,
    host_offset: int | None, rest: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """What a plan depends on: everything but addresses, of which the alignment counts."""
    return (
        op, device, config, rest, out_dtype, host_offset,
        a.dtype, a.shape, a.strides, a.ptr & 15, b.dtype, b.shape, b.strides, b.ptr & 15,
        offs.shape if schedule is None else (schedule.groups, schedule.rows, schedule.group_offset), offs.dtype,
        None if out is None else (out.dtype, out.shape, out.strides, out.ptr & 15),
    )  # fmt: skip


def _new_plan(
    problem: _problem.Problem, x: Any, offs: Any, offset_view: Any, schedule: Schedule | None, host_offset: int | None,
    config: str | None, site: Any,
) -> _plan.Plan:  # fmt: skip
    groups = _check_offsets(problem.rows, problem.groups, offs, offset_view, schedule, host_offset)
    with site.guard():
        return _plan.build(problem, groups, schedule.height if schedule else None, config, site.device)


def _check_offsets(
    rows: int, local: int, offs: Any, offset_view: Any, schedule: Schedule | None, host_offset: int | None
) -> int:
    """Checks `offs` or the Schedule against the operands; returns the number of groups."""
    if schedule is None:
        groups = _problem.offsets(offs)
        _schedule.check_group_offset(offset_view)
        if host_offset is not None:
            _problem.group_range(host_offset, groups, local)
        return groups
    if schedule.rows != rows:
        raise ArgumentError(
            f"`offs` is a Schedule for {schedule.rows} rows: expected one for {rows}, as `x` has {rows} rows; "
            "make it with `make_schedule(offs, rows=x.shape[0])`."
        )
    if offset_view is not None or host_offset not in (0, schedule.group_offset):
        raise ArgumentError(
            f"`group_offset` is {host_offset if offset_view is None else 'an array'} and `offs` is a Schedule made with "
            f"`group_offset` {schedule.group_offset}: pass it to `make_schedule` and leave it out here."
        )
    if schedule.group_offset is not None:
        _problem.group_range(schedule.group_offset, schedule.groups, local)
    return schedule.groups


def _local_groups(num_groups: Any, out: Any, offs: Any, schedule: Schedule | None, host_offset: int | None) -> int:
    """Groups of a weight gradient: said, or those of `out`, or all from the offset on."""
    if out is not None and len(out.shape) == 3 and num_groups is None:
        return int(out.shape[0])
    groups = schedule.groups if schedule else _problem.offsets(offs)
    if num_groups is None:
        offset = host_offset if schedule is None else schedule.group_offset
        if offset is None:
            raise ArgumentError("`num_groups` is None and `group_offset` is on the device: say how many groups are local.")
        return max(groups - max(offset, 0), 0)
    if isinstance(num_groups, bool) or not hasattr(num_groups, "__index__") or num_groups < 0:
        raise ArgumentError(f"`num_groups` is {num_groups!r}: expected the number of local groups, an int of 0 or more.")
    return int(num_groups)


def _host_offsets(
    schedule: Schedule | None, offs: Any, offset_view: Any, host_offset: int | None, x: Any, local: int, check: str | None
) -> _host.Offsets:
    _check_offsets(x.shape[0] if x.shape else 0, local, offs, offset_view, schedule, host_offset)
    if offset_view is not None:
        host_offset = int(_arrays.host(offset_view).reshape(-1)[0])
    return _host.Offsets(offs, schedule, host_offset or 0, check)


def _run(
    plan: _plan.Plan, site: Any, views: Any, out: Any, schedule: Schedule | None, host_offset: int | None, check: str | None
) -> Any:
    """Allocates, builds the schedule unless it is given, launches."""
    a, b, offs, out_view, offset_view = views
    problem, table = plan.problem, plan.table
    if out_view is not None and out_view.ptr and out_view.ptr in (a.ptr, b.ptr):
        raise ArgumentError("`out` begins where an input does: pass an array of its own.")
    with site.guard():
        if schedule is None and site.capturing():
            raise ArgumentError(
                "`offs` is an array and the stream is being captured into a CUDA graph: pass a Schedule, refilled inside the "
                "capture by `make_schedule(offs, rows, out=schedule)`, since CuPy has no memory that a graph owns."
            )
        native = out
        if out_view is None:
            native, out_view = site.empty(problem.out_shape, problem.out_dtype)
        if schedule is None:
            work = site.scratch(table.nbytes + plan.zeroed_bytes + plan.partial_bytes)
            table_ptr, tickets = work.ptr, work.ptr + table.nbytes
            _schedule.build(
                site, table, offs, table_ptr, host_offset or 0, offset_view, problem.groups, plan.zeroed_words
            )
        else:
            work = site.scratch(plan.zeroed_bytes + plan.partial_bytes)
            table_ptr, tickets = offs.ptr, work.ptr
            _launch.memset32(tickets, plan.zeroed_words * 4, site)
        if check == "sync":
            _schedule.raise_for_status(_schedule.read_word(table_ptr + 4 * _schedule.STATUS_WORD, site), problem.rows)
        if plan.grid:
            status = _schedule.status_word(site.device).data.ptr if check == "async" else 0
            pointers = PARAMS_POINTERS.pack(
                a.ptr, b.ptr, out_view.ptr, table_ptr, tickets, status, tickets + plan.zeroed_bytes
            )
            config = plan.config
            _launch.launch(plan.function, plan.grid, config.threads, config.shared_bytes, site, pointers + plan.facts)
        site.hold((*views, work))
    return out if out is not None else site.finish(native)
