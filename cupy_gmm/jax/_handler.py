"""What XLA calls on a CUDA device: addresses in, launches on XLA's stream. Registered when `cupy_gmm.jax` is imported.

The instantiate stage, which comes once an executable, compiles and loads; the execute stage (`_execute`) launches what
is made here for the addresses it finds. It allocates nothing, waits for nothing, reads nothing back, and always
launches the same work for one call, so XLA may capture it into a command buffer, with arrays that hold nothing yet.
Must not know how calls are made.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax

from .. import _call, _device, _heuristics, _launch, _plan, _table
from .._params import UNKNOWN_GROUPS
from . import _abi, _counters, _row_wire, _wire
from ._execute import Again, Launches, execute
from ._row_handler import Rows
from ._row_wire import RowsCall
from ._wire import ProductCall, ScheduleCall

ALIGNMENT = 16  # bytes; XLA's buffers keep it, and the plans rely on it
MAX_READY = 4096

_ready: dict[tuple[bytes, int], Launches] = {}
_device.forget_in_child(_ready.clear)


class Schedule(Launches):
    """The launch of one schedule call on one device."""

    __slots__ = ("_fill", "_group_offset")

    def __init__(self, call: ScheduleCall, device: int) -> None:
        super().__init__()
        shape = _table_shape(call.rows, call.groups, device)
        first = max(call.group_offset, 0)
        self._group_offset = call.group_offset < 0
        self._fill = _table.fill(shape, 1, call.wide, first, UNKNOWN_GROUPS, 0, device, call.sizes)

    def made(self, stream: int, operands: list[int], results: list[int]) -> tuple[Again, ...]:
        given, *group_offset = operands
        (table,) = results
        return (self._fill.ready(stream, given, group_offset[0] if self._group_offset else 0, table, 0),)


class Product(Launches):
    """The launch of one product on one device, behind the zeroes that it counts from where it needs them."""

    __slots__ = ("_counters", "_plan", "_zeroed")

    def __init__(self, call: ProductCall, device: int) -> None:
        super().__init__()
        table = _table_shape(call.rows, call.schedule_groups, device)
        self._plan = _plan.build(call.problem, call.schedule_groups, table, call.forced, device)
        self._counters = _counters.of(device, self._plan.zeroed_words) if self._plan.restores else None
        self._zeroed = 4 * self._plan.zeroed_words

    def made(self, stream: int, operands: list[int], results: list[int]) -> tuple[Again, ...]:
        a, b, table = operands
        c, scratch = results
        if (a | b | c | table | scratch) % ALIGNMENT:
            raise RuntimeError(f"XLA gave arrays at {a:#x}, {b:#x}, {c:#x}: expected multiples of {ALIGNMENT}.")
        # The table is shared by products that XLA may run side by side: each counts its tiles in its own memory.
        counter = 0 if self._counters is None else self._counters.at(scratch)
        partials = scratch + self._plan.zeroed_bytes
        product = self._plan.launch.ready(stream, a, b, c, table, counter or scratch, partials, 0)
        return (product,) if counter else (_launch.zeroing(scratch, self._zeroed, stream), product)


MAKERS: dict[type, Callable[[Any, int], Launches]] = {ScheduleCall: Schedule, ProductCall: Product, RowsCall: Rows}


def _table_shape(rows: int, groups: int, device: int) -> _table.TableShape:
    return _table.table_shape(groups, rows, _heuristics.block_shape(rows, groups, _device.info(device).arch))


def prepare(kind: type, line: bytes, device: int) -> Launches:
    """Compiles and loads what the call `line` launches on a device; found again by the execute stage."""
    made: Launches = MAKERS[kind](_wire.parsed(line, kind), device)
    _call.keep(_ready, (line, device), made, MAX_READY)
    return made


def _local_devices() -> list[int]:
    """CUDA ordinals of the devices that this process computes on with JAX."""
    return [device.local_hardware_id for device in jax.local_devices(backend="cuda")]


def instantiate(kind: type) -> Callable[[int], None]:
    def body(frame: int) -> None:
        _abi.check(frame)
        line = _abi.attribute(frame)
        for device in _local_devices():
            if (line, device) not in _ready:
                prepare(kind, line, device)

    return body


def _which() -> Callable[[], int]:
    """What tells the current device: nobody need be asked where there is one."""
    if _device.count() == 1:
        return itertools.repeat(0).__next__
    found: Callable[[], int] = _device.import_cupy().cuda.runtime.getDevice
    return found


KINDS: dict[str, type] = {
    _wire.SCHEDULE_TARGET: ScheduleCall,
    **dict.fromkeys(_wire.PRODUCT_TARGET.values(), ProductCall),
    **dict.fromkeys(_row_wire.TARGET.values(), RowsCall),
}


def executing(kind: type) -> Callable[[int], int]:
    return execute(_ready, functools.partial(prepare, kind), _which)


def handlers() -> dict[str, dict[str, Any]]:
    """C functions of both stages by target. Kept for ever by `register`."""
    return {
        target: {"instantiate": _abi.handler(instantiate(kind)), "execute": _abi.Handler(executing(kind))}
        for target, kind in KINDS.items()
    }


_registered: dict[str, dict[str, Any]] = {}


def register() -> None:
    """Tells XLA about the targets, once; starts no device.

    A program that was exported or cached names the targets, so they must be known before it is loaded.
    """
    if not _registered:
        _registered.update(handlers())
        for target, stages in _registered.items():
            capsules = {stage: jax.ffi.pycapsule(function) for stage, function in stages.items()}
            jax.ffi.register_ffi_target(target, capsules, platform="CUDA")
