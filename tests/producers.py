"""A hand-built DLPack producer: any field can be made wrong, and it counts how often its memory came back."""

import ctypes
from typing import Any

FP16, BF16, INT32, FP8 = (2, 16, 1), (4, 16, 1), (0, 32, 1), (10, 8, 1)
CPU, CUDA, PINNED, MANAGED, ROCM = 1, 2, 3, 13, 10

_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_Destructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


class _Old(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))


class _New(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_uint32 * 2),
        ("context", ctypes.c_void_p),
        ("deleter", _Deleter),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


def _api(name: str, result: Any, *arguments: Any) -> Any:
    return ctypes.PYFUNCTYPE(result, *arguments)((name, ctypes.pythonapi))


_capsule_new = _api("PyCapsule_New", ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, _Destructor)
_is_valid = _api("PyCapsule_IsValid", ctypes.c_int, ctypes.py_object, ctypes.c_char_p)
_is_valid_raw = _api("PyCapsule_IsValid", ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)
_pointer_raw = _api("PyCapsule_GetPointer", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)

NAMES = {False: b"dltensor", True: b"dltensor_versioned"}
_made: dict[int, "Producer"] = {}  # address of a managed tensor -> who made it


def is_named(capsule: object, name: bytes) -> bool:
    return bool(_is_valid(capsule, name))


@_Deleter
def _delete(address: int) -> None:
    _made.pop(address)._returned()


@_Destructor
def _destroy(capsule: int) -> None:
    """A capsule that nobody took over gives its memory back itself."""
    for name in NAMES.values():
        if _is_valid_raw(capsule, name):
            _delete(_pointer_raw(capsule, name))


class Producer:
    """An array of a library nobody knows.

    Args:
        shape: extents; `None` makes the shape pointer NULL.
        strides: in elements; `None` makes the pointer NULL, "dense" fills it in.
        dtype: (code, bits, lanes).
        data: address; by default 4 KB of the producer's own.
        device: (type, ordinal).
        old: a library from before version 1: no `max_version`, capsules named "dltensor".
    """

    def __init__(
        self,
        shape: tuple[int, ...] | None = (3, 4),
        strides: tuple[int, ...] | str | None = "dense",
        dtype: tuple[int, int, int] = FP16,
        *,
        data: int | None = None,
        device: tuple[int, int] = (CPU, 0),
        old: bool = False,
        version: tuple[int, int] = (1, 1),
        flags: int = 0,
        byte_offset: int = 0,
        ndim: int | None = None,
        deleter: bool = True,
    ) -> None:
        self.memory = ctypes.create_string_buffer(4096 + 64)
        own = ctypes.addressof(self.memory)
        self.data = own + -own % 64 if data is None else data
        self.shape, self.strides, self.dtype, self.device = shape, strides, dtype, device
        self.old, self.version, self.flags, self.byte_offset = old, version, flags, byte_offset
        self.ndim = len(shape or ()) if ndim is None else ndim
        self.deleter = deleter
        self.streams: list[Any] = []  # what consumers passed
        self.alive = 0  # capsules given out and not returned
        self.returned = 0
        self._kept: list[Any] = []

    def _returned(self) -> None:
        self.alive -= 1
        self.returned += 1

    def capsule(self) -> Any:
        managed = (_Old if self.old else _New)()
        tensor = managed.tensor
        tensor.data, tensor.device[:], tensor.ndim = self.data, self.device, self.ndim
        tensor.code, tensor.bits, tensor.lanes = self.dtype
        tensor.byte_offset = self.byte_offset
        if self.shape is not None:
            tensor.shape = self._array(self.shape)
        if self.strides == "dense":
            steps = [1]
            for extent in (self.shape or ())[:0:-1]:
                steps.append(steps[-1] * extent)
            tensor.strides = self._array(tuple(reversed(steps)))
        elif self.strides is not None:
            tensor.strides = self._array(self.strides)
        if not self.old:
            managed.version[:], managed.flags = self.version, self.flags
        if self.deleter:
            managed.deleter = _delete
        address = ctypes.addressof(managed)
        _made[address] = self
        self.alive += 1
        self._kept.append(managed)
        return _capsule_new(address, NAMES[not self.old], _destroy if self.deleter else _Destructor(0))

    def _array(self, numbers: Any) -> int:
        array = (ctypes.c_int64 * max(len(numbers), 1))(*numbers)
        self._kept.append(array)
        return ctypes.addressof(array)

    def __dlpack__(self, *, stream: Any = None, **options: Any) -> Any:
        if self.old and options:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        self.streams.append(stream)
        return self.capsule()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


class Wrapped:
    """Another library's array behind `__dlpack__` alone."""

    def __init__(self, array: Any) -> None:
        self.array = array
        self.streams: list[Any] = []

    def __dlpack__(self, **options: Any) -> Any:
        self.streams.append(options.get("stream"))
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()
