"""XLA's foreign function interface, as a handler written in Python sees it: addresses in, plain values out.

`_execute` and `_handler` build on it. Knows the structures of `xla/ffi/api/c_api.h` and nothing of products, devices or
CUDA. Only the fields named here are touched; their places are the same in every jaxlib from 0.5.3 on, and the tests
compare them with the header of the installed one. An interface that says it is another one is refused, never guessed
at.
"""

import ctypes
import itertools
import struct
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

# The address space as one array of words: a read costs 0.06 us, a tenth of a ctypes structure's.
TEXT: Any = (ctypes.c_char * (1 << 48)).from_address(0)  # a slice of it is `bytes`
BYTES = memoryview(TEXT).cast("B")
WORDS = BYTES.cast("Q")
# The word `data` of the buffer at an address, at the same index as the buffer's first word in WORDS.
DATA = memoryview((ctypes.c_char * ((1 << 48) - BUFFER_BYTES)).from_address(BUFFER["data"])).cast("B").cast("Q")


def _words_at(*offsets: int) -> struct.Struct:
    """Reads the words at these offsets, which rise, and nothing between them."""
    gaps = (at - before for before, at in itertools.pairwise((-8, *offsets)))
    return struct.Struct("<" + "".join(f"{gap - 8}xQ" for gap in gaps))


# extension_start, api, ctx, how many args, args, how many rets, rets, attrs
CALL = _words_at(
    *(FRAME[name] for name in ("extension_start", "api", "ctx")),
    *(FRAME[table] + at for table in ("args", "rets") for at in ARGS.values()),
    FRAME["attrs"] + ATTRS["attrs"],
)
SPAN = struct.Struct("<2Q")  # where a text begins, and its bytes

_API = FRAME["api"] >> 3
_EXTENSIONS = FRAME["extension_start"] >> 3
_ARGS = (FRAME["args"] + ARGS["args"]) >> 3
_RETS = (FRAME["rets"] + ARGS["args"]) >> 3
_NUM_ARGS = (FRAME["args"] + ARGS["size"]) >> 3
_NUM_RETS = (FRAME["rets"] + ARGS["size"]) >> 3
_NUM_ATTRS = (FRAME["attrs"] + ATTRS["size"]) >> 3
_ATTR_TYPES = (FRAME["attrs"] + ATTRS["types"]) >> 3
_ATTRS = (FRAME["attrs"] + ATTRS["attrs"]) >> 3

Handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
# Both keep Python's lock: what they call returns at once. The second takes an array of ctypes' as its address; to
# declare that would cost a call of Python's at each of its own.
_Function = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
_Asks = ctypes.PYFUNCTYPE(ctypes.c_void_p)

# Arguments of Stream_Get: its size, no extension, ctx, stream. An array is read and written faster than a structure.
StreamGetArgs = ctypes.c_uint64 * 4
STREAM_GET_BYTES = ctypes.sizeof(StreamGetArgs)
ASKED_CTX, ASKED_STREAM = (at >> 3 for at in STREAM_GET_ARGS.values())


class _ErrorCreateArgs(ctypes.Structure):
    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("message", ctypes.c_char_p),
        ("errc", ctypes.c_int),
    )


def stage(frame: int) -> int:
    """INSTANTIATE, PREPARE, INITIALIZE or EXECUTE."""
    return WORDS[(frame + FRAME["stage"]) >> 3] & 0xFFFFFFFF


def arguments(frame: int) -> list[int]:
    """Addresses of the operands."""
    at = frame >> 3
    first = WORDS[at + _ARGS] >> 3
    return [DATA[buffer >> 3] for buffer in WORDS[first : first + WORDS[at + _NUM_ARGS]]]


def results(frame: int) -> list[int]:
    """Addresses of the results."""
    at = frame >> 3
    first = WORDS[at + _RETS] >> 3
    return [DATA[buffer >> 3] for buffer in WORDS[first : first + WORDS[at + _NUM_RETS]]]


def shapes(frame: int) -> list[tuple[int, tuple[int, ...]]]:
    """(XLA's number of the dtype, extents) of operands and results. For tests: a call carries its facts."""
    at, found = frame >> 3, []
    for table, count in ((_ARGS, _NUM_ARGS), (_RETS, _NUM_RETS)):
        first = WORDS[at + table] >> 3
        for i in range(first, first + WORDS[at + count]):
            buffer = WORDS[i]
            rank, dims = (WORDS[(buffer + BUFFER[name]) >> 3] for name in ("rank", "dims"))
            dtype = WORDS[(buffer + BUFFER["dtype"]) >> 3] & 0xFFFFFFFF
            found.append((dtype, tuple(WORDS[(dims >> 3) + axis] for axis in range(rank))))
    return found


def attribute(frame: int) -> bytes:
    """The call's one attribute, a string."""
    start, nbytes = SPAN.unpack_from(BYTES, WORDS[WORDS[(frame >> 3) + _ATTRS] >> 3])
    text: bytes = TEXT[start : start + nbytes]
    return text


def stream_get(api: int) -> Callable[[Any], int | None]:
    """The function that says which stream XLA wants the work on. It takes StreamGetArgs; what it returns is an error.

    Raises:
        UnsupportedError: The functions at `api` are those of another interface.
    """
    _check_functions(api, FRAME_BYTES)
    return _Asks(WORDS[(api + API["XLA_FFI_Stream_Get"]) >> 3])


def check(frame: int) -> None:
    """Refuses an interface other than the one that this module reads, and a call that is not ours.

    Called in the instantiate stage, so once a call site.

    Raises:
        UnsupportedError: The interface or the call is another one.
    """
    at = frame >> 3
    _check_functions(WORDS[at + _API], WORDS[at])
    if WORDS[at + _NUM_ATTRS] != 1 or WORDS[WORDS[at + _ATTR_TYPES] >> 3] & 0xFFFFFFFF != STRING:
        raise UnsupportedError(
            "this call has other attributes than one string: it was lowered by another release; lower it again."
        )


def _check_functions(api: int, frame_bytes: int) -> None:
    major, minor = (ctypes.c_int.from_address(api + API["api_version"] + at).value for at in VERSION.values())
    api_bytes = WORDS[api >> 3]
    if frame_bytes < FRAME_BYTES or api_bytes < API_BYTES or major != API_VERSION[0]:
        raise UnsupportedError(
            f"this jaxlib calls with version {major}.{minor} of XLA's foreign function interface, frames of "
            f"{frame_bytes} bytes and {api_bytes} bytes of functions: expected version {API_VERSION[0]}, at least "
            f"{FRAME_BYTES} and {API_BYTES}; install a jaxlib from 0.5.3 on that this release knows, or call "
            "`jax.lax.ragged_dot`."
        )


def answer_metadata(frame: int, traits: int = COMMAND_BUFFER_COMPATIBLE) -> bool:
    """Tells XLA our version and traits, if that is what this call asks."""
    extension = WORDS[(frame >> 3) + _EXTENSIONS]
    while extension:
        if WORDS[(extension + EXTENSION["type"]) >> 3] & 0xFFFFFFFF == METADATA:
            metadata = WORDS[(extension + METADATA_EXTENSION["metadata"]) >> 3]
            version = metadata + METADATA_FIELDS["api_version"]
            for offset, number in zip(VERSION.values(), API_VERSION, strict=True):
                ctypes.c_int.from_address(version + offset).value = number
            ctypes.c_uint32.from_address(metadata + METADATA_FIELDS["traits"]).value = traits
            return True
        extension = WORDS[(extension + EXTENSION["next"]) >> 3]
    return False


def error(frame: int, raised: BaseException) -> int:
    """An XLA_FFI_Error with the text of an exception; XLA owns it."""
    code = INTERNAL
    if isinstance(raised, (ArgumentError, DtypeError)):
        code = INVALID_ARGUMENT
    elif isinstance(raised, UnsupportedError):
        code = UNIMPLEMENTED
    text = str(raised) or type(raised).__name__
    size = ERROR_CREATE_ARGS["errc"] + ctypes.sizeof(ctypes.c_int)
    asked = _ErrorCreateArgs(size, None, f"cupy_gmm: {text}".encode(errors="replace"), code)
    create = _Function(WORDS[(WORDS[(frame >> 3) + _API] + API["XLA_FFI_Error_Create"]) >> 3])
    return int(create(ctypes.addressof(asked)) or 0)


# Whether Python keeps its state for a thread, and for how many it does.
thread = threading.local()
_stays = itertools.count()
MAX_STAYS = 256


def stay() -> None:
    """Keeps Python's state for a thread of XLA's for as long as the process lives.

    Python makes one at each call from a thread that is not its own and throws it away behind it, which takes longer
    than all that a handler does. XLA's threads come from pools, so this is a handful; past MAX_STAYS none is kept, for
    each is some KB. perf: bench/notes/0005-host-cost.md
    """
    if next(_stays) < MAX_STAYS:
        ctypes.pythonapi.PyGILState_Ensure()  # counts the state as used once more than ctypes takes back
        thread.stays = True


def handler(body: Callable[[int], None], traits: int = COMMAND_BUFFER_COMPATIBLE) -> Any:
    """A C function for XLA that runs `body` with the address of the call frame.

    Whatever `body` raises becomes XLA's error. Keep the result for as long as XLA may call it: for ever.
    """

    def entry(frame: int) -> int:
        try:
            if WORDS[(frame >> 3) + _EXTENSIONS] and answer_metadata(frame, traits):
                return 0
            if not hasattr(thread, "stays"):
                stay()
            body(frame)
        except BaseException as raised:  # nothing may leave through C
            return error(frame, raised)
        return 0

    return Handler(entry)
