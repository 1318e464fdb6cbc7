"""Compiling, with NVRTC and no GPU: options, resources, key, errors, threads, processes.

C93, C95-C97, C99, C102-C104; loading is in `test_load.py`, the rules of the disk in `test_cache.py`.
"""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cupy_gmm import _cache, _compile, _nvrtc, _source
from cupy_gmm.errors import CompileError
from tests import apart
from tests.kernels_for_tests import SCALE, TWO, write_sources

pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """A cache of the test's own, on disk and in memory."""
    monkeypatch.setenv("CUPY_GMM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(_cache, "_failure", None)
    monkeypatch.setattr(_compile, "_cubins", {})
    monkeypatch.setattr(_compile, "_compiling", {})
    return tmp_path / "cache"


@pytest.fixture
def compiles(monkeypatch) -> list[tuple[str, str, str]]:
    """What NVRTC is asked for."""
    real, asked = _nvrtc.compile_text, []

    def compile_text(text, arch, name):
        asked.append((text, arch, name))
        return real(text, arch, name)

    monkeypatch.setattr(_nvrtc, "compile_text", compile_text)
    return asked


@pytest.fixture
def sources(tmp_path, monkeypatch) -> Path:
    folder = write_sources(tmp_path)
    monkeypatch.setattr(_source, "PLACES", (folder,))
    return folder


def forget() -> None:
    """As a new process: nothing in memory."""
    _compile._cubins.clear()


# ---- memory and disk


def test_second_call_and_second_process_compile_nothing(compiles, folder):
    first = _compile.compile_source(TWO, "sm_80", "two.cu")
    assert _compile.compile_source(TWO, "sm_80", "two.cu") is first
    forget()
    again = _compile.compile_source(TWO, "sm_80", "two.cu")
    assert again == first
    assert again is not first
    assert len(compiles) == 1
    assert [path.name for path in folder.iterdir()] == [first.key]


def test_a_failed_compile_is_not_remembered(compiles, folder):
    for _ in range(2):
        with pytest.raises(CompileError, match="identifier"):
            _compile.compile_source(SCALE.replace("float by", "flaot by"), "sm_80", "scale.cu")
    assert len(compiles) == 2
    assert not list(folder.iterdir())


def change_header(sources, monkeypatch):
    (sources / "config.cuh").write_text("#pragma once\nconstexpr int kValue = 2;\n")


CHANGES = {
    "a header's text": change_header,
    "a new header": lambda sources, _: (sources / "ptx" / "new.cuh").touch(),
    "library": lambda _, patch: patch.setattr(_compile, "__version__", "999"),
    "options": lambda _, patch: patch.setattr(_nvrtc, "OPTIONS", (*_nvrtc.OPTIONS, "-DX=1")),
    "nvrtc": lambda _, patch: patch.setattr(_compile, "nvrtc_version", lambda: "99.9"),
    "format": lambda _, patch: patch.setattr(_cache, "FORMAT", _cache.FORMAT + 1),
}


@pytest.mark.parametrize(
    "what, where",
    [(what, where) for what in CHANGES for where in ("memory", "disk") if (what, where) != ("format", "memory")],
)
def test_each_part_of_the_key_compiles_anew(what, where, sources, compiles, monkeypatch):
    text = '#include "whole.cu"\n'
    first = _compile.compile_source(text, "sm_80", "whole.cu")
    CHANGES[what](sources, monkeypatch)
    if where == "disk":
        forget()
    second = _compile.compile_source(text, "sm_80", "whole.cu")
    assert len(compiles) == 2
    assert (first.image == second.image) == (what != "a header's text")


@pytest.mark.parametrize("other", [(SCALE + " ", "sm_80", "s.cu"), (SCALE, "sm_86", "s.cu"), (SCALE, "sm_80", "t.cu")])
def test_text_architecture_and_name_are_of_the_key(other, compiles):
    for _ in range(2):
        _compile.compile_source(SCALE, "sm_80", "s.cu")
        _compile.compile_source(*other)
        forget()
    assert len(compiles) == 2


def test_a_source_edited_during_the_compile_is_not_kept(sources, compiles, monkeypatch, folder):
    real = _nvrtc.compile_text

    def edit(*arguments):
        change_header(sources, monkeypatch)
        return real(*arguments)

    before = _source.digest()
    with monkeypatch.context() as patch:
        patch.setattr(_nvrtc, "compile_text", edit)
        _compile.compile_source('#include "whole.cu"', "sm_80", "whole.cu")
    assert _source.digest() != before
    assert not list(folder.iterdir())
    assert not _compile._cubins


@pytest.mark.parametrize("damage", ["cut", "flip", "remove", "other metadata"])
def test_c96_damaged_entry_is_compiled_again(damage, compiles, folder):
    first = _compile.compile_source(SCALE, "sm_80", "scale.cu")
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    if damage == "cut":
        path.write_bytes(whole[: len(whole) // 2])
    elif damage == "flip":
        path.write_bytes(whole[:-200] + bytes([whole[-200] ^ 1]) + whole[-199:])
    elif damage == "remove":
        path.unlink()
    else:  # C97: a sound file whose metadata other code wrote
        _cache.write(_compile._key_material(SCALE, "sm_80", "scale.cu"), {"resources": {"k": {"a": 1}}}, b"")
    forget()
    assert _compile.compile_source(SCALE, "sm_80", "scale.cu") == first
    assert len(compiles) == 2
    assert path.read_bytes() == whole


# ---- threads, processes, forks


def test_c104_sixteen_threads_one_compile(compiles):
    results = apart.at_once(lambda: _compile.compile_source(TWO, "sm_80", "two.cu"))
    assert all(result is results[0] for result in results)
    assert len(compiles) == 1


def test_c104_different_kernels_do_not_wait_for_each_other(monkeypatch):
    """Two threads meet inside NVRTC, which one lock for all would prevent."""
    meet = threading.Barrier(2, timeout=30)
    monkeypatch.setattr(_nvrtc, "compile_text", lambda *_: (meet.wait(), (b"", "", {}))[1])
    threads = [
        threading.Thread(target=_compile.compile_source, args=(SCALE, arch, "s.cu"), daemon=True)
        for arch in ("sm_80", "sm_86")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    assert not meet.broken
    assert len(_compile._cubins) == 2


PROCESS = """
import hashlib
from cupy_gmm import _compile
from cupy_gmm.errors import CompileError
from tests.kernels_for_tests import SCALE
print(hashlib.sha256(_compile.compile_source(SCALE, "sm_90a", "scale.cu").image).hexdigest())
"""


def test_c95_eight_processes_one_file(folder):
    command = [sys.executable, "-W", "error", "-c", PROCESS]
    processes = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env={**os.environ}) for _ in range(8)
    ]
    said = {process.communicate(timeout=120)[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0] * 8
    assert len(said) == 1
    assert len(said.pop()) == 64
    cubin = _compile.compile_source(SCALE, "sm_90a", "scale.cu")
    assert [path.name for path in folder.iterdir()] == [cubin.key]


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a place that no user can write, root neither")
def test_c99_nowhere_to_write(monkeypatch):
    """Compiles in memory, and says so once."""
    monkeypatch.delenv("CUPY_GMM_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    program = PROCESS + 'first = _compile.compile_source(SCALE, "sm_80", "scale.cu")\n'
    program += 'assert _compile.compile_source(SCALE, "sm_80", "scale.cu") is first\n'
    done = apart.python(program, HOME="/proc/self/nowhere")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("RuntimeWarning: compiled kernels are kept in memory only") == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_c103_compiling_before_a_fork_and_in_the_child():
    """Also with a lock that a thread of the parent holds for ever."""
    program = """
import os
from cupy_gmm import _compile
from cupy_gmm.errors import CompileError
from tests.kernels_for_tests import SCALE, TWO
_compile.compile_source(SCALE, "sm_80", "scale.cu")
_compile._lock.acquire()
for lock in _compile._compiling.values():
    lock.acquire()
pid = os.fork()
if pid == 0:
    assert "scale" in _compile.compile_source(SCALE, "sm_80", "scale.cu").resources
    assert "spills" in _compile.compile_source(TWO, "sm_80", "two.cu").resources
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    done = apart.python(program)
    assert (done.stdout, done.stderr) == ("7\n", "")
