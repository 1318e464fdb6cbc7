"""Source text to cubin to function: memory, the cache on disk, NVRTC; then the driver.

`_plan` and `_launch` compile and load here. Compiling needs no GPU, loading does. Knows nothing of what the
kernels compute.

Not through CuPy's RawModule: compiling there needs a device, adds -ftz=true and a second -arch, and its cache
does not see the text of included files; loading there takes a file, which may change after its check.
"""

import os
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from . import _cache, _device, _nvrtc, _source
from ._nvrtc import Resources as Resources
from ._nvrtc import version as nvrtc_version
from ._version import __version__
from .errors import CompileError

# What a block may use without asking, static and dynamic together.
_SMEM_WITHOUT_ASKING = 48 * 1024


@dataclass(frozen=True, slots=True)
class Cubin:
    """One compile: code for exactly one architecture, and what the compiler said of it."""

    image: bytes
    arch: str  # "sm_90a"
    log: str
    resources: Mapping[str, Resources]  # by symbol, every kernel of the text
    nvrtc: str  # the version that made it, "12.9"
    name: str  # of the text, for messages
    key: str  # hash of all that decides it


@dataclass(frozen=True, slots=True)
class Function:
    """A kernel loaded on one device; valid for the life of the process."""

    handle: int  # CUfunction
    symbol: str
    device: int


_cubins: dict[str, Cubin] = {}
_compiling: dict[str, threading.Lock] = {}
_modules: "dict[tuple[str, int], Module]" = {}
_lock = threading.Lock()


def compile_source(text: str, arch: str, name: str) -> Cubin:
    """Compile a text that may include the kernel sources, unless memory or disk has the result.

    Threads that ask for the same at once wait for one compile. Never touches the driver.

    Args:
        text: CUDA C++; its `#include`s are relative to the kernels folder, nothing else is searched.
        arch: the one real architecture, `sm_80` or `sm_90a`.
        name: stands for the text in messages, such as `grouped_mm_sm90.cu`.

    Raises:
        CompileError: with the compiler's log; or no usable NVRTC, and which extra brings it.
    """
    material = _key_material(text, arch, name)
    key = _cache.key(material)
    with _lock:
        compiling = _compiling.setdefault(key, threading.Lock())
    with compiling:
        cubin = _cubins.get(key) or _from_disk(material, key)
        if cubin is None:
            image, log, resources = _nvrtc.compile_text(text, arch, name)
            cubin = Cubin(image, arch, log, resources, nvrtc_version(), name, key)
            if _source.digest() != material["kernels"]:
                return cubin  # a source was edited meanwhile: as good as any, but not what the key says
            _cache.write(material, _metadata(cubin), image)
        _cubins[key] = cubin
        return cubin


def _key_material(text: str, arch: str, name: str) -> dict[str, object]:
    # `kernels` stands for every text in the folder. Where the folder lies is left out: it changes no cubin.
    return {
        "library": __version__,
        "name": name,
        "text": text,
        "kernels": _source.digest(),
        "options": list(_nvrtc.OPTIONS),
        "arch": arch,
        "nvrtc": nvrtc_version(),
    }


def _metadata(cubin: Cubin) -> dict[str, object]:
    return {"log": cubin.log, "resources": {symbol: asdict(used) for symbol, used in cubin.resources.items()}}


def _from_disk(material: Mapping[str, object], key: str) -> Cubin | None:
    entry = _cache.read(material)
    if entry is None:
        return None
    metadata: Any = entry[0]
    try:
        resources = {symbol: Resources(**used) for symbol, used in metadata["resources"].items()}
        log = str(metadata["log"])
    except (AttributeError, KeyError, TypeError):  # written by other code under the same version
        return None
    arch, nvrtc, name = (str(material[part]) for part in ("arch", "nvrtc", "name"))
    return Cubin(entry[1], arch, log, resources, nvrtc, name, key)


class Module:
    """A cubin loaded on one device, for the life of the process."""

    def __init__(self, cubin: Cubin, device: int) -> None:
        self.cubin = cubin
        self.device = device
        self._lock = threading.Lock()
        self._functions: dict[str, tuple[Function, int]] = {}  # with the dynamic shared memory it may use
        with _device.current(device) as api:
            # From memory: what was checked is what is loaded.
            try:
                self._handle = _device.check(api.cuModuleLoadData(cubin.image), f"loading `{cubin.name}`")
            except CompileError as error:
                raise CompileError(f"{error} {_versions(cubin, device)}") from error

    def function(self, symbol: str, dynamic_smem: int = 0) -> Function:
        """A kernel by name, to be launched with at most `dynamic_smem` bytes of dynamic shared memory.

        Raises:
            CompileError: no such kernel here, or more shared memory than a block of this device can have.
        """
        with self._lock:
            function, allowed = self._functions.get(symbol, (None, -1))
            if function is None or dynamic_smem > allowed:
                function = self._prepare(symbol, dynamic_smem)
                self._functions[symbol] = function, dynamic_smem
            return function

    def _prepare(self, symbol: str, dynamic_smem: int) -> Function:
        resources = self.cubin.resources.get(symbol)
        if resources is None:
            known = ", ".join(f"`{name}`" for name in sorted(self.cubin.resources)) or "none at all"
            raise CompileError(f"`{self.cubin.name}` has no kernel `{symbol}`: it has {known}.")
        wanted = resources.static_smem + dynamic_smem
        limit = _device.info(self.device).smem_per_block_optin
        if wanted > limit:
            raise CompileError(
                f"`{symbol}` needs {wanted} bytes of shared memory a block: device {self.device} has "
                f"{limit}; choose a smaller tile or fewer stages."
            )
        doing = f"preparing `{symbol}` on device {self.device}"
        with _device.current(self.device) as api:
            handle = _device.check(api.cuModuleGetFunction(self._handle, symbol.encode()), doing)
            _load_now(api, handle, doing)
            if wanted > _SMEM_WITHOUT_ASKING:
                attribute = api.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                _device.check(api.cuFuncSetAttribute(handle, attribute, dynamic_smem), doing)
        return Function(int(handle), symbol, self.device)


def _load_now(api: Any, handle: Any, doing: str) -> None:
    """Finish what lazy loading would put off until the first launch, which may be inside a capture."""
    try:
        status = api.cuFuncLoad(handle)
    except RuntimeError:  # a driver older than CUDA 12.4 has no such call
        return
    _device.check(status, doing)


def _versions(cubin: Cubin, device: int) -> str:
    """Why the driver may have refused a cubin, and what to do."""
    facts = _device.info(device)
    served, made = facts.driver_version, int(cubin.nvrtc.split(".")[0])
    told = (
        f"NVRTC {cubin.nvrtc} compiled it for {cubin.arch}; device {device} is {facts.name} ({facts.arch}), "
        f"and its driver serves CUDA up to {served[0]}.{served[1]}"
    )
    if made > served[0]:
        return f"{told}: update the driver to one for CUDA {made}, or install `cupy-gmm[cuda{served[0]}]`."
    if cubin.arch.rstrip("af") != facts.arch:
        return f"{told}: compile for {facts.arch}."
    return f"{told}: update the driver, or install an NVRTC that is not newer."


def load(cubin: Cubin, device: int) -> Module:
    """Load a cubin on a device, once; the caller's current device stays as it is.

    Raises:
        CompileError: the driver refuses it; both versions and the remedy are named.
        UnsupportedError: no driver, or a forked child of a process that had used CUDA.
        ArgumentError: no such device.
    """
    with _lock:
        module = _modules.get((cubin.key, device))
        if module is None:
            module = _modules[cubin.key, device] = Module(cubin, device)
        return module


def _forget_locks() -> None:
    """In a forked child, where no thread of the parent is left to let go of a lock."""
    global _lock
    _lock = threading.Lock()
    _compiling.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_locks)
_device.forget_in_child(_modules.clear)
