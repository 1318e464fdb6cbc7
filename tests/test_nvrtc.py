"""What NVRTC is told and what it gives, with no GPU: options, resources, errors (C93, C102)."""

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cupy_gmm import _device, _nvrtc, _source
from cupy_gmm.errors import CompileError
from tests.kernels_for_tests import SCALE, TWO, write_sources

pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")


@pytest.fixture
def sources(tmp_path, monkeypatch) -> Path:
    folder = write_sources(tmp_path)
    monkeypatch.setattr(_source, "PLACES", (folder,))
    return folder


# ---- one compile


@pytest.mark.parametrize("arch", [*_device.PORTABLE, "sm_90a"])
def test_cubin_for_each_architecture(arch):
    image, log, resources = _nvrtc.compile_text(SCALE, arch, "scale.cu")
    assert image[:4] == b"\x7fELF"
    assert f"'scale' for '{arch}'" in log
    assert list(resources) == ["scale"]
    used = resources["scale"]
    assert 0 < used.registers < 32
    assert (used.spill_bytes, used.stack_bytes, used.static_smem) == (0, 0, 0)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_resources_of_two_kernels(arch):
    used = _nvrtc.compile_text(TWO, arch, "two.cu")[2]
    assert sorted(used) == ["shared_400", "spills"]
    assert used["shared_400"].static_smem == 400
    assert used["shared_400"].spill_bytes == 0
    assert used["spills"].registers <= 64
    assert used["spills"].spill_bytes > 100
    assert used["spills"].stack_bytes > 50


def test_resources_from_a_log():
    """As ptxas writes it; a device function's spills count for every kernel, as no caller is named."""
    log = """ptxas info    : 20 bytes gmem, 16 bytes cmem[4]
ptxas info    : Compiling entry function '_Z1fILi3EEvPf' for 'sm_80'
ptxas info    : Function properties for _Z1fILi3EEvPf
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 14 registers, used 0 barriers, 360 bytes cmem[0]
ptxas info    : Compiling entry function 'a' for 'sm_80'
ptxas info    : Function properties for a
ptxas         .     2040 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 2048 bytes cumulative stack size, 400 bytes smem
ptxas info    : Function properties for helper
ptxas         .     96 bytes stack frame, 10 bytes spill stores, 20 bytes spill loads
"""
    assert _nvrtc.resources(log) == {
        "_Z1fILi3EEvPf": _nvrtc.Resources(14, 30, 0, 0),
        "a": _nvrtc.Resources(255, 42, 2048, 400),
    }
    assert _nvrtc.resources("") == {}


def test_again_is_the_same_to_the_byte(tmp_path, sources, monkeypatch):
    """Without any cache, from another folder of sources and from another working directory."""
    first = _nvrtc.compile_text(_source.unit("whole.cu"), "sm_90a", "whole.cu")
    sources.rename(tmp_path / "moved")
    monkeypatch.setattr(_source, "PLACES", (tmp_path / "moved",))
    monkeypatch.chdir(tmp_path)
    assert _nvrtc.compile_text(_source.unit("whole.cu"), "sm_90a", "whole.cu") == first


def test_c102_exactly_one_architecture_and_no_fast_arithmetic():
    options = _nvrtc.options("sm_90a")
    assert [option for option in options if "arch" in option] == ["-arch=sm_90a"]
    assert not [option for option in options if re.search("ftz|fast|prec-|fmad", option)]
    assert [option for option in options if option.startswith("-I")] == [f"-I{_source.kernels_dir()}"]


def test_c102_wgmma_needs_the_letter():
    text = 'extern "C" __global__ void fence() { asm volatile("wgmma.fence.sync.aligned;"); }'
    assert "fence" in _nvrtc.compile_text(text, "sm_90a", "fence.cu")[2]
    with pytest.raises(CompileError, match=r"could not compile `fence.cu` for sm_90 [\s\S]*wgmma"):
        _nvrtc.compile_text(text, "sm_90", "fence.cu")


def test_c102_the_letter_is_in_the_cubin(tmp_path):
    tool = cuobjdump()
    cubin = tmp_path / "scale.cubin"
    for arch in ("sm_90a", "sm_90"):
        cubin.write_bytes(_nvrtc.compile_text(SCALE, arch, "scale.cu")[0])
        done = subprocess.run([tool, "-elf", cubin], capture_output=True, text=True, timeout=60, check=True)
        assert f", {arch.replace('_', '=')}, " in done.stdout.split("Sections:")[0]


def cuobjdump() -> str:
    """NVIDIA's own reader, in the one version whose words this test knows, or a skip: nobody else needs it.

    CI installs it, and its `--complete` makes this skip a failure.
    """
    try:
        files = importlib.metadata.files("nvidia-cuda-cuobjdump") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("nvidia-cuda-cuobjdump is not installed; the extra `ci` brings it")
    return str(next(file.locate() for file in files if file.name == "cuobjdump"))


def test_c93_subnormal_numbers_are_kept():
    """No `.ftz` in the PTX that our options give; the same test sees it where it is asked for."""
    from cuda.bindings import nvrtc

    def ptx(*more):
        options = [option.encode() for option in (*_nvrtc.options("sm_80"), *more)]
        with _nvrtc._program(SCALE, "scale.cu") as program:
            assert int(nvrtc.nvrtcCompileProgram(program, len(options), options)[0]) == 0
            return _nvrtc._output(program, "PTX").decode()

    assert "mul.f32" in ptx()
    assert ".ftz" not in ptx()
    assert ".ftz" in ptx("-ftz=true")


def test_a_header_of_the_working_directory_is_not_ours(sources, tmp_path, monkeypatch):
    (tmp_path / "config.cuh").write_text('#error "not this one"\n')
    (tmp_path / "ptx").mkdir()
    (tmp_path / "ptx" / "misc.cuh").write_text('#error "nor this one"\n')
    monkeypatch.chdir(tmp_path)
    text = _source.header_text("config.cuh", "ptx/misc.cuh", "whole.cu")
    assert "whole" in _nvrtc.compile_text(text, "sm_80", "whole.cu")[2]


def test_no_header_of_a_toolkit_is_found():
    for header in ("cuda_fp16.h", "cuda/std/cstdint"):
        with pytest.raises(CompileError, match=r"(could not|cannot) open source file"):
            _nvrtc.compile_text(f"#include <{header}>\n{SCALE}", "sm_80", "x.cu")


def test_driver_is_never_touched(monkeypatch):
    monkeypatch.setattr(_device, "driver", lambda: pytest.fail("the driver was asked for"))
    _nvrtc.compile_text(SCALE, "sm_80", "scale.cu")
    assert "--no-cache" in _nvrtc.options("sm_80"), "NVRTC's own cache starts the driver"


# ---- errors


def test_error_carries_the_log():
    with pytest.raises(CompileError) as caught:
        _nvrtc.compile_text(SCALE.replace("float by", "flaot by"), "sm_90a", "scale.cu")
    text = str(caught.value)
    assert text.startswith(f"NVRTC {_nvrtc.version()} could not compile `scale.cu` for sm_90a (NVRTC_ERROR_COMP")
    assert 'identifier "flaot" is undefined' in text
    assert "[scale.cu](2): error" in text
    assert "\0" not in text


def test_unknown_architecture_names_those_known():
    with pytest.raises(CompileError, match=r"`s.cu` cannot be compiled for sm_999: NVRTC .* has .*sm_90, .*sm_120"):
        _nvrtc.compile_text(SCALE, "sm_999", "s.cu")


@pytest.mark.parametrize("missing", ["bindings", "library"])
def test_missing_nvrtc_names_the_extra(missing, monkeypatch):
    def absent():
        raise RuntimeError('"nvrtc" cannot be found')

    if missing == "bindings":
        monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    else:
        monkeypatch.setattr("cuda.bindings.nvrtc.nvrtcVersion", absent)
    _nvrtc._api.cache_clear()
    try:
        with pytest.raises(
            CompileError, match=r"cannot be used \(.*install `cupy-gmm\[cuda13\]`, or `cupy-gmm\[cuda12\]`"
        ):
            _nvrtc.compile_text(SCALE, "sm_80", "scale.cu")
    finally:
        _nvrtc._api.cache_clear()
