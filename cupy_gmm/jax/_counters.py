"""Counters of tiles that last: a product that leaves its counter as it found it needs no zeroes before each launch.

`_handler` asks. XLA gives scratch with whatever lay there, so what a product counts with would have to be zeroed by a
launch of its own; and one counter for each call would be shared by runs of it side by side. But no two products that
run at the same time have the same scratch: XLA orders what uses the same memory, as it must for results. So there is
one counter for each address where scratch has lain, zeroed once, when a program is loaded. The scratch itself is then
not looked at.
"""

import itertools
import threading

from .. import _device
from .._params import TICKET_WORDS
from ..errors import CompileError

SLOTS = 4096  # addresses a device remembers; products with other scratch zero it
SLOT_BYTES = 32  # a sector of the second-level cache each

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: work of others is neither waited for nor held up

assert 4 * TICKET_WORDS <= SLOT_BYTES


class Counters:
    """The counters of one device."""

    __slots__ = ("_base", "_known", "_next", "_slots")

    def __init__(self, base: int, slots: int) -> None:
        """`base`: address of so many slots that are zero."""
        self._base, self._slots = base, slots
        self._known: dict[int, int] = {}
        self._next = itertools.count()

    def at(self, scratch: int) -> int:
        """Address of the counter of a product whose scratch lies there; 0 when all are given away."""
        found = self._known.get(scratch)
        if found is None:
            slot = next(self._next)
            # Of two threads that are here for one address, both get what the first one put down.
            found = self._known.setdefault(scratch, self._base + slot * SLOT_BYTES) if slot < self._slots else 0
        return found


_made: dict[int, Counters] = {}
_lock = threading.Lock()


def of(device: int) -> Counters:
    """The counters of a device, made at the first question: not inside an executing call."""
    found = _made.get(device)
    if found is None:
        with _lock:
            found = _made.get(device) or _made.setdefault(device, _make(device))
    return found


def _forget() -> None:
    global _lock
    _lock = threading.Lock()  # another thread of the parent may have held it
    _made.clear()


_device.forget_in_child(_forget)


def _make(device: int) -> Counters:
    nbytes, doing = SLOTS * SLOT_BYTES, "making counters of tiles"
    with _device.current(device) as api:
        try:
            base = int(_device.check(api.cuMemAlloc(nbytes), doing))
        except CompileError:  # no memory is left: products zero their scratch
            return Counters(0, 0)
        stream = _device.check(api.cuStreamCreate(_NON_BLOCKING), doing)
        _device.check(api.cuMemsetD8Async(base, 0, nbytes, stream), doing)
        _device.check(api.cuStreamSynchronize(stream), doing)
        _device.check(api.cuStreamDestroy(stream), doing)
    return Counters(base, SLOTS)
