"""A product seen before, from CuPy arrays: one look-up, then the launches. `ops` asks here first.

Repeats what the general path has done, in its plain form alone: each array a `cupy.ndarray`, all on the device that is
current, in a thread that has launched before; no check of the offsets, no capture. Of anything else `call` says so
before it has done anything, and the general path goes on: it is the one place for errors.
perf: bench/notes/0005-host-cost.md
"""

import sys
from typing import Any, NamedTuple

from . import _device, _launch, _plan, _schedule
from ._arrays import families, lifetime
from ._schedule import Schedule

MAX_ENTRIES = 4096


class Entry(NamedTuple):
    """What a call needs besides addresses."""

    plan: _plan.Plan
    fill: _launch.Launcher | None  # None where the caller gives a Schedule
    out_shape: tuple[int, ...]
    out_dtype: Any  # as CuPy takes it
    table_bytes: int  # of the scratch, for a table of its own
    scratch_bytes: int
    counters: int | None  # where a Schedule's table has those of this product; None where they must be its own


class Cupy(NamedTuple):
    """What is asked of CuPy in each call."""

    ndarray: Any = None
    get_device: Any = None
    get_current_stream: Any = None
    alloc: Any = None


entries: dict[tuple[Any, ...], Entry] = {}
_cupy = Cupy()  # until the first of its arrays comes
_device.forget_in_child(entries.clear)


def call(
    op: str, a: Any, b: Any, offs: Any, out: Any, out_dtype: Any, group_offset: Any, check: Any, config: Any,
    accumulate: Any = False, num_groups: Any = None,
) -> tuple[Any, tuple[Any, ...] | None]:  # fmt: skip
    """The product, if it was seen before.

    Args: as of `ops.grouped_mm_wgrad`; `a` is x, and `b` is w or dy.

    Returns:
        (result, None); or (None, key) for `keep`, once the general path has a plan; or (None, None) for a call that
        only the general path takes.
    """
    kind = type(a)
    if kind is not _cupy.ndarray and not _meets(kind):
        return None, None
    schedule = None
    if type(offs) is Schedule:
        schedule, offs = offs, offs.table
    if (
        type(b) is not kind
        or type(offs) is not kind
        or (out is not None and type(out) is not kind)
        or check is not None
        or type(group_offset) is not int  # True is no 1
        or (num_groups is not None and type(num_groups) is not int)
    ):
        return None, None
    a_data, b_data, offs_data = a.data, b.data, offs.data
    a_ptr, b_ptr, offs_ptr = a_data.ptr, b_data.ptr, offs_data.ptr
    device = a_data.device_id
    if schedule is None:
        offs_facts: Any = offs.dtype, offs.shape, offs.strides, offs_ptr & 15
    else:
        offs_facts = _schedule.facts(schedule)
    out_facts, out_ptr = None, 0
    if out is not None:
        out_data = out.data
        out_ptr = out_data.ptr
        out_facts = out.dtype, out.shape, out.strides, out_ptr & 15
        if out_data.device_id != device or out_ptr in (a_ptr, b_ptr):
            return None, None
    key = (
        op, device, config, accumulate, num_groups, out_dtype, group_offset, offs_facts, out_facts,
        a.dtype, a.shape, a.strides, a_ptr & 15, b.dtype, b.shape, b.strides, b_ptr & 15,
    )  # fmt: skip
    try:
        entry = entries.get(key)
    except TypeError:  # something in it has no hash: no plan has either
        return None, None
    if (
        entry is None
        or b_data.device_id != device
        or offs_data.device_id != device
        or _cupy.get_device() != device
        or not lifetime.thread.bound
    ):
        return None, key
    stream = _cupy.get_current_stream(device).ptr
    if stream not in lifetime.LEGACY and lifetime.captured(stream):
        return None, key
    if lifetime.pending:
        lifetime.poll()
    own_tickets = schedule is None or schedule.stream != stream
    return _enqueue(entry, stream, a_ptr, b_ptr, offs_ptr, out, out_ptr, own_tickets), None


def _enqueue(entry: Entry, stream: int, a: int, b: int, offs: int, out: Any, c: int, own_tickets: bool) -> Any:
    """Allocates and launches: what `_call.run` does, knowing that all arrays are CuPy's."""
    plan, fill, out_shape, out_dtype, table_bytes, scratch_bytes, counters = entry
    if out is None:
        out = families.new_array(_cupy.ndarray, _cupy.alloc, out_shape, out_dtype)
        c = out.data.ptr
    if not own_tickets and counters is not None:
        work, start = families.new_scratch(_cupy.alloc, plan.partial_bytes) if plan.partial_bytes else (None, 0)
        plan.launch(stream, a, b, c, offs, offs + counters, start, 0)
        del work
        return out
    work, start = families.new_scratch(_cupy.alloc, scratch_bytes)
    tickets = start + table_bytes
    partials = tickets + plan.zeroed_bytes
    if fill is None:
        _launch.zero(tickets, plan.zeroed_words * 4, stream)
        plan.launch(stream, a, b, c, offs, tickets, partials, 0)
    else:
        fill(stream, offs, 0, start, tickets)
        plan.launch(stream, a, b, c, start, tickets, partials, 0)
    del work  # not before the launches: CuPy gives it to whoever asks next on this stream
    return out


def keep(key: tuple[Any, ...], plan: _plan.Plan, offs: Any, schedule: Schedule | None, host_offset: int | None) -> None:
    """Keeps under a key of `call` what the general path has found.

    Args:
        key: Of the call.
        plan: Of the call.
        offs: View of the offsets, or of the table of `schedule`.
        schedule: What the caller gave instead of offsets.
        host_offset: The group offset that the caller gave.
    """
    if key in entries or plan.idle:
        return
    problem, fill, table_bytes = plan.problem, None, 0
    if schedule is None:
        fill = _schedule.fill_of(plan.table, offs, host_offset, problem.groups, plan.zeroed_words)
        table_bytes = plan.table.nbytes
    if len(entries) >= MAX_ENTRIES:
        entries.clear()  # at once, as other threads look; plans are kept elsewhere
    scratch_bytes = table_bytes + plan.zeroed_bytes + plan.partial_bytes
    out_dtype = families.numpy_dtype(problem.out_dtype)
    counters = plan.counters if plan.restores else None
    entries[key] = Entry(plan, fill, problem.out_shape, out_dtype, table_bytes, scratch_bytes, counters)


def _meets(kind: type) -> bool:
    """Whether `kind` is CuPy's array and the first of them to come."""
    global _cupy
    if _cupy.ndarray is not None or kind is not getattr(sys.modules.get("cupy"), "ndarray", None):
        return False
    cupy = _device.import_cupy()
    _cupy = Cupy(cupy.ndarray, cupy.cuda.runtime.getDevice, cupy.cuda.get_current_stream, cupy.cuda.alloc)
    return True
