"""Any array in, the caller's framework out.

`locate` says what the arguments of one call are (a `View` each) and where the call runs (a `Site`); `host`
gives the NumPy array over a View on the CPU. Used by `ops` and the modules beside it; knows nothing of
kernels or of shapes that fit together. Top to bottom: `foreign` and `families` (one object a library),
`site`, `lifetime`, `dlpack`.
"""

import sys
from typing import Any

import numpy as np

from ..errors import ArgumentError, UnsupportedError
from .families import CUPY, NUMPY, TORCH, numpy_dtype
from .foreign import DLPACK, JAX
from .lifetime import pending, poll
from .site import Site, View

__all__ = ["Site", "View", "host", "locate"]

_NONE: frozenset[str] = frozenset()
_seen: dict[type, Any] = {}  # exact type of an array seen before -> its family


def locate(*named: tuple[str, Any], writable: frozenset[str] = _NONE) -> tuple[Site, list[Any]]:
    """Where a call runs and what its arguments are.

    The first array decides the family, the device and, as that family's current stream there, the stream.
    Arrays of other families are ordered on that stream.

    Args:
        *named: (argument name, array or None), in the order of the signature.
        writable: names of arguments that the call writes.

    Returns:
        The Site, and a View for each array, None for None.

    Raises:
        ArgumentError: no array at all, something that is no array, two devices, memory that cannot be
            read or, for a name in `writable`, cannot be written.
        DtypeError: an element type that DLPack names and this library does not.
        UnsupportedError: a traced value, a tensor without memory, a device that is neither CUDA nor the CPU.
    """
    if pending:
        poll()
    site: Any = None
    views: list[View | None] = []
    for name, array in named:
        if array is None:
            views.append(None)
            continue
        family = _seen.get(type(array)) or _classify(name, array)
        if site is None:
            device = family.device(name, array)
            site = Site(family, name, array, device, family.stream(device) if device >= 0 else 0)
        view = family.read(name, array, site)
        if writable and name in writable:
            _check_writable(name, array, view, family)
        if family is not site.maker or family.leased:
            site.admit(family, array, view, name in writable)
        views.append(view)
    if site is None:
        names = ", ".join(f"`{name}`" for name, _ in named)
        raise ArgumentError(f"{names}: all are None, expected an array.")
    return site, views


def host(view: View) -> np.ndarray:
    """The NumPy array that shares the memory of a View on the CPU, read-only if the View is."""
    if view.device >= 0:
        raise AssertionError("host() was given a View of device memory")
    dtype = numpy_dtype(view.dtype)
    if 0 in view.shape:
        array = np.empty(view.shape, dtype)
        array.flags.writeable = not view.readonly
        return array
    return np.asarray(_Memory(view, dtype.itemsize)).view(dtype)


class _Memory:
    """What NumPy asks for memory. It becomes the array's base, and so keeps the View's owner alive."""

    def __init__(self, view: View, itemsize: int) -> None:
        self.owner = view.owner
        self.__array_interface__ = {
            "version": 3,
            "shape": view.shape,
            "typestr": f"|V{itemsize}",  # bfloat16 has no spelling here; `host` names the bits
            "strides": tuple(step * itemsize for step in view.strides),
            "data": (view.ptr, view.readonly),
        }


def _check_writable(name: str, array: Any, view: View, family: Any) -> None:
    if family is JAX:
        raise ArgumentError(f"`{name}` is a jax.Array, which nothing may change: leave it out and use the result.")
    if view.readonly:
        raise ArgumentError(f"`{name}` is read-only memory: pass an array that may be written.")
    if family is TORCH and array.requires_grad and sys.modules["torch"].is_grad_enabled():
        raise ArgumentError(
            f"`{name}` requires grad, and autograd would not see it written: pass `{name}.detach()`, or call "
            "under torch.no_grad()."
        )


def _classify(name: str, array: Any) -> Any:
    """The family of an argument whose type was not seen before."""
    jax = sys.modules.get("jax")
    tracer = getattr(getattr(jax, "core", None), "Tracer", None)
    if tracer is not None and isinstance(array, tracer):
        raise UnsupportedError(
            f"`{name}` is a value that JAX is tracing (jit, grad, vmap), and this call takes concrete "
            "arrays: move it out of the transformation, or call `cupy_gmm.jax` in there."
        )
    families = (
        ("cupy", "ndarray", CUPY),
        ("torch", "Tensor", TORCH),
        ("numpy", "ndarray", NUMPY),
        ("jax", "Array", JAX),
    )
    family: Any = DLPACK
    for module, attribute, candidate in families:
        kind = getattr(sys.modules.get(module), attribute, None)
        if kind is not None and isinstance(array, kind):
            family = candidate
            break
    if family.leased and not hasattr(array, "__dlpack__"):
        hint = "; make one with `asarray` of your library" if isinstance(array, list | tuple | float | int) else ""
        raise ArgumentError(
            f"`{name}` is a {type(array).__name__}: expected an array of CuPy, PyTorch, JAX or NumPy, or "
            f"another with `__dlpack__`{hint}."
        )
    _seen[type(array)] = family
    return family
