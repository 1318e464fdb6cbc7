"""The launch: one by-value struct, the caller's stream. Used by `ops`, `_schedule`, `routing` and `moe`."""

import ctypes
import functools
import threading
from typing import Any

from . import _compile, _device, _source

MAX_PARAMS_BYTES = 4096  # what CUDA takes


class _Arguments(threading.local):
    """This thread's argument block. The driver copies it during the launch, so one block serves all calls in turn."""

    def __init__(self) -> None:
        self.block = ctypes.create_string_buffer(MAX_PARAMS_BYTES)
        self.view = memoryview(self.block).cast("B")
        self.pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self.block))
        self.address = ctypes.addressof(self.pointers)


_arguments = _Arguments()


@functools.cache
def _driver() -> Any:
    return _device.import_cupy().cuda.driver


def launch(function: Any, grid: int | tuple[int, ...], block: int, smem: int, site: Any, params: bytes) -> None:
    """Launches `function` on the stream of `site`; returns at once.

    Args:
        function: What `_compile.Module.function` gave.
        grid: CTAs, or up to three extents.
        block: Threads of a CTA.
        smem: Dynamic shared memory of a CTA, bytes.
        site: Where the arrays are; its device must be current (`site.guard()`).
        params: The kernel's one struct argument.
    """
    x, y, z = (grid, 1, 1) if isinstance(grid, int) else (*grid, 1, 1)[:3]
    arguments = _arguments
    arguments.view[: len(params)] = params
    _driver().launchKernel(function.handle, x, y, z, block, 1, 1, smem, site.stream, arguments.address, 0)


@functools.cache
def unit_function(unit: str, symbol: str, device: int, smem: int = 0) -> Any:
    """The kernel `symbol` of a whole `.cu` file, compiled and loaded once a device.

    Args:
        unit: File name in `kernels/`, such as "schedule.cu".
        symbol: Name of the kernel.
        device: CUDA ordinal.
        smem: Dynamic shared memory that launches may ask for, bytes.
    """
    cubin = _compile.compile_source(_source.unit(unit), _device.info(device).arch, unit)
    return _compile.load(cubin, device).function(symbol, smem)


def memset32(address: int, nbytes: int, site: Any) -> None:
    """Zeroes device memory on the stream of `site`; a node of the graph under capture."""
    _device.import_cupy().cuda.runtime.memsetAsync(address, 0, nbytes, site.stream)


_device.forget_in_child(unit_function.cache_clear)
