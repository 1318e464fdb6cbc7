"""One call between validation and launch: the key of its plan, checks of `offs` against the operands, the run."""

import contextlib
from typing import Any

from . import _arrays, _checks, _device, _host, _launch, _plan, _problem, _schedule
from ._schedule import Schedule
from .errors import ArgumentError

# Row counts may change every step, and each has a plan of its own: the oldest go first.
MAX_PLANS = 4096
plans: dict[tuple[Any, ...], _plan.Plan] = {}
_device.forget_in_child(plans.clear)


def key(
    op: str, a: Any, b: Any, offs: Any, out: Any, out_dtype: Any, schedule: Schedule | None, device: int, config: Any,
    host_offset: int | None, rest: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """What a plan depends on: everything but addresses, of which the alignment counts."""
    return (
        op, device, config, rest, out_dtype, host_offset,
        a.dtype, a.shape, a.strides, a.ptr & 15, b.dtype, b.shape, b.strides, b.ptr & 15,
        offs.shape if schedule is None else _schedule.facts(schedule), offs.dtype,
        None if out is None else (out.dtype, out.shape, out.strides, out.ptr & 15),
    )  # fmt: skip


def new_plan(
    key: tuple[Any, ...],
    problem: _problem.Problem,
    views: Any,
    schedule: Schedule | None,
    host_offset: int | None,
    config: str | None,
    site: Any,
) -> _plan.Plan:
    """Makes the plan of `problem` and keeps it under `key`."""
    groups = check_offsets(problem, views[2], views[4], schedule, host_offset)
    with site.guard():
        plan = _plan.build(problem, groups, schedule.shape if schedule else None, config, site.device)
    keep(plans, key, plan, MAX_PLANS)
    return plan


def keep(kept: dict[Any, Any], key: Any, value: Any, most: int) -> None:
    """Puts one more among what is kept, of which the oldest go first; other threads may do so too."""
    while len(kept) >= most:
        with contextlib.suppress(RuntimeError, StopIteration):  # another thread was faster
            kept.pop(next(iter(kept)), None)
    kept[key] = value


def check_aliasing(a: Any, b: Any, out: Any) -> None:
    """`out` must not begin where an input does: it is written while they are read."""
    if out.ptr and out.ptr in (a.ptr, b.ptr):
        raise ArgumentError("`out` begins where an input does: pass an array of its own.")


def check_offsets(
    problem: _problem.Problem, offs: Any, offset_view: Any, schedule: Schedule | None, host_offset: int | None
) -> int:
    """Checks `offs` or the Schedule against the operands; returns the number of groups."""
    if schedule is None:
        groups = _problem.offsets(offs)
        _schedule.check_group_offset(offset_view)
        if host_offset is not None:
            _problem.group_range(problem, groups, host_offset)
        return groups
    rows = problem.rows
    if schedule.rows != rows:
        raise ArgumentError(
            f"`offs` is a Schedule for {schedule.rows} rows: expected one for {rows}, as `x` has {rows} rows; "
            "make it with `make_schedule(offs, rows=x.shape[0])`."
        )
    if offset_view is not None or host_offset not in (0, schedule.group_offset):
        raise ArgumentError(
            f"`group_offset` is {host_offset if offset_view is None else 'an array'} and `offs` is a Schedule made "
            f"with `group_offset` {schedule.group_offset}: pass it to `make_schedule` and leave it out here."
        )
    if schedule.group_offset is not None:
        _problem.group_range(problem, schedule.groups, schedule.group_offset)
    return schedule.groups


def local_groups(num_groups: Any, out: Any, offs: Any, schedule: Schedule | None, host_offset: int | None) -> int:
    """Groups of a weight gradient: said, or those of `out`, or all from the offset on."""
    if out is not None and len(out.shape) == 3 and num_groups is None:
        return int(out.shape[0])
    groups = schedule.groups if schedule else _problem.offsets(offs)
    if num_groups is None:
        offset = host_offset if schedule is None else schedule.group_offset
        if offset is None:
            raise ArgumentError(
                "`num_groups` is None and `group_offset` is on the device: pass `num_groups=`, the number of groups "
                "of the result."
            )
        return max(groups - max(offset, 0), 0)
    count = _checks.whole_number("num_groups", num_groups, "the number of groups of the result")
    if count < 0:
        raise ArgumentError(f"`num_groups` is {count}: expected 0 or more, the number of groups of the result.")
    return count


def host_offsets(
    problem: _problem.Problem,
    schedule: Schedule | None,
    offs: Any,
    offset_view: Any,
    host_offset: int | None,
    check: str | None,
) -> _host.Offsets:
    check_offsets(problem, offs, offset_view, schedule, host_offset)
    if offset_view is not None:
        host_offset = int(_arrays.host(offset_view).reshape(-1)[0])
    return _host.Offsets(offs, schedule, host_offset or 0, check)


def _check_capture(site: Any, schedule: Schedule | None, check: str | None) -> None:
    """What a call cannot do while its stream is captured into a CUDA graph."""
    if schedule is None and site.capturing():
        raise ArgumentError(
            "`offs` is an array and the stream is being captured into a CUDA graph: pass a Schedule, refilled inside "
            "the capture by `make_schedule(offs, rows, out=schedule)`, since CuPy has no memory that a graph owns."
        )
    if check == "sync":
        raise ArgumentError(
            '`check` is "sync", which waits, and the stream is being captured into a CUDA graph: pass "async" and read '
            "`async_status()` after a replay."
        )
    if check == "async" and not _schedule.has_status_word(site.device):
        raise ArgumentError(
            '`check` is "async" for the first time, and the stream is being captured into a CUDA graph: call '
            "`async_status()` once before the capture, which allocates the word that findings go to."
        )


def run(
    plan: _plan.Plan,
    site: Any,
    views: Any,
    out: Any,
    schedule: Schedule | None,
    host_offset: int | None,
    check: str | None,
) -> Any:
    """Allocates, builds the schedule unless it is given, launches."""
    a, b, offs, out_view, offset_view = views
    problem, table = plan.problem, plan.table
    if out_view is not None:
        check_aliasing(a, b, out_view)
    if offset_view is not None:
        _schedule.check_group_offset(offset_view)
    with site.guard():
        if site.in_graph():
            _check_capture(site, schedule, check)
        native = out
        if out_view is None:
            native, out_view = site.empty(problem.out_shape, problem.out_dtype)
        if schedule is None:
            work = site.scratch(table.nbytes + plan.zeroed_bytes + plan.partial_bytes)
            table_ptr, tickets = work.ptr, work.ptr + table.nbytes
            partials = tickets + plan.zeroed_bytes
            fill = _schedule.fill_of(table, offs, host_offset, problem.groups, plan.zeroed_words)
            fill(site.stream, offs.ptr, 0 if offset_view is None else offset_view.ptr, table_ptr, tickets)
        elif plan.restores and schedule.stream == site.stream and not site.in_graph():
            work = site.scratch(plan.partial_bytes) if plan.partial_bytes else None
            table_ptr, tickets = offs.ptr, offs.ptr + plan.counters
            partials = 0 if work is None else work.ptr
        else:
            work = site.scratch(plan.zeroed_bytes + plan.partial_bytes)
            table_ptr, tickets, partials = offs.ptr, work.ptr, work.ptr + plan.zeroed_bytes
            _launch.zero(tickets, plan.zeroed_words * 4, site.stream)
        if check == "sync":
            _schedule.raise_for_status(_schedule.read_word(table_ptr + 4 * _schedule.STATUS_WORD, site), problem.rows)
        if not plan.idle:
            status = _schedule.status_word(site.device).data.ptr if check == "async" else 0
            plan.launch(site.stream, a.ptr, b.ptr, out_view.ptr, table_ptr, tickets, partials, status)
        site.hold((*views, work))
    return out if out is not None else site.finish(native)
