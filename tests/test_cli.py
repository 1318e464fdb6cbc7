"""The command line: what each command prints, writes and returns. The demo has a file of its own."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

from cupy_gmm import __version__, _cache, _compile, _device, _nvrtc, _variants, counts, ops
from cupy_gmm._compile import Cubin, Resources
from cupy_gmm.errors import CompileError, UnsupportedError

pytest.importorskip("typer", reason="the extra cli is not installed")
pytest.importorskip("rich", reason="the extra cli is not installed")
from cupy_gmm._cli import output
from tests import apart
from tests.commands import SMALL, document

ROOT = Path(__file__).resolve().parent.parent

# ---- all commands


def test_version_and_module(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "cupy_gmm", "--version"],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{__version__}\n", "")


@pytest.mark.parametrize("command", ["", "demo", "counts", "doctor", "compile"])
def test_help_teaches(cli, command):
    code, out, _ = cli(*command.split(), "--help")
    assert code == 0
    assert len(out.splitlines()) > 12
    assert "Show this message" in out


def test_nothing_but_the_standard_library_until_a_command_runs():
    program = "import sys, cupy_gmm._cli; print([m for m in ('typer', 'rich', 'matplotlib') if m in sys.modules])"
    assert apart.python(program).stdout == "[]\n"


def test_a_missing_library_is_one_sentence(cli, monkeypatch):
    there = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "rich" else there(name))
    code, out, err = cli("doctor", "--json")
    assert (code, err) == (1, "The command line needs rich: pip install 'cupy-gmm[cli]'\n")
    assert json.loads(out) == {"error": err.strip()}


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["counts", "absent.json"], "absent.json cannot be read: No such file or directory"),
        (["demo", "--text", "absent.txt"], "absent.txt cannot be read: No such file or directory"),
        ([*["demo"], *SMALL, "--tokens", "999999999"], "`--tokens` is 999999999: expected at most"),
        ([*["demo"], *SMALL, "--top-k", "8"], "`--top-k` is 8: expected at most 7, the number of experts"),
        ([*["demo"], *SMALL, "--plot", "demo.gif"], "demo.gif has the ending '.gif': use .svg or .png"),
        (["compile", "--arch", "sm_53"], "`--arch` is 'sm_53': expected one of sm_80,"),
    ],
)
def test_wrong_use_is_a_sentence_and_code_2(cli, words, sentence):
    code, out, err = cli(*words)
    assert code == 2
    assert out == ""
    assert sentence in err
    assert len(err.splitlines()) == 1
    assert sentence in document(cli(*words, "--json"), code=2)["error"]


def test_an_unknown_option_is_code_2(cli):
    assert cli("demo", "--tokns", "4")[0] == 2


# ---- counts


def write(name, content):
    Path(name).write_text(json.dumps(content))
    return name


def test_counts_prints_the_worked_example(cli):
    skewed = [64] * 32 + [400] * 28 + [784] * 4
    code, out, _ = cli("counts", write("skewed.json", skewed), "--tflops", 500)
    assert code == 0
    rows = [line.split() for line in out.splitlines()]
    tall = next(row for row in rows if row[:1] == ["128"])
    assert tall[:9] == ["128", "172", "2,752", "20.8", "21", "22,016", "74%", "1.34x", "1.31x"]
    low = next(row for row in rows if row[1:2] == ["64"] and "280" in row)
    assert low[1:3] + low[6:8] == ["64", "280", "17,920", "91%"]
    assert ["skewed", "4096", "2048", "274.9", "0.55", "64"] in [row[:6] for row in rows]


def test_counts_json_holds_everything(cli):
    first = write("first.json", {"counts": [3, 0, 5], "k": 64, "n": 32})
    second = write("second.json", [[1, 2], [4, 4]])
    found = document(cli("counts", first, second, "--tile-m", 4, "--tile-m", 8, "--ranks", 2, "--json"))
    assert [each["name"] for each in found["histograms"]] == ["first", "second[0]", "second[1]"]
    assert (found["histograms"][0]["k"], found["histograms"][1]["k"]) == (64, 4096)
    assert [tiling["tile_m"] for tiling in found["histograms"][0]["tilings"]] == [4, 8]
    assert found["histograms"][0]["skew"]["empty"] == 1
    assert found["histograms"][1]["busiest_rank_over_mean"] == 2 / 1.5


def test_counts_scales_by_largest_remainder(cli):
    found = document(cli("counts", write("a.json", [1, 1, 1]), "--rows", 8, "--json"))
    assert found["histograms"][0]["counts"] == [3, 3, 2]


def test_counts_of_a_long_file_shows_worst_middle_and_best(cli):
    name = write("long.json", [[step, 64] for step in range(1, 41)])
    assert len(document(cli("counts", name, "--json"))["histograms"]) == 40
    _, out, _ = cli("counts", name, "--tile-m", 64)
    assert re.findall(r"long\[\d+\]", out) == ["long[0]", "long[20]", "long[39]"] * 3
    assert "the worst, middle and best of 40 are shown; --all shows all." in out
    assert len(re.findall(r"long\[\d+\]", cli("counts", name, "--all")[1])) == 3 * 40


def test_counts_reads_what_a_recorder_wrote(cli, tmp_path):
    recorder = counts.Recorder("layer 0")
    for step in range(3):
        recorder.add(np.array([step, 5]))
    recorder.save(tmp_path / "log.json")
    found = document(cli("counts", "log.json", "--json"))["histograms"]
    assert [each["counts"] for each in found] == [[0, 5], [1, 5], [2, 5]]


# ---- pictures


def test_pictures_svg_follow_the_theme_and_repeat(cli):
    pytest.importorskip("matplotlib")
    name = write("a.json", [[3, 0, 5, 100], [4, 4, 4, 4]])
    assert cli("counts", name, "--plot", "one.svg")[0] == cli("counts", name, "--plot", "two.svg")[0] == 0
    picture = Path("one.svg").read_text()
    assert picture == Path("two.svg").read_text()
    ElementTree.fromstring(picture)
    style = re.search(r"<style>(@media \(prefers-color-scheme: dark\).*?)</style>", picture).group(1)
    selected = re.findall(r'\[style\*="(\w+: #\w+)"\]', style)
    body = picture.replace(style, "")
    assert len(selected) == 6
    # Paper is never a line and the grid never a face; every other rule has something to change.
    used = {rule for rule in selected if re.search(f'style="[^"]*{rule}', body)}
    assert used == set(selected) - {"stroke: #ffffff", "fill: #d1d9e0"}
    assert ">Busiest experts first<" in picture


def test_pictures_png(cli):
    pytest.importorskip("matplotlib")
    name = write("a.json", [0, 0])
    assert cli("counts", name, "--plot", "zero.png")[0] == 0
    assert Path("zero.png").read_bytes().startswith(b"\x89PNG")
    assert "cannot be written" in cli("counts", name, "--plot", "absent/zero.png")[2]
    many = write("many.json", [[step, 64, 0] for step in range(60)])
    assert cli("counts", many, "--plot", "many.png")[0] == 0


# ---- doctor


def test_doctor_on_this_machine(cli):
    found = document(cli("doctor", "--json"))
    assert found["usable"] is True
    assert {"Python", "NVRTC", "kernel cache", "extra cli"} <= {each["what"] for each in found["findings"]}
    states = {each["state"] for each in found["findings"]}
    assert states <= {"ok", "note"}


def test_doctor_beside_a_process_that_compiles(cli, monkeypatch, tmp_path):
    """A file of the cache may be gone between its name and the question for its size."""
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("CUPY_GMM_CACHE_DIR", str(folder))
    scan = os.scandir

    def renamed_meanwhile(path):
        if isinstance(path, int) or Path(path) != folder:
            return scan(path)
        for name in ("kernel.cubin", "other.tmp"):
            (folder / name).write_bytes(b"12")
        entries = list(scan(path))
        (folder / "other.tmp").unlink()
        return iter(entries)

    monkeypatch.setattr(os, "scandir", renamed_meanwhile)
    found = document(cli("doctor", "--json"))
    (cache,) = (each for each in found["findings"] if each["what"] == "kernel cache")
    assert cache["state"] == "ok"
    assert "1 file, 0.0 MB" in cache["found"]


def test_doctor_without_a_gpu_is_usable(cli, monkeypatch):
    def no_driver():
        raise UnsupportedError("no CUDA driver was found")

    monkeypatch.setattr(_device, "count", lambda: 0)
    monkeypatch.setattr(_device, "driver", no_driver)
    code, out, _ = cli("doctor")
    assert code == 0
    assert "none: no CUDA driver was found" in out
    assert "Usable, on the CPU only: there is no GPU here." in out


def test_doctor_names_remedies(cli, monkeypatch):
    gpu = _device.typical("sm_90")
    monkeypatch.setattr(_device, "count", lambda: 1)
    monkeypatch.setattr(_device, "info", lambda _: gpu)  # whose driver serves CUDA 0.0

    def no_cupy():
        raise UnsupportedError("CuPy cannot be imported (absent)")

    monkeypatch.setattr(_device, "import_cupy", no_cupy)
    monkeypatch.setattr(_cache, "problem", lambda: "`folder` belongs to another user")
    monkeypatch.setattr(_nvrtc, "version", lambda: "12.9")
    found = document(cli("doctor", "--json"), code=1)
    by_name = {each["what"]: each for each in found["findings"]}
    assert by_name["NVRTC"]["state"] == "problem"
    assert "newer than the driver, which serves CUDA 0.0" in by_name["NVRTC"]["found"]
    assert by_name["CuPy"]["state"] == "problem"
    assert "cupy-gmm[cuda13]" in by_name["CuPy"]["remedy"]
    assert by_name["kernel cache"]["state"] == "note"
    assert "CUPY_GMM_CACHE_DIR" in by_name["kernel cache"]["remedy"]
    assert all(each["remedy"] for each in found["findings"] if each["state"] == "problem")


def test_doctor_reports_wrong_numbers(cli, monkeypatch):
    right = ops.grouped_mm
    monkeypatch.setattr(ops, "grouped_mm", lambda *args, **kwargs: right(*args, **kwargs) + 1)
    found = document(cli("doctor", "--json"), code=1)
    assert "WRONG" in found["findings"][-1]["found"]


# ---- compile


def test_compile_lists_variants_and_failures(cli, monkeypatch):
    def compile_source(source, arch, name):
        if name == "broken":
            raise CompileError("NVRTC 12.9 could not compile `broken` for sm_80: line 1")
        return Cubin(
            b"x" * 2048,
            arch,
            "",
            {"a": Resources(40, 0, 0, 512), "b": Resources(64, 8, 0, 0)},
            "12.9",
            name,
            "",
        )

    monkeypatch.setattr(_compile, "compile_source", compile_source)
    monkeypatch.setattr(_nvrtc, "version", lambda: "12.9")
    monkeypatch.setattr(_variants, "sources", lambda arch: [("good", "", arch), ("broken", "", arch)])
    found = document(cli("compile", "--arch", "sm_90", "--arch", "sm_80", "--json"), code=1)
    names = [(each["name"], each["arch"], each["error"] is None) for each in found["variants"]]
    assert names == [(name, arch, name == "good") for arch in ("sm_90", "sm_80") for name in ("good", "broken")]
    good = found["variants"][0]
    assert (good["kernels"], good["registers"], good["spill_bytes"], good["static_smem"]) == (2, 64, 8, 512)
    out = cli("compile", "--arch", "sm_80")[1]
    assert "broken for sm_80: NVRTC 12.9 could not compile" in out


# ---- output


def test_json_has_no_nan():
    assert output.plain({"a": (float("nan"), float("inf"), 1.5), "b": np.int32(3), 4: Path("x")}) == {
        "a": [None, None, 1.5], "b": 3, "4": "x",
    }  # fmt: skip


def test_progress_only_on_a_terminal_and_only_when_slow(capsys, monkeypatch):
    with output.progress("work", 3) as advance:
        advance("first")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with output.progress("work", 3) as advance:
        advance("first")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(output, "_SECONDS_BEFORE_A_BAR", -1.0)
    with output.progress("work", 3) as advance:
        advance("second")
    assert "second" in capsys.readouterr().err
