"""DLPack capsules read through ctypes: what a foreign array is, with no copy and no help of its library.

`foreign` calls it. Knows the two structures of the DLPack standard and nothing about frameworks, streams or
devices; a capsule that breaks the standard is an error, never a crash.
"""

import ctypes
import sys
from typing import Any, NamedTuple

from ..errors import ArgumentError, DtypeError, GmmError

CPU, CUDA, PINNED, MANAGED = 1, 2, 3, 13  # device types of the standard
_MAX_VERSION = (1, 1)  # what we ask for: the major number fixes the layout read here
_READ_ONLY, _COPIED = 1, 2  # bits of `flags`
_MAX_NDIM = 64

# (type code, bits) of the standard -> our name. Codes below 16 bits are the float8 formats.
_DTYPES = {
    (0, 8): "int8",
    (0, 16): "int16",
    (0, 32): "int32",
    (0, 64): "int64",
    (1, 8): "uint8",
    (1, 16): "uint16",
    (1, 32): "uint32",
    (1, 64): "uint64",
    (2, 16): "float16",
    (2, 32): "float32",
    (2, 64): "float64",
    (4, 16): "bfloat16",
    (5, 64): "complex64",
    (5, 128): "complex128",
    (6, 8): "bool",
    (7, 8): "float8_e3m4",
    (8, 8): "float8_e4m3",
    (9, 8): "float8_e4m3b11fnuz",
    (10, 8): "float8_e4m3fn",
    (11, 8): "float8_e4m3fnuz",
    (12, 8): "float8_e5m2",
    (13, 8): "float8_e5m2fnuz",
    (14, 8): "float8_e8m0fnu",
}


class _Tensor(ctypes.Structure):
    """DLTensor, 48 bytes."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),  # in elements; NULL means dense
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    """DLManagedTensor, in a capsule named `dltensor`."""

    _fields_ = (
        ("tensor", _Tensor),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


class _Versioned(ctypes.Structure):
    """DLManagedTensorVersioned, in a capsule named `dltensor_versioned`."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


# Prototypes of our own: the attributes of `ctypes.pythonapi.PyCapsule_*` are shared with every other library.
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_set_name = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_SetName", ctypes.pythonapi))
# With the interpreter lock held: some producers' deleters touch Python objects without taking it.
_Deleter = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)

# A capsule keeps the pointer to its name, so the bytes must live as long as the process.
_LEGACY, _VERSIONED = b"dltensor", b"dltensor_versioned"
_USED = {_LEGACY: b"used_dltensor", _VERSIONED: b"used_dltensor_versioned"}


class Lease:
    """The right to read a producer's memory: gives it back, once, when the last reference goes."""

    __slots__ = ("__weakref__", "_address", "_deleter")

    def __init__(self, address: int, deleter: int | None) -> None:
        self._address = address
        self._deleter = _Deleter(deleter) if deleter else None

    def __del__(self) -> None:
        deleter, self._deleter = self._deleter, None
        # At the end of the process the producer may be gone already, and its memory goes anyway.
        if deleter is not None and not sys.is_finalizing():
            deleter(self._address)


class Tensor(NamedTuple):
    """What a capsule says, checked; strides in elements."""

    ptr: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    itemsize: int
    device_type: int
    device_id: int
    readonly: bool
    copied: bool
    lease: Lease


def device_of(name: str, array: Any) -> tuple[int, int]:
    """(device type, ordinal) as the producer states it, before anything is exported.

    Raises:
        ArgumentError: the producer cannot say.
    """
    try:
        kind, ordinal = array.__dlpack_device__()
        return int(kind), int(ordinal)
    except GmmError:
        raise
    except Exception as error:  # producers raise what they like
        raise ArgumentError(
            f"`{name}`, of type {type(array).__name__}, is not one array on one device: {error}"
        ) from error


def export(name: str, array: Any, **stream: int | None) -> Tensor:
    """The array through its own `__dlpack__`, in the newest form that the producer has.

    Args:
        name: the argument's name, for errors.
        array: anything with `__dlpack__`.
        **stream: `stream=` number of the standard, or nothing for memory of the CPU.

    Raises:
        ArgumentError: the producer refused, or its capsule breaks the standard.
        DtypeError: the capsule's element type has no name here.
    """
    try:
        try:
            capsule = array.__dlpack__(max_version=_MAX_VERSION, **stream)
        except TypeError:  # a producer from before version 1 of the standard
            capsule = array.__dlpack__(**stream)
    except GmmError:
        raise
    except Exception as error:
        raise ArgumentError(
            f"`{name}`, of type {type(array).__name__}, cannot be read through DLPack: {error}"
        ) from error
    return read(name, capsule)


def read(name: str, capsule: object) -> Tensor:
    """Take over a fresh capsule. One that is refused stays as it was, and frees its memory itself.

    Raises:
        ArgumentError: no fresh capsule, an unknown version, or contents that cannot be an array.
        DtypeError: an element type that has no name here.
    """
    managed: _Managed | _Versioned
    if _is_valid(capsule, _VERSIONED):
        kind, address = _VERSIONED, int(_pointer(capsule, _VERSIONED))
        managed = _Versioned.from_address(address)
        flags = int(managed.flags)
        if managed.major > _MAX_VERSION[0]:
            raise ArgumentError(
                f"`{name}` comes as DLPack version {managed.major}.{managed.minor}: expected one up to 1."
            )
    elif _is_valid(capsule, _LEGACY):
        kind, address = _LEGACY, int(_pointer(capsule, _LEGACY))
        managed, flags = _Managed.from_address(address), 0
    else:
        raise ArgumentError(
            f"`{name}` gave {capsule!r} from `__dlpack__`: expected a DLPack capsule that is not used yet."
        )
    tensor = managed.tensor
    dtype, itemsize = _dtype(name, tensor)
    shape, strides = _geometry(name, tensor)
    _check_extent(name, shape, strides, itemsize)
    data = int(tensor.data or 0)
    if not data and 0 not in shape:
        raise ArgumentError(f"`{name}` has shape {shape} and a null data pointer.")
    lease = Lease(address, managed.deleter)
    _set_name(capsule, _USED[kind])  # from here on the memory is ours to give back
    return Tensor(
        data + int(tensor.byte_offset),
        shape,
        strides,
        dtype,
        itemsize,
        int(tensor.device_type),
        int(tensor.device_id),
        bool(flags & _READ_ONLY),
        bool(flags & _COPIED),
        lease,
    )


def dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides, in elements, of a row-major array without gaps."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


def _dtype(name: str, tensor: _Tensor) -> tuple[str, int]:
    known = _DTYPES.get((tensor.code, tensor.bits))
    if known is None or tensor.lanes != 1:
        raise DtypeError(
            f"`{name}` has DLPack element type {tensor.code} of {tensor.bits} bits and {tensor.lanes} "
            "lane(s), which is unknown here: cast it to bfloat16, float16 or float32 in its own library."
        )
    return known, tensor.bits // 8


def _geometry(name: str, tensor: _Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    ndim = tensor.ndim
    if not 0 <= ndim <= _MAX_NDIM or (ndim and not tensor.shape):
        raise ArgumentError(
            f"`{name}` comes from DLPack with {ndim} dimensions and {'a' if tensor.shape else 'no'} shape."
        )
    shape = tuple(tensor.shape[:ndim]) if ndim else ()
    if any(extent < 0 for extent in shape):
        raise ArgumentError(f"`{name}` comes from DLPack with the negative extent in shape {shape}.")
    return shape, tuple(tensor.strides[:ndim]) if ndim and tensor.strides else dense(shape)


def _check_extent(name: str, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> None:
    """A negative stride that a producer divided as an unsigned number shows as one near 2**62."""
    if 0 in shape:
        return
    span = sum(extent * abs(step) for extent, step in zip(shape, strides, strict=True) if extent > 1)
    if span * itemsize >= 2**63:
        raise ArgumentError(
            f"`{name}` comes from DLPack with shape {shape} and strides {strides}, which span more than any "
            "memory: its library exports this view wrongly; pass a contiguous copy."
        )
