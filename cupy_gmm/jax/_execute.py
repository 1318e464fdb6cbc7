"""What XLA calls at every step: the execute stage of a call, in one function. Used by `_handler` and `_row_handler`.

A step calls it for each product and each schedule, between work of XLA's own that has driven Python's objects out of
the processor's caches; so what it costs is how many of them it touches. It reads the call frame at once where `_abi`
has a function for each question, and finds launches that are complete. Must not know what they are.
"""

import struct
from collections.abc import Callable, Mapping
from typing import Any

from .. import _recent
from ..errors import UnsupportedError
from . import _abi

MAX_ARRAYS = 16  # operands or results of a call; ours have six at most

Again = Callable[[], object]  # a launch, complete


class Launches:
    """What one call launches on one device: made once for each stream and set of addresses, and remembered.

    XLA's arrays come to lie where they lay before.
    """

    __slots__ = ("known",)

    def __init__(self) -> None:
        self.known: dict[tuple[int, ...], tuple[Again, ...]] = {}

    def ready(self, stream: int, operands: list[int], results: list[int]) -> tuple[Again, ...]:
        """The launches for these addresses; remembered under stream, operands, results in a row."""
        made = self.made(stream, operands, results)
        _recent.remember(self.known, (stream, *operands, *results), made)  # another thread holds what it took
        return made

    def made(self, stream: int, operands: list[int], results: list[int]) -> tuple[Again, ...]:
        """Checks the addresses and packs them."""
        raise NotImplementedError


def execute(
    ready: Mapping[tuple[bytes, int], Launches],
    prepare: Callable[[bytes, int], Launches],
    which: Callable[[], Callable[[], int]],
) -> Callable[[int], int]:
    """What to hand to XLA as the execute stage, by `_abi.Handler`: address of the frame in, address of an error out.

    Args:
        ready: The launches of a text on a device.
        prepare: Makes those that are not there.
        which: Gives a function that tells the current device; asked at the first call.
    """
    # perf: bench/notes/0005-host-cost.md. Cells of a closure, not names of modules; reads written out.
    call, span, memory, words, data, text = (
        _abi.CALL.unpack_from, _abi.SPAN.unpack_from, _abi.BYTES, _abi.WORDS, _abi.DATA, _abi.TEXT
    )  # fmt: skip
    pointers = [struct.Struct(f"<{count}Q").unpack_from for count in range(MAX_ARRAYS + 1)]
    two, three = pointers[2], pointers[3]
    thread, ctx_at, stream_at = _abi.thread, _abi.ASKED_CTX, _abi.ASKED_STREAM
    asks: dict[int, Callable[[Any], int | None]] = {}  # by the table of XLA's functions
    spare: list[Any] = []  # StreamGetArgs that no call is using
    current: Callable[[], int]

    def first_asked() -> int:
        nonlocal current
        current = which()
        return current()

    current = first_asked

    def entry(frame: int) -> int:
        try:
            extension, api, ctx, num_args, args, num_rets, rets, attrs = call(memory, frame)
            if extension and _abi.answer_metadata(frame):
                return 0
            try:
                thread.stays  # noqa: B018
            except AttributeError:
                _abi.stay()
            try:
                asked, ask = spare.pop(), asks[api]
            except (IndexError, KeyError):  # in the first calls
                asked, ask = _abi.StreamGetArgs(_abi.STREAM_GET_BYTES), asks.setdefault(api, _abi.stream_get(api))
            asked[ctx_at] = ctx
            if ask(asked):
                raise UnsupportedError("XLA gave no stream to launch on: expected a call on a CUDA device.")
            stream = asked[stream_at]
            spare.append(asked)
            start, nbytes = span(memory, words[attrs >> 3])
            line = text[start : start + nbytes]
            device = current()
            launches = ready.get((line, device)) or prepare(line, device)
            if num_args == 3 and num_rets == 2:  # a product
                a, b, c = three(memory, args)
                d, e = two(memory, rets)
                key: tuple[int, ...] = stream, data[a >> 3], data[b >> 3], data[c >> 3], data[d >> 3], data[e >> 3]
            else:
                buffers = pointers[num_args](memory, args) + pointers[num_rets](memory, rets)
                key = stream, *[data[buffer >> 3] for buffer in buffers]
            for launch in launches.known.get(key) or launches.ready(stream, _abi.arguments(frame), _abi.results(frame)):
                launch()
        except BaseException as raised:  # nothing may leave through C
            return _abi.error(frame, raised)
        return 0

    return entry
