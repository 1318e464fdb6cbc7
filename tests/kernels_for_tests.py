"""Small CUDA texts, a folder of sources to edit and a stand-in for `cuda.bindings.driver`."""

from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace

# Each compiles in about 0.15 s.
SCALE = """
extern "C" __global__ void scale(float* p, float by) {
    p[blockIdx.x * blockDim.x + threadIdx.x] *= by;
}
"""

TWO = """
extern "C" __global__ void shared_400(float* p, int n) {
    __shared__ float tile[100];
    tile[threadIdx.x] = p[n];
    __syncthreads();
    p[0] = tile[3];
}
extern "C" __global__ void __launch_bounds__(1024, 1) spills(float* p, int n) {
    float v[120];
    for (int i = 0; i < 120; i++) v[i] = p[i * n];
    for (int i = 0; i < 120; i++) p[i * n + 3] = v[i] * v[119 - i];
}
"""


def write_sources(parent: Path) -> Path:
    """A kernels folder with one unit, and with a space and an accent in its name."""
    folder = parent / "my kernéls"
    (folder / "ptx").mkdir(parents=True)
    (folder / "ptx" / "types.cuh").write_text("#pragma once\nusing u32 = unsigned;\n")
    (folder / "ptx" / "misc.cuh").write_text('#pragma once\n#include "types.cuh"\n#include "../config.cuh"\n')
    (folder / "config.cuh").write_text("#pragma once\nconstexpr int kValue = 1;\n")
    body = 'extern "C" __global__ void whole(u32* p) { *p = kValue; }\n'
    (folder / "whole.cu").write_text('#include "ptx/misc.cuh"\n' + body)
    return folder


class Status(IntEnum):
    """The statuses of CUDA that the tests use."""

    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_INITIALIZED = 3
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_INVALID_IMAGE = 200
    CUDA_ERROR_NO_BINARY_FOR_GPU = 209


H100 = {
    "COMPUTE_CAPABILITY_MAJOR": 9,
    "COMPUTE_CAPABILITY_MINOR": 0,
    "MULTIPROCESSOR_COUNT": 132,
    "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 232448,
    "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": 233472,
    "L2_CACHE_SIZE": 52428800,
}


class FakeDriver:
    """Answers as `cuda.bindings.driver` does, and writes down what it was asked."""

    CUdevice_attribute = SimpleNamespace(**{f"CU_DEVICE_ATTRIBUTE_{name}": name for name in H100})
    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="dynamic_smem")
    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED="relaxed")

    def __init__(self, devices=2, version=13000, **statuses):
        self.devices, self.version = devices, version
        self.statuses = {name: Status[status] for name, status in statuses.items()}
        self.calls = []
        self.contexts = ["of the caller"]
        self.capture_mode = "global"

    def __getattr__(self, name):
        if not name.startswith("cu"):
            raise AttributeError(name)
        return lambda *arguments: self.answer(name, *arguments)

    def answer(self, name, *arguments):
        self.calls.append((name, *arguments))
        if status := self.statuses.get(name):
            return (status,)
        value = getattr(self, f"do_{name}", lambda *_: None)(*arguments)
        return (Status.CUDA_SUCCESS,) if value is None else (Status.CUDA_SUCCESS, value)

    def named(self, name):
        """The arguments of each call of one name."""
        return [call[1:] for call in self.calls if call[0] == name]

    def do_cuDeviceGetCount(self):
        return self.devices

    def do_cuDeviceGet(self, ordinal):
        return ordinal

    def do_cuDeviceGetName(self, length, device):
        return b"NVIDIA H100".ljust(length, b"\0")

    def do_cuDeviceGetAttribute(self, which, device):
        return H100[which]

    def do_cuDriverGetVersion(self):
        return self.version

    def do_cuDevicePrimaryCtxRetain(self, device):
        return f"context of {device}"

    def do_cuCtxPushCurrent(self, context):
        self.contexts.append(context)

    def do_cuCtxPopCurrent(self):
        return self.contexts.pop()

    def do_cuThreadExchangeStreamCaptureMode(self, mode):
        before, self.capture_mode = self.capture_mode, mode
        return before

    def do_cuModuleLoadData(self, image):
        assert self.capture_mode == "relaxed"
        return f"module in {self.contexts[-1]}"

    def do_cuModuleGetFunction(self, module, symbol):
        assert module == f"module in {self.contexts[-1]}"
        return 4096
