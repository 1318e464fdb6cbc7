"""The libraries whose arrays are read through a DLPack capsule: JAX, and any other with `__dlpack__`.

The producer is told the stream of the call and orders its own work before it; the capsule is kept until the
launch is done (`lifetime`). Results are CuPy arrays, which for JAX go back through DLPack.
"""

import weakref
from typing import Any

import numpy as np

from .. import _device
from ..errors import ArgumentError, UnsupportedError
from . import dlpack
from .families import NUMPY, Cupy, mixed, uneven
from .lifetime import retire
from .site import Site, View


class Dlpack(Cupy):
    """Any array with `__dlpack__`; results are CuPy arrays, or NumPy arrays on the CPU."""

    name = "dlpack"
    leased = True

    def device(self, name: str, array: Any) -> int:
        kind, ordinal = dlpack.device_of(name, array)
        if kind in (dlpack.CUDA, dlpack.MANAGED):
            return ordinal
        if kind == dlpack.PINNED:
            raise ArgumentError(f"`{name}` is in pinned host memory: pass a copy on the device, made by `cupy.array`.")
        if kind != dlpack.CPU:
            raise UnsupportedError(
                f"`{name}` is on DLPack device type {kind}: expected type {dlpack.CUDA} (CUDA) or "
                f"{dlpack.CPU} (the CPU)."
            )
        return -1

    def stream(self, device: int) -> int:
        return super().stream(device) if device >= 0 else 0

    def read(self, name: str, array: Any, site: Site) -> View:
        device = self.device(name, array)
        if device != site.device:
            raise mixed(site, name, device)
        if device < 0:
            found = dlpack.export(name, array)
        else:
            with site.guard():
                found = dlpack.export(name, array, stream=self._stream_number(site))
            if found.ptr % found.itemsize:
                raise uneven(name, found.ptr, found.strides, found.itemsize)
        readonly = found.readonly or found.copied  # a copy made for us is one that nobody reads back
        return View(found.ptr, found.shape, found.strides, found.dtype, device, readonly, found.lease)

    def _stream_number(self, site: Site) -> int | None:
        """Our stream as the DLPack standard numbers it: the legacy one is 1, and 0 is forbidden.

        Inside a capture -1, which asks for no ordering: to wait for an event from outside would end the
        capture.
        """
        return -1 if site.in_graph() else site.stream or 1

    def empty(self, site: Site, shape: tuple[int, ...], dtype: str) -> tuple[Any, View]:
        return super().empty(site, shape, dtype) if site.device >= 0 else NUMPY.empty(site, shape, dtype)


class Jax(Dlpack):
    """Concrete jax.Arrays, which are immutable and so never an output.

    JAX has no public stream: the call runs on CuPy's current one, XLA makes that stream wait for the inputs,
    and the result goes back with the stream that XLA names.
    """

    name = "jax"

    def device(self, name: str, array: Any) -> int:
        if array.is_deleted():
            raise ArgumentError(
                f"`{name}` is a jax.Array that was deleted, or donated to a computation: pass one that lives."
            )
        return super().device(name, array)

    def read(self, name: str, array: Any, site: Site) -> View:
        if site.device >= 0:
            return super().read(name, array, site)._replace(readonly=True)
        if (device := self.device(name, array)) >= 0:
            raise mixed(site, name, device)
        return NUMPY.read(name, np.asarray(array), site)._replace(readonly=True)

    def _stream_number(self, site: Site) -> int | None:
        # XLA knows no -1. None makes the host wait for the array, which a capture allows.
        return None if site.in_graph() else site.stream or 1

    def finish(self, site: Site, native: Any) -> Any:
        import jax
        import jax.dlpack

        (place,) = site.anchor.devices()
        if site.device < 0:
            return jax.device_put(native, place)
        if native.size == 0:  # XLA takes no null pointer
            return jax.device_put(np.empty(native.shape, native.dtype), place)
        with site.guard():
            lent = native.view()
            weakref.finalize(lent, retire, site.device, place, native).atexit = False
            return jax.dlpack.from_dlpack(_Lent(lent, site.stream))


class _Lent:
    """A CuPy array on its way into JAX.

    CuPy makes the stream that JAX names wait for CuPy's current one, which is the stream of the call. An XLA
    client that names none takes the memory as ready at once, so for that one the host waits.
    """

    def __init__(self, array: Any, stream: int) -> None:
        self._array = array
        self._stream = stream

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()

    def __dlpack__(self, *, stream: int | None = None, **options: Any) -> Any:
        if stream is None:
            _device.import_cupy().cuda.runtime.streamSynchronize(self._stream)
            stream = -1
        return self._array.__dlpack__(stream=stream, **options)


JAX, DLPACK = Jax(), Dlpack()
