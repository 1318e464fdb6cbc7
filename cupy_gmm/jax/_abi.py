"""XLA's foreign function interface, as a handler written in Python sees it: addresses in, plain values out.

`_handler` builds on it. Knows the structures of `xla/ffi/api/c_api.h` and nothing of products, devices or CUDA. Only
the fields named here are touched; their places are the same in every jaxlib from 0.5.3 on, and the tests compare them
with the header of the installed one. An interface that says it is another one is refused, never guessed at.
"""

import ctypes
import itertools
import threading
from collections.abc import Callable
from typing import Any

from ..errors import ArgumentError, DtypeError, UnsupportedError

API_VERSION = 0, 1  # what handlers report: XLA refuses one newer than its own, and takes older ones
INSTANTIATE, PREPARE, INITIALIZE, EXECUTE = 0, 1, 2, 3
COMMAND_BUFFER_COMPATIBLE = 1  # trait: always the same device operations, so they can be captured and replayed
STRING = 4  # type of an attribute
METADATA = 1  # type of an extension

# Byte offsets on machines with pointers of 8 bytes; names are those of the header.
FRAME = {"extension_start": 8, "api": 16, "ctx": 24, "stage": 32, "args": 40, "rets": 80, "attrs": 120}
FRAME_BYTES = 168  # as far as we read; later headers append
ARGS = {"size": 16, "args": 32}  # and the same in Rets, with `rets`
ATTRS = {"size": 16, "types": 24, "names": 32, "attrs": 40}
BUFFER = {"dtype": 16, "data": 24, "rank": 32, "dims": 40}
BUFFER_BYTES = 48
API = {"api_version": 16, "XLA_FFI_Error_Create": 48, "XLA_FFI_Stream_Get": 80}
API_BYTES = 88
VERSION = {"major_version": 16, "minor_version": 20}
EXTENSION = {"type": 8, "next": 16}
METADATA_EXTENSION = {"metadata": 24}
METADATA_FIELDS = {"api_version": 8, "traits": 32}
STREAM_GET_ARGS = {"ctx": 16, "stream": 24}
ERROR_CREATE_ARGS = {"message": 16, "errc": 24}
INVALID_ARGUMENT, UNIMPLEMENTED, INTERNAL = 3, 12, 13

# The address space as one array of words: a read costs 0.1 us, a tenth of a ctypes structure's.
_BYTES = memoryview((ctypes.c_char * (1 << 48)).from_address(0)).cast("B")
_WORDS = _BYTES.cast("Q")

_API = FRAME["api"] >> 3
_CTX = FRAME["ctx"] >> 3
_EXTENSIONS = FRAME["extension_start"] >> 3
_ARGS = (FRAME["args"] + ARGS["args"]) >> 3
_RETS = (FRAME["rets"] + ARGS["args"]) >> 3
_NUM_ARGS = (FRAME["args"] + ARGS["size"]) >> 3
_NUM_RETS = (FRAME["rets"] + ARGS["size"]) >> 3
_NUM_ATTRS = (FRAME["attrs"] + ATTRS["size"]) >> 3
_ATTR_TYPES = (FRAME["attrs"] + ATTRS["types"]) >> 3
_ATTRS = (FRAME["attrs"] + ATTRS["attrs"]) >> 3
_DATA = BUFFER["data"] >> 3
_STREAM_GET = API["XLA_FFI_Stream_Get"] >> 3
_ASKED_CTX = STREAM_GET_ARGS["ctx"] >> 3
_ASKED_STREAM = STREAM_GET_ARGS["stream"] >> 3

Handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
_Function = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)  # keeps the GIL: these return at once


class _StreamGetArgs(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("ctx", ctypes.c_void_p),
        ("stream", ctypes.c_void_p),
    )


class _ErrorCreateArgs(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("message", ctypes.c_char_p),
        ("errc", ctypes.c_int),
    )


def stage(frame: int) -> int:
    """INSTANTIATE, PREPARE, INITIALIZE or EXECUTE."""
    return _WORDS[(frame + FRAME["stage"]) >> 3] & 0xFFFFFFFF


def arguments(frame: int) -> list[int]:
    """Addresses of the operands."""
    at = frame >> 3
    first = _WORDS[at + _ARGS] >> 3
    return [_WORDS[(buffer >> 3) + _DATA] for buffer in _WORDS[first : first + _WORDS[at + _NUM_ARGS]]]


def results(frame: int) -> list[int]:
    """Addresses of the results."""
    at = frame >> 3
    first = _WORDS[at + _RETS] >> 3
    return [_WORDS[(buffer >> 3) + _DATA] for buffer in _WORDS[first : first + _WORDS[at + _NUM_RETS]]]


def shapes(frame: int) -> list[tuple[int, tuple[int, ...]]]:
    """(XLA's number of the dtype, extents) of operands and results. For tests: a call carries its facts."""
    at, found = frame >> 3, []
    for table, count in ((_ARGS, _NUM_ARGS), (_RETS, _NUM_RETS)):
        first = _WORDS[at + table] >> 3
        for i in range(first, first + _WORDS[at + count]):
            buffer = _WORDS[i]
            rank, dims = (_WORDS[(buffer + BUFFER[name]) >> 3] for name in ("rank", "dims"))
            dtype = _WORDS[(buffer + BUFFER["dtype"]) >> 3] & 0xFFFFFFFF
            found.append((dtype, tuple(_WORDS[(dims >> 3) + axis] for axis in range(rank))))
    return found


def attribute(frame: int) -> bytes:
    """The call's one attribute, a string."""
    span = _WORDS[_WORDS[(frame >> 3) + _ATTRS] >> 3] >> 3
    start = _WORDS[span]
    return _BYTES[start : start + _WORDS[span + 1]].tobytes()


# Addresses of argument blocks of Stream_Get that no call is using, and the blocks.
_spare: list[int] = []
_blocks: list[_StreamGetArgs] = []
_functions: dict[int, Any] = {}


def stream(frame: int) -> int:
    """The CUDA handle of the stream that XLA wants the work on.

    Raises:
        UnsupportedError: XLA has none, as on the CPU.
    """
    at = frame >> 3
    entry = _WORDS[(_WORDS[at + _API] >> 3) + _STREAM_GET]
    function = _functions.get(entry) or _functions.setdefault(entry, _Function(entry))
    try:
        block = _spare.pop()
    except IndexError:
        _blocks.append(_StreamGetArgs(ctypes.sizeof(_StreamGetArgs)))
        block = ctypes.addressof(_blocks[-1])
    words = block >> 3
    _WORDS[words + _ASKED_CTX] = _WORDS[at + _CTX]
    failed = function(block)
    found = _WORDS[words + _ASKED_STREAM]
    _spare.append(block)
    if failed:
        raise UnsupportedError("XLA gave no stream to launch on: expected a call on a CUDA device.")
    return found


def check(frame: int) -> None:
    """Refuses an interface other than the one that this module reads, and a call that is not ours.

    Called in the instantiate stage, so once a call site.

    Raises:
        UnsupportedError: The interface or the call is another one.
    """
    api = _WORDS[(frame >> 3) + _API]
    sizes = _WORDS[frame >> 3], _WORDS[api >> 3]
    major, minor = _version(api + API["api_version"])
    if sizes[0] < FRAME_BYTES or sizes[1] < API_BYTES or major != API_VERSION[0]:
        raise UnsupportedError(
            f"this jaxlib calls with version {major}.{minor} of XLA's foreign function interface, frames of {sizes[0]} "
            f"bytes and {sizes[1]} bytes of functions: expected version {API_VERSION[0]}, at least {FRAME_BYTES} and "
            f"{API_BYTES}; install a jaxlib from 0.5.3 on that this release knows, or call `jax.lax.ragged_dot`."
        )
    at = frame >> 3
    if _WORDS[at + _NUM_ATTRS] != 1 or _WORDS[_WORDS[at + _ATTR_TYPES] >> 3] & 0xFFFFFFFF != STRING:
        raise UnsupportedError(
            "this call has other attributes than one string: it was lowered by another release; lower it again."
        )


def _version(at: int) -> tuple[int, int]:
    return tuple(ctypes.c_int.from_address(at + offset).value for offset in VERSION.values())  # type: ignore[return-value]


def _answer_metadata(frame: int, traits: int) -> bool:
    """Tells XLA our version and traits, if that is what this call asks."""
    extension = _WORDS[(frame >> 3) + _EXTENSIONS]
    while extension:
        if _WORDS[(extension + EXTENSION["type"]) >> 3] & 0xFFFFFFFF == METADATA:
            metadata = _WORDS[(extension + METADATA_EXTENSION["metadata"]) >> 3]
            version = metadata + METADATA_FIELDS["api_version"]
            for offset, number in zip(VERSION.values(), API_VERSION, strict=True):
                ctypes.c_int.from_address(version + offset).value = number
            ctypes.c_uint32.from_address(metadata + METADATA_FIELDS["traits"]).value = traits
            return True
        extension = _WORDS[(extension + EXTENSION["next"]) >> 3]
    return False


def _error(frame: int, error: BaseException) -> int:
    """An XLA_FFI_Error with the text of an exception; XLA owns it."""
    code = INTERNAL
    if isinstance(error, (ArgumentError, DtypeError)):
        code = INVALID_ARGUMENT
    elif isinstance(error, UnsupportedError):
        code = UNIMPLEMENTED
    text = str(error) or type(error).__name__
    size = ERROR_CREATE_ARGS["errc"] + ctypes.sizeof(ctypes.c_int)
    asked = _ErrorCreateArgs(size, None, f"cupy_gmm: {text}".encode(errors="replace"), code)
    create = _Function(_WORDS[(_WORDS[(frame >> 3) + _API] + API["XLA_FFI_Error_Create"]) >> 3])
    return int(create(ctypes.addressof(asked)) or 0)


# Whether Python keeps its state for a thread, and for how many it does.
_thread = threading.local()
_stays = itertools.count()
MAX_STAYS = 256


def _stay() -> None:
    """Keeps Python's state for a thread of XLA's for as long as the process lives.

    Python makes one at each call from a thread that is not its own and throws it away behind it, which takes longer
    than all that a handler does. XLA's threads come from pools, so this is a handful; past MAX_STAYS none is kept, for
    each is some KB. perf: bench/notes/0005-host-cost.md
    """
    if next(_stays) < MAX_STAYS:
        ctypes.pythonapi.PyGILState_Ensure()  # counts the state as used once more than ctypes takes back
        _thread.stays = True


def handler(body: Callable[[int], None], traits: int = COMMAND_BUFFER_COMPATIBLE) -> Any:
    """A C function for XLA that runs `body` with the address of the call frame.

    Whatever `body` raises becomes XLA's error. Keep the result for as long as XLA may call it: for ever.
    """

    def entry(frame: int) -> int:
        try:
            if _WORDS[(frame >> 3) + _EXTENSIONS] and _answer_metadata(frame, traits):
                return 0
            if not hasattr(_thread, "stays"):
                _stay()
            body(frame)
        except BaseException as error:  # nothing may leave through C
            return _error(frame, error)
        return 0

    return Handler(entry)
