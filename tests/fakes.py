"""Stand-ins for CuPy, PyTorch and JAX on two GPUs: they have no memory, and they log what is enqueued."""

import contextlib
import ctypes
import itertools
import sys
import types
from typing import Any

import numpy as np
import pytest

from cupy_gmm import _arrays, _device, _launch, _warm
from cupy_gmm._arrays import lifetime

BF16 = _arrays.families.numpy_dtype("bfloat16")


class Gpu:
    """The machine: current device, CuPy's and torch's current streams by device, and a log of calls."""

    def __init__(self) -> None:
        self.current = 0
        self.cupy_streams = {0: 0, 1: 0}
        self.torch_streams = {0: 0, 1: 0}
        self.capturing: set[int] = set()
        self.unfinished: set[int] = set()  # events that have not completed
        self.log: list[tuple[Any, ...]] = []
        self.handles = itertools.count(1000)
        self.addresses = itertools.count(0x10000, 0x10000)

    def calls(self, *names: str) -> list[tuple[Any, ...]]:
        return [entry for entry in self.log if entry[0] in names]


class Memory:
    def __init__(self, ptr: int, device_id: int) -> None:
        self.ptr, self.device_id = ptr, device_id

    def __add__(self, nbytes: int) -> "Memory":
        return Memory(self.ptr + nbytes, self.device_id)


def make_cuda(gpu: Gpu) -> Any:
    """`cupy.cuda`."""

    def note(name: str, result: Any = None) -> Any:
        def call(*arguments: Any) -> Any:
            gpu.log.append((name, *arguments))
            return result() if callable(result) else result

        return call

    class Event:
        def __init__(self, disable_timing: bool = False) -> None:
            assert disable_timing
            self.ptr = next(gpu.handles)
            self.device = gpu.current

        @property
        def done(self) -> bool:
            return self.ptr not in gpu.unfinished

    def set_device(device: int) -> None:
        gpu.log.append(("setDevice", device))
        gpu.current = device

    def launch(handle: int, *shape: int) -> None:
        *shape_and_stream, pointer, _ = shape
        block = ctypes.c_void_p.from_address(pointer).value
        gpu.log.append(("launch", handle, *shape_and_stream, ctypes.string_at(block, 4096).rstrip(b"\0")))

    def alloc(nbytes: int) -> Memory:
        gpu.log.append(("alloc", nbytes, gpu.current, gpu.cupy_streams[gpu.current]))
        return Memory(next(gpu.addresses), gpu.current)

    runtime = types.SimpleNamespace(
        getDevice=lambda: gpu.current,
        setDevice=set_device,
        streamIsCapturing=lambda stream: stream in gpu.capturing,
        eventRecord=note("record"),
        streamWaitEvent=note("wait"),
        streamSynchronize=note("synchronize"),
        mallocAsync=note("mallocAsync", lambda: next(gpu.addresses)),
        freeAsync=note("freeAsync"),
        memsetAsync=note("memset"),
    )
    return types.SimpleNamespace(
        runtime=runtime,
        driver=types.SimpleNamespace(launchKernel=launch),
        Event=Event,
        alloc=alloc,
        get_current_stream=lambda device: types.SimpleNamespace(ptr=gpu.cupy_streams[device]),
    )


def make_cupy(gpu: Gpu) -> Any:
    class ndarray:  # named as CuPy names it
        def __init__(self, shape: Any, dtype: Any = np.float32, memptr: Memory | None = None, **given: Any) -> None:
            self.shape, self.dtype = tuple(shape), np.dtype(dtype)
            ptr, device = given.get("ptr"), given.get("device", gpu.current)
            self.data = memptr or Memory(next(gpu.addresses) if ptr is None else ptr, device)
            steps = _arrays.dlpack.dense(self.shape)
            self.strides = given.get("strides", tuple(s * self.dtype.itemsize for s in steps))
            self.size = int(np.prod(self.shape))
            self.nbytes = self.size * self.dtype.itemsize
            gpu.log.append(("array", self.shape, gpu.current, gpu.cupy_streams[gpu.current]))

        def view(self) -> "ndarray":
            return ndarray(self.shape, self.dtype, self.data)

        def __dlpack__(self, *, stream: Any = None, **_: Any) -> Any:
            gpu.log.append(("export", stream))
            return ("capsule", self)

        def __dlpack_device__(self) -> tuple[int, int]:
            return 2, self.data.device_id

    module: Any = types.ModuleType("cupy")
    module.ndarray = ndarray
    module.cuda = make_cuda(gpu)
    return module


def make_torch(gpu: Gpu) -> Any:
    """Only what a CUDA tensor needs."""

    class Tensor:
        def __init__(self, shape: tuple[int, ...], dtype: str = "bfloat16", device: int = 0, ptr: int = 0) -> None:
            self.shape, self.dtype, self._device = shape, f"torch.{dtype}", device
            self._ptr = ptr or next(gpu.addresses)
            self.is_cuda, self.requires_grad = True, True
            self.device = types.SimpleNamespace(type="cuda", index=device)

        def get_device(self) -> int:
            return self._device

        def data_ptr(self) -> int:
            return self._ptr

        def stride(self) -> tuple[int, ...]:
            return _arrays.dlpack.dense(self.shape)

        def element_size(self) -> int:
            return {"torch.bfloat16": 2, "torch.uint8": 1}.get(self.dtype, 4)

        def is_neg(self) -> bool:
            return False

        is_conj = is_neg

    def empty(shape: Any, dtype: str, device: Any) -> Tensor:
        gpu.log.append(("torch.empty", shape, device.index, gpu.torch_streams[device.index]))
        return Tensor((shape,) if isinstance(shape, int) else shape, dtype, device.index)

    module: Any = types.ModuleType("torch")
    module.Tensor, module.empty, module.uint8, module.bfloat16 = Tensor, empty, "uint8", "bfloat16"
    module._C = types.SimpleNamespace(_cuda_getCurrentRawStream=lambda device: gpu.torch_streams[device])
    module.is_grad_enabled = lambda: True
    return module


def make_jax(gpu: Gpu) -> Any:
    """Arrays on the GPU; XLA's own stream is 77, or none when `names_no_stream`."""

    class Array:
        def __init__(self, producer: Any, place: str = "gpu:0") -> None:
            self.producer, self.place, self.ready = producer, place, True

        def __dlpack__(self, **options: Any) -> Any:
            return self.producer.__dlpack__(**options)

        def __dlpack_device__(self) -> tuple[int, int]:
            return self.producer.__dlpack_device__()

        def is_deleted(self) -> bool:
            return False

        def devices(self) -> set[str]:
            return {self.place}

        def is_ready(self) -> bool:
            return self.ready

    module: Any = types.ModuleType("jax")
    module.Array, module.names_no_stream, module.fences = Array, False, []

    def from_dlpack(external: Any) -> Any:
        _, ordinal = external.__dlpack_device__()
        stream = None if module.names_no_stream else 77
        return Array(external.__dlpack__(stream=stream)[1], f"gpu:{ordinal}")

    def jit(function: Any) -> Any:
        def run(value: Any) -> Any:
            module.fences.append(Array(None))
            return module.fences[-1]

        return run

    module.dlpack = types.ModuleType("jax.dlpack")
    module.dlpack.from_dlpack = from_dlpack
    module.jit, module.device_put = jit, lambda value, place: Array(value, place)
    module.ensure_compile_time_eval = contextlib.nullcontext
    return module


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A fake machine with the three fakes in `sys.modules`, as `.cupy`, `.torch`, `.jax`."""
    gpu: Any = Gpu()
    gpu.cupy, gpu.torch, gpu.jax = make_cupy(gpu), make_torch(gpu), make_jax(gpu)
    for name, module in (
        ("cupy", gpu.cupy),
        ("torch", gpu.torch),
        ("jax", gpu.jax),
        ("jax.dlpack", gpu.jax.dlpack),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(_arrays, "_seen", {})
    monkeypatch.setattr(lifetime, "_tick", None)
    monkeypatch.setattr(lifetime, "thread", types.SimpleNamespace(bound=False))
    monkeypatch.setattr(_device, "current", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(_device, "import_cupy", lambda: gpu.cupy)
    monkeypatch.setattr(_launch, "_cuda", lambda: gpu.cupy.cuda)
    monkeypatch.setattr(_warm, "_cupy", _warm.Cupy())
    monkeypatch.setattr(_warm, "entries", {})
    left = lifetime.pending[:]  # by calls on a real GPU, where there is one
    lifetime.pending.clear()
    yield gpu
    lifetime.pending[:] = left
