"""Devices: facts, what is said without any, the guard, forks (C103), a CuPy that cannot load (C99)."""

import os
import sys
import time
from pathlib import Path

import pytest

from cupy_gmm import _device
from cupy_gmm.errors import ArgumentError, CompileError, UnsupportedError
from tests import apart
from tests.kernels_for_tests import FakeDriver


@pytest.fixture
def start(monkeypatch):
    """Replace the driver, as if nothing had asked for it before."""

    def replace(fake):
        monkeypatch.setattr(_device, "_import_driver", lambda: fake)
        monkeypatch.setattr(_device, "_bindings", None)
        monkeypatch.setattr(_device, "_pid", None)
        monkeypatch.setattr(_device, "_infos", {})
        monkeypatch.setattr(_device, "_contexts", {})
        monkeypatch.setattr(_device.os, "register_at_fork", lambda **_: None)
        return fake

    return replace


def run(program: str) -> str:
    """What a fresh interpreter prints: forks and handlers of forks leave no trace in this process."""
    return apart.python(program).stdout


def test_facts_are_asked_for_once(start):
    fake = start(FakeDriver())
    found = _device.info(1)
    assert found == _device.Device(
        1, "NVIDIA H100", "sm_90", (9, 0), 132, 232448, 233472, 52428800, driver_version=(13, 0)
    )
    asked = len(fake.calls)
    assert _device.info(1) is found
    assert len(fake.calls) == asked
    assert len(fake.named("cuInit")) == 1


@pytest.mark.parametrize("version, expected", [(12020, (12, 2)), (12090, (12, 9)), (13010, (13, 1))])
def test_driver_version(start, version, expected):
    start(FakeDriver(version=version))
    assert _device.info(0).driver_version == expected


def test_driver_is_started_once_by_many_threads(start):
    fake = start(FakeDriver())
    fake.do_cuInit = lambda _: time.sleep(0.05)  # long enough for all to arrive
    apart.at_once(_device.driver)
    assert len(fake.named("cuInit")) == 1


@pytest.mark.parametrize("ordinal", [-1, 2, 7])
def test_no_such_device(start, ordinal):
    start(FakeDriver(devices=2))
    with pytest.raises(ArgumentError, match=rf"device {ordinal} does not exist: this process sees 2"):
        _device.info(ordinal)


def test_without_a_driver(start):
    start(FakeDriver(devices=3))
    assert _device.count() == 3

    start(FakeDriver(cuInit="CUDA_ERROR_NO_DEVICE"))
    with pytest.raises(UnsupportedError, match=r"sees no device: check CUDA_VISIBLE_DEVICES"):
        _device.info(0)
    assert _device.count() == 0

    class Nothing(FakeDriver):
        def answer(self, name, *arguments):
            raise RuntimeError("libcuda.so.1 cannot be found")

    start(Nothing())
    with pytest.raises(UnsupportedError, match=r"no CUDA driver was found \(libcuda.so.1 cannot be found\)"):
        _device.driver()
    assert _device.count() == 0


def test_without_bindings(monkeypatch, start):
    real = _device._import_driver
    start(None)
    monkeypatch.setattr(_device, "_import_driver", real)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(CompileError, match=r"`cuda-bindings` cannot be imported .*install `cupy-gmm\[cuda13\]`"):
        _device.driver()
    assert _device.count() == 0


def test_any_other_error_is_named(start):
    start(FakeDriver(cuInit="CUDA_ERROR_INVALID_VALUE"))
    with pytest.raises(CompileError, match=r"starting the CUDA driver failed: CUDA_ERROR_INVALID_VALUE \(1\)"):
        _device.driver()
    assert _device.count() == 0


def test_guard_gives_the_context_back(start):
    fake = start(FakeDriver())

    def fail():
        with _device.current(1) as api:
            assert api is fake
            assert fake.contexts == ["of the caller", "context of 1"]
            assert fake.capture_mode == "relaxed"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert fake.contexts == ["of the caller"]
    assert fake.capture_mode == "global"
    with _device.current(1):
        pass
    assert len(fake.named("cuDevicePrimaryCtxRetain")) == 1


def test_typical_devices():
    for arch in _device.PORTABLE:
        device = _device.typical(arch)
        assert (device.arch, device.ordinal) == (arch, -1)
        assert device.smem_per_block_optin == _device.SMEM_LIMIT[arch] <= device.smem_per_sm - 1024
    assert _device.typical("sm_120").cc == (12, 0)
    with pytest.raises(ArgumentError, match=r"`arch` is 'sm_70': expected one of sm_80, "):
        _device.typical("sm_70")


# ---- forks (C103)

FORK = """
import os, sys
from cupy_gmm import _device
from tests.kernels_for_tests import FakeDriver

fake = FakeDriver()
_device._import_driver = lambda: fake
cleared = []
_device.forget_in_child(lambda: cleared.append(1))

def in_child(work):
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try:
            print(work())
        except RuntimeError as error:
            print(type(error).__name__, error)
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(pid, 0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_c103_import_fork_use():
    said = run(FORK + "in_child(lambda: _device.info(0).name)\nprint(cleared, _device.info(0).name)")
    assert said == "NVIDIA H100\n[] NVIDIA H100\n"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_c103_use_fork_use():
    said = run(
        FORK
        + """
_device.info(0)
in_child(lambda: _device.info(0))
in_child(lambda: _device.current(0).__enter__())
in_child(lambda: (_device.count(), len(cleared)))
in_child(lambda: in_child(lambda: _device.info(0)))
print(os.getpid(), cleared, _device.info(0).name)
"""
    ).splitlines()
    parent, *rest = said[-1].split(" ", 1)
    assert rest == ["[] NVIDIA H100"]
    for line in (said[0], said[1], said[3]):
        assert line.startswith(f"UnsupportedError process {parent} used CUDA and then forked into this one, process ")
        assert '"spawn" or "forkserver"' in line
    assert said[2] == "(0, 1)"


def test_c103_another_library_used_cuda_before_the_fork(start):
    start(FakeDriver(cuInit="CUDA_ERROR_NOT_INITIALIZED"))
    with pytest.raises(RuntimeError, match="a parent process used CUDA and then forked into this one"):
        _device.info(0)


# ---- CuPy


@pytest.fixture
def fresh_import():
    _device.import_cupy.cache_clear()
    yield
    _device.import_cupy.cache_clear()


def broken_cupy(folder: Path, line: str) -> None:
    (folder / "cupy.py").write_text(line + "\n")


@pytest.mark.parametrize(
    "line, words",
    [
        ("import os; os.makedirs('/proc/self/nowhere/x')", r"set CUPY_CACHE_DIR, or HOME, to a folder"),
        ("raise PermissionError(13, 'Permission denied')", r"Permission denied.*set CUPY_CACHE_DIR, or HOME"),
        ("import no_such_module", r"CuPy cannot be imported \(No module.*install `cupy-gmm\[cuda13\]`"),
    ],
)
def test_c99_cupy_cannot_be_imported(line, words, tmp_path, monkeypatch, fresh_import):
    broken_cupy(tmp_path, line)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    for _ in range(2):  # a failure is not remembered
        with pytest.raises(UnsupportedError, match=words):
            _device.import_cupy()


def test_cupy_is_imported_once(tmp_path, monkeypatch, fresh_import):
    broken_cupy(tmp_path, "here = 1")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    assert _device.import_cupy().here == 1
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert _device.import_cupy().here == 1


@pytest.mark.gpu
def test_facts_agree_with_cupy():
    cupy = _device.import_cupy()
    assert _device.count() == cupy.cuda.runtime.getDeviceCount()
    for ordinal in range(_device.count()):
        found, theirs = _device.info(ordinal), cupy.cuda.runtime.getDeviceProperties(ordinal)
        assert found.name == theirs["name"].decode()
        assert found.cc == (theirs["major"], theirs["minor"])
        assert found.sm_count == theirs["multiProcessorCount"]
        assert found.l2_bytes == theirs["l2CacheSize"]
        assert found.smem_per_sm == theirs["sharedMemPerMultiprocessor"]
        assert found.smem_per_block_optin == theirs["sharedMemPerBlockOptin"]
        assert _device.SMEM_LIMIT.get(found.arch, found.smem_per_block_optin) == found.smem_per_block_optin
        major, minor = found.driver_version
        assert major * 1000 + minor * 10 == cupy.cuda.runtime.driverGetVersion()


@pytest.mark.gpu
def test_c103_use_fork_use_on_a_gpu():
    said = run(
        FORK.replace("_device._import_driver", "unused")
        + "\n_device.info(0)\nin_child(lambda: _device.info(0))\nin_child(lambda: _device.count())\n"
    ).splitlines()
    assert said[0].startswith("UnsupportedError process ")
    assert said[1] == "0"
