"""What a call of routing or activation launches on one device. Used by `_handler`.

Must not know how calls are made, nor XLA's interface.
"""

from array import array
from collections.abc import Iterator

from .. import _launch
from ._execute import Again, Launches
from ._row_wire import RowsCall

ALIGNMENT = 16  # bytes; XLA's buffers keep it, and launches are chosen for it

# Stand for addresses in the parameters of a plan. No other word of them can be so: all strides, extents and pairs of
# int32 are smaller.
_STANDS_FOR = 0x7A5D << 48
_STEP = 256  # a stand-in is as aligned as a buffer


class Rows(Launches):
    """The launches of one call on one device."""

    __slots__ = ("_count", "_launches")

    def __init__(self, call: RowsCall, device: int) -> None:
        super().__init__()
        self._count = len(call.operands) + len(call.results)
        stand_ins = [_STANDS_FOR + _STEP * index for index in range(self._count)]
        self._launches = []
        for unit, symbol, grid, block, shared, params in call.launches(stand_ins):
            x, y = (grid, 1) if isinstance(grid, int) else grid
            function = _launch.unit_function(unit, symbol, device)
            words = array("Q", params)
            places = [(place, stand_ins.index(word)) for place, word in enumerate(words) if word in stand_ins]
            self._launches.append((_launch.Kernel(function.handle, (x, y, 1), block, shared), words, places))

    def made(self, stream: int, operands: list[int], results: list[int]) -> tuple[Again, ...]:
        addresses = [*operands, *results]
        if len(addresses) != self._count:
            raise RuntimeError(f"XLA gave {len(addresses)} arrays: expected {self._count}.")
        for address in addresses:
            if address % ALIGNMENT:
                raise RuntimeError(f"XLA gave an array at {address:#x}: expected a multiple of {ALIGNMENT}.")
        return tuple(self._made(stream, addresses))

    def _made(self, stream: int, addresses: list[int]) -> Iterator[Again]:
        for kernel, plan, places in self._launches:
            words = plan[:]  # several devices may be at it, each in a thread
            for place, index in places:
                words[place] = addresses[index]
            yield _launch.ready(kernel, stream, words.tobytes())
