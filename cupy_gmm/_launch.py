"""The launch: one by-value struct, the caller's stream. Used by `_table`, `_plan`, `_schedule` and `_rowwise`."""

import ctypes
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from . import _compile, _device, _recent, _source

MAX_PARAMS_BYTES = 4096  # what CUDA takes

# Argument blocks that no launch is using: the bytes, and the address of the pointer to them. The driver copies a block
# during the launch, so there are as many as launches have been under way at once, in threads or in signal handlers.
_spare: list[tuple[memoryview, int]] = []


@functools.cache
def _cuda() -> Any:
    return _device.import_cupy().cuda


class Kernel(NamedTuple):
    """A kernel loaded on a device, and the shape of its launches. A tuple, as every launch reads all of it."""

    handle: int  # CUfunction
    grid: tuple[int, int, int]  # CTAs
    block: int  # threads of a CTA
    smem: int  # dynamic shared memory of a CTA, bytes


def enqueue(kernel: Kernel, stream: int, params: bytes) -> None:
    """Launches `kernel` on `stream`; returns at once.

    Args:
        kernel: Of the device that is current.
        stream: CUDA handle.
        params: The kernel's one struct argument.
    """
    handle, (x, y, z), block, smem = kernel
    try:
        arguments = _spare.pop()
    except IndexError:
        arguments = _new_block()
    view, pointer = arguments
    view[: len(params)] = params
    _cuda().driver.launchKernel(handle, x, y, z, block, 1, 1, smem, stream, pointer, 0)
    _spare.append(arguments)


def _new_block(room: int = MAX_PARAMS_BYTES) -> tuple[memoryview, int]:
    room = -(-room // 8) * 8
    memory = ctypes.create_string_buffer(room + ctypes.sizeof(ctypes.c_void_p))
    start = ctypes.addressof(memory)
    ctypes.c_void_p.from_buffer(memory, room).value = start
    return memoryview(memory).cast("B")[:room], start + room


def ready(kernel: Kernel, stream: int, params: bytes) -> Callable[[], object]:
    """`enqueue`, to be repeated. The block is its own, never written again: threads may share it."""
    handle, (x, y, z), block, smem = kernel
    view, pointer = _new_block(len(params))
    view[: len(params)] = params
    again = functools.partial(_cuda().driver.launchKernel, handle, x, y, z, block, 1, 1, smem, stream, pointer, 0)
    again.params = view  # type: ignore[attr-defined]  # lives as long
    return again


class Launcher:
    """Launches one kernel, with another stream and other addresses each time, or with the same ones again.

    Arrays come to lie where they lay before: the second launch alike keeps its argument block, and those after it pack
    nothing.
    """

    __slots__ = ("_kernel", "_known", "_pack")

    def __init__(self, kernel: Kernel, pack: Callable[..., bytes]) -> None:
        """`pack` makes the kernel's one struct argument of the addresses."""
        self._kernel = kernel
        self._pack = pack
        self._known: dict[tuple[int, ...], Callable[[], object] | None] = {}  # None: there was one

    def __call__(self, *stream_and_addresses: int) -> None:
        """Launches; the device must be current. perf: bench/notes/0005-host-cost.md"""
        again = self._known.get(stream_and_addresses)
        if again is not None:
            again()
        elif stream_and_addresses in self._known:
            again = self.ready(*stream_and_addresses)
            _recent.remember(self._known, stream_and_addresses, again)
            again()
        else:
            _recent.remember(self._known, stream_and_addresses, None)
            stream, *addresses = stream_and_addresses
            enqueue(self._kernel, stream, self._pack(*addresses))

    def ready(self, stream: int, *addresses: int) -> Callable[[], object]:
        """One launch, to be repeated."""
        return ready(self._kernel, stream, self._pack(*addresses))


def launch(function: Any, grid: int | tuple[int, ...], block: int, smem: int, site: Any, params: bytes) -> None:
    """`enqueue` for a launch that is not kept.

    Args:
        function: What `_compile.Module.function` gave.
        grid: CTAs, or up to three extents.
        block: Threads of a CTA.
        smem: Dynamic shared memory of a CTA, bytes.
        site: Where the arrays are; its device must be current (`site.guard()`).
        params: The kernel's one struct argument.
    """
    x, y, z = (grid, 1, 1) if isinstance(grid, int) else (*grid, 1, 1)[:3]
    enqueue(Kernel(function.handle, (x, y, z), block, smem), site.stream, params)


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


def zero(address: int, nbytes: int, stream: int) -> None:
    """Zeroes device memory on `stream`; a node of the graph under capture."""
    _cuda().runtime.memsetAsync(address, 0, nbytes, stream)


def zeroing(address: int, nbytes: int, stream: int) -> Callable[[], object]:
    """`zero`, to be repeated."""
    return functools.partial(_cuda().runtime.memsetAsync, address, 0, nbytes, stream)


_device.forget_in_child(unit_function.cache_clear)
