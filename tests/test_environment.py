"""The script behind `make` chooses by the driver, refreshes what is stale and names what is missing."""

import ast
import ctypes
import json
import subprocess
import sys
from pathlib import Path

import pytest

from cupy_gmm import _env
from tools import setup_env
from tools.setup_env import Choice, check, choose, decide, missing, read_driver

ROOT = Path(__file__).resolve().parent.parent


class FakeDriver:
    """Stands in for libcuda.so.1: writes a version, returns a status."""

    def __init__(self, version: int, status: int = 0):
        self.version, self.status = version, status

    def cuDriverGetVersion(self, pointer):
        ctypes.cast(pointer, ctypes.POINTER(ctypes.c_int))[0] = self.version
        return self.status


def absent(name):
    raise OSError(f"{name}: cannot open shared object file")


@pytest.mark.parametrize(
    "load, expected",
    [
        (lambda name: FakeDriver(13000), 13000),
        (lambda name: FakeDriver(12090), 12090),
        (lambda name: FakeDriver(0), None),
        (lambda name: FakeDriver(12090, status=34), None),  # the stub library of a toolkit
        (lambda name: object(), None),  # a library without the function
        (absent, None),
    ],
)
def test_driver_version(load, expected):
    assert read_driver(load) == expected


def test_driver_is_asked_under_its_linux_name():
    names = []
    read_driver(lambda name: names.append(name) or FakeDriver(12040))
    assert names == ["libcuda.so.1"]


@pytest.mark.parametrize(
    "driver, extra, words",
    [
        (None, "nvrtc", "no NVIDIA driver"),
        (11080, "nvrtc", "CUDA 11.8"),
        (12000, "cuda12", "CUDA 12.0"),
        (12090, "cuda12", "CUDA 12.9"),
        (13000, "cuda13", "CUDA 13.0"),
        (13010, "cuda13", "CUDA 13.1"),
        (14020, "cuda13", "CUDA 14.2"),
    ],
)
def test_choice(driver, extra, words):
    choice = choose(driver)
    assert choice.extra == extra
    assert words in choice.reason


NVRTC, CUDA12, CUDA13 = (Choice(name, "a reason") for name in ("nvrtc", "cuda12", "cuda13"))


@pytest.mark.parametrize(
    "choice, wanted, state, kind, extras",
    [
        # nothing there yet; made by hand
        (NVRTC, ("cli",), None, "rebuild", "nvrtc cli"),
        (CUDA12, ("cli", "test"), {}, "install", "cuda12 cli test"),
        # made by us: as it should be, with more than asked for, with less, out of date
        (CUDA12, ("cli",), {"digest": "d", "extras": ["cuda12", "cli"]}, "keep", "cuda12 cli"),
        (
            NVRTC,
            ("cli",),
            {"digest": "d", "extras": ["nvrtc", "ci", "cli", "test"]},
            "keep",
            "nvrtc ci cli test",
        ),
        (NVRTC, ("cli", "test"), {"digest": "d", "extras": ["nvrtc", "cli"]}, "install", "nvrtc cli test"),
        (NVRTC, ("cli",), {"digest": "old", "extras": ["nvrtc", "ci", "cli"]}, "install", "nvrtc ci cli"),
        # another driver: cupy-cuda12x and cupy-cuda13x overwrite each other
        (
            CUDA13,
            ("cli",),
            {"digest": "d", "extras": ["cuda12", "cli", "test"]},
            "rebuild",
            "cuda13 cli test",
        ),
        (CUDA12, ("cli",), {"digest": "d", "extras": ["nvrtc", "cli"]}, "rebuild", "cuda12 cli"),
        # the driver went away: what is installed still compiles
        (NVRTC, ("cli",), {"digest": "d", "extras": ["cuda13", "cli"]}, "keep", "cuda13 cli"),
    ],
)
def test_decision(choice, wanted, state, kind, extras):
    action = decide(choice, wanted, state, "d")
    assert (action.kind, action.extras) == (kind, tuple(extras.split()))
    assert action.reason


def test_missing_names_packages_not_modules():
    def find(name):
        if name == "cuda.bindings":
            raise ModuleNotFoundError("No module named 'cuda'")
        return object() if name == "numpy" else None

    needs = {"numpy": "numpy", "clang_format": "clang-format", "cuda.bindings": "cuda-bindings"}
    assert missing(needs, find) == ["clang-format", "cuda-bindings"]


def test_check_is_one_sentence_naming_all_that_is_missing():
    present = {"numpy", "ml_dtypes", "rich"}
    find = lambda name: object() if name in present else None  # noqa: E731
    sentence = check("demo", 13000, find)
    assert sentence is not None
    assert "make demo" in sentence
    assert "lacks typer, cupy-cuda13x, cuda-bindings (" in sentence
    assert sentence.count("\n") == 0
    assert check("demo", None, lambda name: object()) is None
    assert "cupy" not in str(check("lint", 13000, lambda name: None))
    assert "no NVIDIA driver" in str(check("bench", None, lambda name: object()))
    assert "lacks torch" in str(check("bench", 12090, lambda name: None if name == "torch" else object()))


@pytest.fixture
def venv(tmp_path, monkeypatch):
    """make_venv on a scratch folder; what it would run is recorded instead."""
    commands = []

    def run(command, **options):
        commands.append([str(part) for part in command])
        folder = tmp_path / "env"
        if "venv" in commands[-1]:
            (folder / "bin").mkdir(parents=True)
            (folder / "bin" / "python").touch()
        elif not (folder / "bin" / "python").exists():
            raise FileNotFoundError(command[0])
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(setup_env.subprocess, "run", run)

    def make(driver, *wanted):
        commands.clear()
        setup_env.make_venv(tmp_path / "env", wanted, driver)
        return [command for command in commands if "--version" not in command]

    return make


def test_venv_is_made_once_said_and_refreshed(venv, capsys, tmp_path, monkeypatch):
    made, installed = venv(12090, "cli")
    assert made[1:3] == ["-m", "venv"]
    assert installed[-2:] == ["--editable", f"{ROOT}[cuda12,cli]"]
    said = capsys.readouterr().out
    assert "extra cuda12, because the driver serves CUDA 12.9" in said
    assert "because there is none yet" in said

    assert venv(12090, "cli") == []
    assert "extra cuda12" in capsys.readouterr().out

    (more,) = venv(12090, "cli", "test")
    assert more[-1] == f"{ROOT}[cuda12,cli,test]"
    assert "test is missing in it" in capsys.readouterr().out

    record = tmp_path / "env" / "cupy_gmm.json"
    record.write_text(record.read_text().replace('"digest": "', '"digest": "0'))
    (again,) = venv(12090, "cli")
    assert again[-1] == f"{ROOT}[cuda12,cli,test]"
    assert "pyproject.toml has changed" in capsys.readouterr().out

    record.write_text("not json")
    assert len(venv(12090, "cli")) == 1


def test_a_failed_installation_is_not_taken_for_a_whole_one(venv, tmp_path, monkeypatch):
    venv(None, "cli")
    recorded = setup_env.subprocess.run

    def fail(command, **options):
        if "install" in command:
            raise subprocess.CalledProcessError(1, command)
        return recorded(command, **options)

    monkeypatch.setattr(setup_env.subprocess, "run", fail)
    with pytest.raises(subprocess.CalledProcessError):
        venv(None, "cli", "test")
    assert not (tmp_path / "env" / "cupy_gmm.json").exists()


def test_an_old_python_gets_a_sentence(monkeypatch, capsys):
    monkeypatch.setattr(setup_env.sys, "version_info", (3, 9, 2))
    assert setup_env.main(["check", "demo"]) == 1
    said = capsys.readouterr().out
    assert "Python 3.11 or newer is needed" in said
    assert "3.9.2" in said
    ast.parse((ROOT / "tools" / "setup_env.py").read_text(), feature_version=(3, 8))


def test_script_runs_on_the_standard_library_alone():
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(ROOT / "tools" / "setup_env.py"), "check", "test"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "lacks numpy, ml_dtypes, pytest, hypothesis" in done.stderr
    assert "Traceback" not in done.stderr


def test_record_is_plain_json(venv, tmp_path):
    venv(None, "cli")
    record = json.loads((tmp_path / "env" / "cupy_gmm.json").read_text())
    assert record["extras"] == ["nvrtc", "cli"]


@pytest.mark.parametrize(
    "variables, expected",
    [
        ({"CUPY_GMM_CACHE_DIR": "/a/b", "XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/a/b"),
        ({"CUPY_GMM_CACHE_DIR": "", "XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/cupy_gmm"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/h"}, "/h/.cache/cupy_gmm"),
        ({"XDG_CACHE_HOME": "", "HOME": "/h"}, "/h/.cache/cupy_gmm"),
        ({"CUPY_GMM_CACHE_DIR": "~/k", "HOME": "/h"}, "/h/k"),
        ({"HOME": "relative"}, None),
        ({}, None),
    ],
)
def test_cache_dir(variables, expected, monkeypatch):
    for name in ("CUPY_GMM_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert _env.cache_dir() == (None if expected is None else Path(expected))


def test_cache_dir_may_be_relative(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUPY_GMM_CACHE_DIR", "kernels")
    assert _env.cache_dir() == tmp_path / "kernels"
