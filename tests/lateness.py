"""Fixtures of tests on a GPU: PyTorch and JAX that can use it, a copy on the stream of a Site, ways to be late."""

import os
import struct
import types
from importlib.util import find_spec

import pytest

from cupy_gmm import _launch
from cupy_gmm._arrays import locate
from tests import backends

COUNT = 1 << 20  # elements that every kernel treats
SPIN_CYCLES = 100_000_000  # about 50 ms

KERNELS = r"""
struct Job { const unsigned short* source; unsigned short* target; long long count; long long value; };

extern "C" __global__ void copy(Job job) {
    for (long long i = blockIdx.x * 256ll + threadIdx.x; i < job.count; i += gridDim.x * 256ll)
        job.target[i] = job.source[i];
}
extern "C" __global__ void fill(Job job) {
    for (long long i = blockIdx.x * 256ll + threadIdx.x; i < job.count; i += gridDim.x * 256ll)
        job.target[i] = (unsigned short)job.value;
}
extern "C" __global__ void spin(Job job) {
    long long start = clock64();
    while (clock64() - start < job.count) {}
}
"""


@pytest.fixture(scope="module")
def kernels():
    import cupy

    module = cupy.RawModule(code=KERNELS)
    return {name: module.get_function(name).kernel.ptr for name in ("copy", "fill", "spin")}


@pytest.fixture
def run(kernels):
    """run(name, stream, source, target, count, value)"""

    def run(name, stream, source=0, target=0, count=COUNT, value=0):
        job = struct.pack("qqqq", source, target, count, value)
        grid, block = (1, 1) if name == "spin" else (64, 256)
        where = types.SimpleNamespace(stream=stream)
        _launch.launch(types.SimpleNamespace(handle=kernels[name]), grid, block, 0, where, job)

    return run


@pytest.fixture
def late(run):
    """late(stream, address, value): after 50 ms on that stream, the array holds the value."""

    def late(stream, address, value):
        run("spin", stream, count=SPIN_CYCLES)
        run("fill", stream, target=address, value=value)

    return late


@pytest.fixture
def copied(run):
    """copied(first, ..., last, out=None): a copy of the last array, made where the first one says."""

    def copied(*arrays, out=None):
        named = [(f"a{i}", array) for i, array in enumerate(arrays)]
        site, views = locate(*named, ("out", out), writable=frozenset({"out"}))
        native, made = (out, views[-1]) if out is not None else site.empty(views[-2].shape, "float16")
        with site.guard():
            run("copy", site.stream, views[-2].ptr, made.ptr)
            site.hold(views)
        return out if out is not None else site.finish(native)

    return copied


@pytest.fixture(scope="module")
def torch():
    """PyTorch that can use the GPU: see `torches.usable`."""
    from tests import torches

    torches.usable("cuda")
    return torches.torch


@pytest.fixture(scope="module")
def jax():
    """JAX that can use the GPU.

    Who has one may still have installed JAX for the CPU, as `pip install jax` does: then a skip, and only if no plugin
    for CUDA is there. The log of `tests.gpu_run` lists every skip with its reason, and `gpu_log` complains
    of a log with one.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    try:
        jax.devices("gpu")
    except RuntimeError:
        if any(find_spec(f"jax_cuda{toolkit}_plugin") for toolkit in (12, 13)):
            raise  # a JAX for CUDA that does not find the GPU is no reason to skip
        pytest.skip("this JAX is one for the CPU: it has no CUDA plugin")
    backends.use_first_gpu()  # once it has found the GPUs, XLA leaves the last one current
    return jax
