"""The libraries whose arrays are read by attribute: NumPy, CuPy, PyTorch.

One object each: how to read an array, which stream is current, how to allocate. `locate` picks the object by
the type of an argument. Imports no framework: the caller's own is in `sys.modules`, and CuPy is imported when
a GPU array of another library first needs it.
"""

import functools
import sys
from typing import Any

import numpy as np

from .. import _device
from ..errors import ArgumentError, UnsupportedError
from .dlpack import dense
from .site import Site, View

_new: Any = tuple.__new__  # of a View: half the cost of calling the class
_numpy_names: dict[Any, str] = {}
_torch_names: dict[Any, str] = {}


def dtype_name(dtype: Any) -> str:
    """Our name of a NumPy dtype; what is no plain native number keeps NumPy's spelling, for errors."""
    name = _numpy_names.get(dtype)
    if name is None:
        if dtype.hasobject or dtype.fields is not None or dtype.subdtype is not None or not dtype.isnative:
            return str(dtype)
        name = _numpy_names[dtype] = dtype.name
    return name


_dense = functools.lru_cache(4096)(dense)  # on the path of every call without `out=`


@functools.cache
def numpy_dtype(name: str) -> Any:
    """The NumPy dtype of our name; `ml_dtypes` has those that NumPy itself lacks."""
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, name))


def mixed(site: Site, name: str, device: int) -> ArgumentError:
    """Two arrays on two devices."""
    places = ["the CPU" if place < 0 else f"cuda:{place}" for place in (device, site.device)]
    return ArgumentError(
        f"`{name}` is on {places[0]} and `{site.first}` on {places[1]}: all arrays of one call must be on "
        f"one device; move `{name}` to {places[1]}."
    )


def uneven(name: str, ptr: int, strides: tuple[int, ...], itemsize: int) -> ArgumentError:
    """An address or a stride between two elements; strides in bytes."""
    what = f"starts at address {ptr:#x}" if ptr % itemsize else f"has strides of {strides} bytes"
    return ArgumentError(
        f"`{name}` {what}, which is no multiple of its {itemsize}-byte elements: pass a contiguous copy."
    )


class Numpy:
    """Host arrays."""

    name = "numpy"
    graph_pool = False
    leased = False

    def device(self, name: str, array: Any) -> int:
        return -1

    def stream(self, device: int) -> int:
        return 0

    def read(self, name: str, array: Any, site: Site) -> View:
        if site.device >= 0:
            raise mixed(site, name, -1)
        itemsize, strides, ptr = array.itemsize or 1, array.strides, array.ctypes.data
        if any(stride % itemsize for stride in strides):
            raise uneven(name, 0, strides, itemsize)
        steps = tuple(stride // itemsize for stride in strides)
        readonly = not array.flags.writeable
        return View(ptr, array.shape, steps, dtype_name(array.dtype), -1, readonly, array)

    def empty(self, site: Site, shape: tuple[int, ...], dtype: str) -> tuple[Any, View]:
        array = np.empty(shape, numpy_dtype(dtype))
        return array, View(array.ctypes.data, shape, dense(shape), dtype, -1, False, array)

    def scratch(self, site: Site, nbytes: int) -> View:
        raise AssertionError("scratch is for launches, and the CPU has none")

    def finish(self, site: Site, native: Any) -> Any:
        return native


_forms: dict[tuple[Any, tuple[int, ...]], tuple[tuple[int, ...], str, int]] = {}


def _form(name: str, dtype: Any, strides: tuple[int, ...]) -> tuple[tuple[int, ...], str, int]:
    """(strides in elements, name of the dtype, item size); a layer has the same few in every call."""
    itemsize = dtype.itemsize
    if any(stride % itemsize for stride in strides):
        raise uneven(name, 0, strides, itemsize)
    if len(_forms) > 4096:
        _forms.clear()
    form = tuple(stride // itemsize for stride in strides), dtype_name(dtype), itemsize
    _forms[dtype, strides] = form
    return form


def new_array(ndarray: Any, alloc: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """An array of CuPy for 16-byte stores, from whatever allocator is current."""
    array = ndarray(shape, dtype)
    if array.data.ptr & 15:  # the user's own allocator; CuPy's give multiples of 512
        memory = alloc(array.nbytes + 15)
        array = ndarray(shape, dtype, memory + -memory.ptr % 16)
    return array


def new_scratch(alloc: Any, nbytes: int) -> tuple[Any, int]:
    """CuPy's memory, and an address in it from which on `nbytes` are 256-byte aligned."""
    memory = alloc(nbytes)
    ptr = memory.ptr
    if ptr & 255:  # the user's own allocator
        memory = alloc(nbytes + 255)
        ptr = memory.ptr + -memory.ptr % 256
    return memory, ptr


class Cupy:
    """CuPy arrays; also the allocator of the GPU families that have none of their own."""

    name = "cupy"
    graph_pool = False
    leased = False

    def device(self, name: str, array: Any) -> int:
        return array.data.device_id

    def stream(self, device: int) -> int:
        return _device.import_cupy().cuda.get_current_stream(device).ptr

    def read(self, name: str, array: Any, site: Site) -> View:
        data, dtype, strides = array.data, array.dtype, array.strides
        ptr, device = data.ptr, data.device_id
        if device != site.device:
            raise mixed(site, name, device)
        form = _forms.get((dtype, strides)) or _form(name, dtype, strides)
        if ptr % form[2]:
            raise uneven(name, ptr, strides, form[2])
        return _new(View, (ptr, array.shape, form[0], form[1], device, False, array))

    def empty(self, site: Site, shape: tuple[int, ...], dtype: str) -> tuple[Any, View]:
        cupy = _device.import_cupy()
        with site.guard():
            array = new_array(cupy.ndarray, cupy.cuda.alloc, shape, numpy_dtype(dtype))
        return array, _new(View, (array.data.ptr, shape, _dense(shape), dtype, site.device, False, array))

    def scratch(self, site: Site, nbytes: int) -> View:
        with site.guard():
            memory, ptr = new_scratch(_device.import_cupy().cuda.alloc, nbytes)
        return _new(View, (ptr, (nbytes,), (1,), "uint8", site.device, False, memory))

    def finish(self, site: Site, native: Any) -> Any:
        return native


class Torch:
    """PyTorch tensors, CUDA and CPU. One that requires grad is read as data, and nothing is recorded."""

    name = "torch"
    graph_pool = True
    leased = False

    def device(self, name: str, array: Any) -> int:
        if array.is_cuda:
            return array.get_device()
        if array.device.type != "cpu":
            raise UnsupportedError(
                f"`{name}` is on PyTorch's device {str(array.device)!r}: expected a CUDA device or the CPU."
            )
        return -1

    def stream(self, device: int) -> int:
        torch = sys.modules["torch"]
        try:  # spares the Stream object
            return torch._C._cuda_getCurrentRawStream(device)
        except AttributeError:
            return torch.cuda.current_stream(device).cuda_stream

    def read(self, name: str, array: Any, site: Site) -> View:
        device = array.get_device() if array.is_cuda else self.device(name, array)
        if device != site.device:
            raise mixed(site, name, device)
        try:
            ptr, steps, itemsize = array.data_ptr(), array.stride(), array.element_size()
        except (RuntimeError, NotImplementedError) as error:
            raise UnsupportedError(
                f"`{name}` is a {type(array).__name__} of layout {array.layout} with no plain memory "
                f"({error}): pass a dense tensor, outside of torch.compile and of torch.func transforms; inside "
                "torch.compile call the function of `cupy_gmm.torch`."
            ) from error
        if array.is_neg() or array.is_conj():
            raise ArgumentError(f"`{name}` is a lazily negated tensor: pass `{name}.resolve_conj().resolve_neg()`.")
        if ptr % itemsize and device >= 0:
            raise uneven(name, ptr, steps, itemsize)
        dtype = array.dtype
        known = _torch_names.get(dtype)
        if known is None:
            known = _torch_names[dtype] = str(dtype).removeprefix("torch.")
        return _new(View, (ptr, tuple(array.shape), tuple(steps), known, device, False, array))

    def empty(self, site: Site, shape: tuple[int, ...], dtype: str) -> tuple[Any, View]:
        torch = sys.modules["torch"]
        tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=site.anchor.device)
        return tensor, _new(View, (tensor.data_ptr(), shape, dense(shape), dtype, site.device, False, tensor))

    def scratch(self, site: Site, nbytes: int) -> View:
        torch = sys.modules["torch"]
        tensor = torch.empty(nbytes, dtype=torch.uint8, device=site.anchor.device)
        return _new(View, (tensor.data_ptr(), (nbytes,), (1,), "uint8", site.device, False, tensor))

    def finish(self, site: Site, native: Any) -> Any:
        return native


NUMPY, CUPY, TORCH = Numpy(), Cupy(), Torch()
