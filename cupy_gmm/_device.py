"""The devices of this process: facts about each, a guard that makes one current, what a fork does to them.

`_heuristics` and `_plan` read the facts, `_compile` loads kernels under the guard. The only module that
starts the CUDA driver, at the first question and never at import, and the one that imports CuPy for the
others. Goes through NVIDIA's `cuda-bindings` and the primary context, as CuPy, PyTorch and JAX do.
"""

import functools
import importlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from .errors import ArgumentError, CompileError, UnsupportedError

# Architectures that the portable path is compiled and tested for.
PORTABLE = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")

# Bytes of shared memory that one block can ask for: a multiprocessor has 1 KB more, which CUDA keeps.
SMEM_LIMIT = {
    "sm_80": 163 * 1024,
    "sm_86": 99 * 1024,
    "sm_89": 99 * 1024,
    "sm_90": 227 * 1024,
    "sm_100": 227 * 1024,
    "sm_120": 99 * 1024,
}


@dataclass(frozen=True, slots=True)
class Device:
    """What a device is; `ordinal` counts as CUDA does, after CUDA_VISIBLE_DEVICES."""

    ordinal: int
    name: str
    arch: str  # "sm_90": never with the letter of an architecture-specific target
    cc: tuple[int, int]
    sm_count: int
    smem_per_block_optin: int  # bytes
    smem_per_sm: int  # bytes
    l2_bytes: int
    driver_version: tuple[int, int]  # newest CUDA that the driver serves


_TYPICAL = {  # of a widespread part of each: multiprocessors, shared memory of one in KB, L2 in MB
    "sm_80": (108, 164, 40),
    "sm_86": (84, 100, 6),
    "sm_89": (142, 100, 96),
    "sm_90": (132, 228, 50),
    "sm_100": (148, 228, 126),
    "sm_120": (188, 100, 128),
}

_lock = threading.RLock()
_bindings: Any = None  # cuda.bindings.driver, once cuInit has passed
_infos: dict[int, Device] = {}
_contexts: dict[int, Any] = {}
_pid: int | None = None  # the process that called cuInit
_parent: int | None = None  # in a forked child: the process that had called it
_forgetters: list[Callable[[], object]] = []


def typical(arch: str) -> Device:
    """A stand-in for planning where there is no such device; `ordinal` is -1 and the driver version (0, 0).

    Raises:
        ArgumentError: `arch` is none of `PORTABLE`.
    """
    if arch not in _TYPICAL:
        raise ArgumentError(f"`arch` is {arch!r}: expected one of {', '.join(PORTABLE)}.")
    sm_count, smem_kb, l2_mb = _TYPICAL[arch]
    cc = divmod(int(arch.removeprefix("sm_")), 10)
    sizes = SMEM_LIMIT[arch], smem_kb * 1024, l2_mb * 1024 * 1024
    return Device(-1, f"typical {arch}", arch, cc, sm_count, *sizes, driver_version=(0, 0))


def count() -> int:
    """How many devices this process can use; 0 without a driver or where a fork lost them. Never raises.

    Starts the driver: a process that means to fork should ask in its children.
    """
    try:
        return int(check(driver().cuDeviceGetCount(), "counting the devices"))
    except Exception:  # an answer, not a diagnosis: `info` says what is wrong
        return 0


def info(ordinal: int) -> Device:
    """Facts of one device, asked for once.

    Raises:
        ArgumentError: this process sees no such device.
        UnsupportedError: no driver, no device at all, or a forked child of a process that had used CUDA.
    """
    found = _infos.get(ordinal)
    return found if found is not None else _ask(ordinal)


def _ask(ordinal: int) -> Device:
    api = driver()
    seen = count()
    if not 0 <= ordinal < seen:
        raise ArgumentError(
            f"device {ordinal} does not exist: this process sees {seen} (CUDA_VISIBLE_DEVICES can hide some)."
        )
    names = api.CUdevice_attribute
    doing = f"asking device {ordinal} for its properties"
    handle = check(api.cuDeviceGet(ordinal), doing)

    def attribute(name: str) -> int:
        which = getattr(names, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(check(api.cuDeviceGetAttribute(which, handle), doing))

    cc = attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR")
    label = check(api.cuDeviceGetName(128, handle), doing)
    found = Device(
        ordinal=ordinal,
        name=bytes(label).split(b"\0")[0].decode(errors="replace"),
        arch=f"sm_{cc[0]}{cc[1]}",
        cc=cc,
        sm_count=attribute("MULTIPROCESSOR_COUNT"),
        smem_per_block_optin=attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        smem_per_sm=attribute("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"),
        l2_bytes=attribute("L2_CACHE_SIZE"),
        driver_version=_version(check(api.cuDriverGetVersion(), doing)),
    )
    _infos[ordinal] = found
    return found


def _version(number: int) -> tuple[int, int]:
    return number // 1000, number % 1000 // 10


def driver() -> Any:
    """`cuda.bindings.driver`, started.

    Raises:
        UnsupportedError: no driver, no device, or a forked child of a process that had used CUDA.
        CompileError: `cuda-bindings` is not installed.
    """
    if _bindings is not None:
        return _bindings
    with _lock:
        return _start()


def _start() -> Any:
    global _bindings, _pid
    if _bindings is not None:  # another thread was first
        return _bindings
    if _parent is not None:
        raise UnsupportedError(_forked(f"process {_parent}"))
    api = _import_driver()
    try:
        status = api.cuInit(0)
    except (RuntimeError, OSError) as error:  # cuda-bindings looks for libcuda at the first call
        raise UnsupportedError(
            f"no CUDA driver was found ({str(error).rstrip('.')}): run this where an NVIDIA driver is installed; NumPy "
            "arrays and CPU arrays of PyTorch and JAX need none."
        ) from error
    if int(status[0]) == 3:  # CUDA_ERROR_NOT_INITIALIZED: another library used CUDA, then the process forked
        raise UnsupportedError(_forked("a parent process"))
    if int(status[0]) == 100:  # CUDA_ERROR_NO_DEVICE
        raise UnsupportedError("the CUDA driver sees no device: check CUDA_VISIBLE_DEVICES and `nvidia-smi`.")
    check(status, "starting the CUDA driver")
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_forget)
    _pid = os.getpid()
    _bindings = api
    return api


def _forked(who: str) -> str:
    return (
        f"{who} used CUDA and then forked into this one, process {os.getpid()}, and CUDA does not work in "
        'such a child: start workers with the "spawn" or "forkserver" method of multiprocessing, or fork '
        "before the first use of a GPU."
    )


def forget_in_child(clear: Callable[[], object]) -> None:
    """Call `clear` in every forked child: handles of the parent must not be found there.

    A module that keeps device handles passes the `clear` of its dictionary, once, at import.
    """
    _forgetters.append(clear)


def _forget() -> None:
    global _lock, _bindings, _parent
    _lock = threading.RLock()  # another thread of the parent may have held it
    _parent, _bindings = _pid, None
    for clear in (_infos.clear, _contexts.clear, *_forgetters):
        clear()


def _import_driver() -> Any:
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise CompileError(f"`cuda-bindings` cannot be imported ({error}): {advice()}.") from error


def advice() -> str:
    """Which extra brings what is missing."""
    return "install `cupy-gmm[cuda13]`, or `cupy-gmm[cuda12]` where the driver is older than CUDA 13"


def check(result: tuple[Any, ...], doing: str) -> Any:
    """What a call gave: None, a value, or a tuple of several.

    Args:
        result: what cuda-bindings returned: the status, then the values.
        doing: what was tried, as the start of a sentence.

    Raises:
        CompileError: the status is an error; CUDA's name for it is told.
    """
    status, *values = result
    if int(status) != 0:
        name = getattr(status, "name", None) or f"error {int(status)}"
        raise CompileError(f"{doing} failed: {name} ({int(status)}).")
    if len(values) > 1:
        return tuple(values)
    return values[0] if values else None


@contextmanager
def current(ordinal: int) -> Iterator[Any]:
    """The bindings, with the device's primary context current in this thread; the caller's comes back.

    A stream capture under way is not disturbed: loading a kernel enqueues nothing, so it is no part of it.
    """
    api = driver()
    info(ordinal)
    doing = f"making device {ordinal} current"
    with _lock:
        if ordinal not in _contexts:  # retained for the life of the process, as every runtime does
            handle = check(api.cuDeviceGet(ordinal), doing)
            _contexts[ordinal] = check(api.cuDevicePrimaryCtxRetain(handle), doing)
    check(api.cuCtxPushCurrent(_contexts[ordinal]), doing)
    try:
        relaxed = api.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        before = check(api.cuThreadExchangeStreamCaptureMode(relaxed), doing)
        try:
            yield api
        finally:
            api.cuThreadExchangeStreamCaptureMode(before)
    finally:
        api.cuCtxPopCurrent()


@functools.cache  # not sys.modules: another thread may be in the middle of the import; failures are not kept
def import_cupy() -> Any:
    """The module `cupy`, imported at the first call.

    Raises:
        UnsupportedError: it is not installed, or its import failed; the message says what to set.
    """
    try:
        return importlib.import_module("cupy")
    except ImportError as error:
        raise UnsupportedError(f"CuPy cannot be imported ({error}): {advice()}.") from error
    except OSError as error:  # it makes its cache folder at import, whatever its settings say
        raise UnsupportedError(
            f"CuPy cannot be imported, as it cannot make its cache folder ({error}): set CUPY_CACHE_DIR, or "
            "HOME, to a folder that you can write."
        ) from error
