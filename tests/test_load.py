"""Loading a cubin and its kernels: with a stand-in for the driver, and on a GPU (C101, C103, C104)."""

import threading

import numpy as np
import pytest

from cupy_gmm import _compile, _device
from cupy_gmm.errors import ArgumentError, CompileError
from tests import apart
from tests.kernels_for_tests import SCALE, FakeDriver

USED = {"small": _compile.Resources(20, 0, 0, 1024), "other": _compile.Resources(20, 0, 0, 0)}


def cubin(arch="sm_90a", nvrtc="13.0", key="key"):
    return _compile.Cubin(b"\x7fELF", arch, "", USED, nvrtc, "text.cu", key)


@pytest.fixture
def start(monkeypatch):
    """Replace the driver, with nothing loaded yet."""

    def replace(**options):
        fake = FakeDriver(**options)
        monkeypatch.setattr(_device, "_bindings", fake)
        monkeypatch.setattr(_device, "_infos", {})
        monkeypatch.setattr(_device, "_contexts", {})
        return fake

    _compile._modules.clear()
    yield replace
    _compile._modules.clear()


def test_loaded_once_a_device_and_the_context_comes_back(start):
    fake = start()
    modules = [_compile.load(cubin(), device) for device in (0, 1, 0, 1)]
    assert modules[0] is modules[2]
    assert modules[1] is modules[3]
    assert [module.device for module in modules[:2]] == [0, 1]
    assert fake.named("cuModuleLoadData") == [(b"\x7fELF",)] * 2
    assert _compile.load(cubin(key="other"), 0) is not modules[0]
    function = modules[1].function("small")
    assert function == _compile.Function(4096, "small", 1)
    assert modules[1].function("small") is function
    assert len(fake.named("cuModuleGetFunction")) == 1
    assert fake.named("cuFuncLoad") == [(4096,)]
    assert (fake.contexts, fake.capture_mode) == (["of the caller"], "global")


def test_c104_sixteen_threads_load_once(start):
    fake = start()
    apart.at_once(lambda: _compile.load(cubin(), 0).function("small", 100_000))
    assert len(fake.named("cuModuleLoadData")) == len(fake.named("cuModuleGetFunction")) == 1


def test_shared_memory_is_asked_for_above_48_kb_static_included(start):
    fake = start()
    module = _compile.load(cubin(), 0)
    asked = []
    for wanted in (0, 47 * 1024, 47 * 1024 + 1, 1000, 200_000, 100_000, 200_000):
        module.function("small", wanted)
        asked.append([call[-1] for call in fake.named("cuFuncSetAttribute")])
    first = 47 * 1024 + 1
    assert asked == [[], [], [first], [first], [first, 200_000], [first, 200_000], [first, 200_000]]
    assert fake.named("cuFuncSetAttribute")[0] == (4096, "dynamic_smem", first)
    module.function("small", 232448 - 1024)
    with pytest.raises(CompileError, match=r"`small` needs 232449 bytes .*device 0 has 232448; choose a smaller"):
        module.function("small", 232449 - 1024)
    module.function("other", 232448)


def test_unknown_kernel_names_those_there(start):
    start()
    with pytest.raises(CompileError, match=r"`text.cu` has no kernel `absent`: it has `other`, `small`"):
        _compile.load(cubin(), 0).function("absent")


def test_no_such_device(start):
    start(devices=1)
    with pytest.raises(ArgumentError, match="device 1 does not exist"):
        _compile.load(cubin(), 1)


@pytest.mark.parametrize(
    "made, served, arch, words",
    [
        (
            "13.0",
            12040,
            "sm_90a",
            r"NVRTC 13.0 .*up to 12.4: update the driver to one for CUDA 13, or .*\[cuda12\]",
        ),
        (
            "12.9",
            12020,
            "sm_90a",
            r"NVRTC 12.9 .*serves CUDA up to 12.2: update the driver, or install an NVRTC",
        ),
        (
            "13.0",
            13000,
            "sm_80",
            r"NVRTC 13.0 compiled it for sm_80; device 0 is .*\(sm_90\).*: compile for sm_90",
        ),
    ],
)
def test_c101_refused_cubin_names_both_versions_and_the_remedy(made, served, arch, words, start):
    fake = start(version=served, cuModuleLoadData="CUDA_ERROR_NO_BINARY_FOR_GPU")
    with pytest.raises(CompileError, match=r"loading `text.cu` failed: CUDA_ERROR_NO_BINARY_FOR_GPU \(209\). " + words):
        _compile.load(cubin(arch=arch, nvrtc=made), 0)
    assert (fake.contexts, fake.capture_mode) == (["of the caller"], "global")
    assert not _compile._modules


def test_a_driver_without_func_load(start, monkeypatch):
    fake = start()

    def absent(*_):
        raise RuntimeError('Function "cuFuncLoad" not found')

    monkeypatch.setattr(fake, "do_cuFuncLoad", absent, raising=False)
    assert _compile.load(cubin(), 0).function("small").handle == 4096


def test_a_kernel_that_cannot_be_prepared(start):
    start(cuFuncLoad="CUDA_ERROR_INVALID_VALUE")
    with pytest.raises(CompileError, match=r"preparing `small` on device 0 failed: CUDA_ERROR_INVALID_VALUE"):
        _compile.load(cubin(), 0).function("small")


def test_c103_modules_are_forgotten_in_a_child(start, monkeypatch):
    """What the handler of a fork does, without the fork; `test_device.py` forks."""
    start()
    _compile.load(cubin(), 0).function("small")
    monkeypatch.setattr(_device, "_lock", None)
    monkeypatch.setattr(_device, "_parent", None)
    monkeypatch.setattr(_device, "_pid", 4711)
    _device._forget()
    assert not _compile._modules
    with pytest.raises(RuntimeError, match="process 4711 used CUDA and then forked into this one"):
        _compile.load(cubin(), 0)


# ---- on a GPU


@pytest.fixture
def loaded():
    pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")
    made = _compile.compile_source(SCALE, _device.info(0).arch, "scale.cu")
    return _compile.load(made, 0)


def launch(cupy, function, array, by):
    """Through CuPy's driver binding, on its current stream."""
    values = np.array([array.data.ptr], np.uint64), np.array([by], np.float32)
    addresses = np.array([value.ctypes.data for value in values], np.uint64)
    stream = cupy.cuda.get_current_stream().ptr
    sizes = (array.size // 32, 1, 1, 32, 1, 1, 0)
    cupy.cuda.driver.launchKernel(function.handle, *sizes, stream, addresses.ctypes.data, 0)


@pytest.mark.gpu
def test_gpu_a_loaded_kernel_runs(loaded):
    cupy = _device.import_cupy()
    array = cupy.arange(64, dtype=cupy.float32)
    launch(cupy, loaded.function("scale"), array, 2.0)
    assert (array == 2 * cupy.arange(64)).all()


@pytest.mark.gpu
def test_gpu_c93_subnormal_numbers_are_kept(loaded):
    cupy = _device.import_cupy()
    array = cupy.full(64, 2.0**-70, cupy.float32)
    launch(cupy, loaded.function("scale"), array, 2.0**-70)
    assert (cupy.asnumpy(array) == 2.0**-140).all()


@pytest.mark.gpu
def test_gpu_loading_inside_a_capture(loaded):
    """The first use of a kernel while the caller's stream is captured, in the strictest mode."""
    cupy = _device.import_cupy()
    array = cupy.ones(64, cupy.float32)
    fresh = _compile.Module(loaded.cubin, 0)
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
        launch(cupy, fresh.function("scale", 100_000), array, 3.0)
        graph = stream.end_capture()
        graph.launch()
        graph.launch()
        stream.synchronize()
    assert (array == 9).all()


@pytest.mark.gpu
def test_gpu_c96_damaged_cubin_is_an_error_and_no_abort(loaded):
    damaged = bytes(4) + loaded.cubin.image[4:]
    broken = _compile.Cubin(damaged, "sm_90", "", USED, _compile.nvrtc_version(), "x.cu", "k")
    with pytest.raises(CompileError, match=r"loading `x.cu` failed: CUDA_ERROR"):
        _compile.load(broken, 0)


@pytest.mark.gpu
def test_gpu_needs_no_current_context_and_leaves_none(loaded):
    """In a thread that has used no CUDA yet."""
    results = []

    def work():
        results.append(_compile.Module(loaded.cubin, 0).function("scale").handle)
        results.append(int(_device.driver().cuCtxGetCurrent()[1]))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert results[0] != 0
    assert results[1] == 0
