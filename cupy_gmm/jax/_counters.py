"""Counters of tiles that last: a product that leaves its counters as it found them needs no zeroes before each launch.

`_handler` asks. XLA gives scratch with whatever lay there, so what a product counts with would have to be zeroed by a
launch of its own; and one counter for each call would be shared by runs of it side by side. But no two products that
run at the same time have the same scratch: XLA orders what uses the same memory, as it must for results. So there is
one slot of counters for each address where scratch has lain, zeroed once, when a program is loaded. Scratch itself then
holds partial sums alone.
"""

import itertools
import threading

from .. import _device
from .._table import COUNTER_WORDS
from ..errors import CompileError

SECTOR_BYTES = 32  # of the second-level cache
# How many addresses a device remembers, by the bytes of a slot; products with other scratch zero it.
SLOTS = {SECTOR_BYTES: 4096, -(-4 * COUNTER_WORDS // SECTOR_BYTES) * SECTOR_BYTES: 1024}

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: work of others is neither waited for nor held up


class Counters:
    """The counters of one device, in slots of one size."""

    __slots__ = ("_base", "_known", "_next", "_slot_bytes", "_slots")

    def __init__(self, base: int, slots: int, slot_bytes: int) -> None:
        """`base`: address of so many slots that are zero."""
        self._base, self._slots, self._slot_bytes = base, slots, slot_bytes
        self._known: dict[int, int] = {}
        self._next = itertools.count()

    def at(self, scratch: int) -> int:
        """Address of the counters of a product whose scratch lies there; 0 when all are given away."""
        found = self._known.get(scratch)
        if found is None:
            slot = next(self._next)
            # Of two threads that are here for one address, both get what the first one put down.
            found = self._known.setdefault(scratch, self._base + slot * self._slot_bytes) if slot < self._slots else 0
        return found


_made: dict[tuple[int, int], Counters] = {}
_lock = threading.Lock()


def of(device: int, words: int) -> Counters:
    """The counters of a device for products that need so many words, made at the first question: not inside an
    executing call.
    """
    key = device, next(slot_bytes for slot_bytes in SLOTS if 4 * words <= slot_bytes)
    found = _made.get(key)
    if found is None:
        with _lock:
            found = _made.get(key) or _made.setdefault(key, _make(*key))
    return found


def _forget() -> None:
    global _lock
    _lock = threading.Lock()  # another thread of the parent may have held it
    _made.clear()


_device.forget_in_child(_forget)


def _make(device: int, slot_bytes: int) -> Counters:
    slots = SLOTS[slot_bytes]
    nbytes, doing = slots * slot_bytes, "making counters of tiles"
    with _device.current(device) as api:
        try:
            base = int(_device.check(api.cuMemAlloc(nbytes), doing))
        except CompileError:  # no memory is left: products zero their scratch
            return Counters(0, 0, slot_bytes)
        stream = _device.check(api.cuStreamCreate(_NON_BLOCKING), doing)
        _device.check(api.cuMemsetD8Async(base, 0, nbytes, stream), doing)
        _device.check(api.cuStreamSynchronize(stream), doing)
        _device.check(api.cuStreamDestroy(stream), doing)
    return Counters(base, slots, slot_bytes)
