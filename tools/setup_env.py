"""Prepares the interpreter that `make` runs: a virtual environment, or a look at the one the user named.

    python3 tools/setup_env.py venv .venv --extras cli,test    create or refresh .venv
    python3 tools/setup_env.py check test                      install nothing, name what `make test` lacks

Called by the Makefile only. It picks the GPU extra by the driver and says what it chose and why. Standard
library only, because nothing is installed yet, and no syntax that an old Python cannot parse, so that an old
Python gets a sentence. It must not know how tests or demo work.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OLDEST_PYTHON = (3, 11)
GPU_EXTRAS = ("cuda12", "cuda13", "nvrtc")

# Module to import -> what to give to pip, for each purpose. CuPy is added where a driver is found.
_RUN = {"numpy": "numpy", "ml_dtypes": "ml_dtypes", "typer": "typer", "rich": "rich"}
_TEST = {"numpy": "numpy", "ml_dtypes": "ml_dtypes", "pytest": "pytest", "hypothesis": "hypothesis"}
_LINT = {"ruff": "ruff", "mypy": "mypy", "clang_format": "clang-format"}
NEEDS = {"demo": _RUN, "bench": {**_RUN, "torch": "torch"}, "test": _TEST, "gpu": _TEST, "lint": _LINT}


@dataclass(frozen=True)
class Choice:
    """The GPU extra for this machine, with the reason as a sentence."""

    extra: str
    reason: str


@dataclass(frozen=True)
class Action:
    """What to do with the environment: "keep", "install" (in place) or "rebuild" (from nothing)."""

    kind: str
    extras: tuple[str, ...]
    reason: str


def read_driver(load: Callable[[str], Any] = ctypes.CDLL) -> int | None:
    """CUDA version that the installed driver serves, as 1000 * major + 10 * minor; None without a driver."""
    try:
        library = load("libcuda.so.1")
        version = ctypes.c_int(0)
        status = library.cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return version.value if status == 0 and version.value > 0 else None


def choose(driver: int | None) -> Choice:
    """GPU extra for a driver version as `read_driver` gives it."""
    if driver is None:
        return Choice("nvrtc", "no NVIDIA driver answers here, so kernels are compiled but not run")
    name = f"{driver // 1000}.{driver % 1000 // 10}"
    if driver >= 13000:
        return Choice("cuda13", f"the driver serves CUDA {name}")
    if driver >= 12000:
        return Choice("cuda12", f"the driver serves CUDA {name}")
    return Choice(
        "nvrtc",
        f"the driver serves CUDA {name} and CuPy 14 wants 12.0 or newer: GPU left out, update the driver",
    )


def decide(choice: Choice, wanted: tuple[str, ...], state: dict[str, Any] | None, digest: str) -> Action:
    """Compare what is wanted with what an earlier run recorded in the environment.

    Args:
        choice: GPU extra for this machine.
        wanted: further extras that this run needs.
        state: `{"digest": ..., "extras": [...]}` as recorded; {} if made by hand, None if there is none.
        digest: of `pyproject.toml` as it is now.
    """
    if state is None:
        return Action("rebuild", _ordered({choice.extra, *wanted}), "there is none yet")
    if not state:
        return Action("install", _ordered({choice.extra, *wanted}), "it carries no record of what is in it")
    present = set(state["extras"])
    gpu = next((name for name in GPU_EXTRAS if name in present), choice.extra)
    if choice.extra not in (gpu, "nvrtc"):  # the GPU extras contain everything that nvrtc has
        kept = (present - set(GPU_EXTRAS)) | {choice.extra, *wanted}
        return Action("rebuild", _ordered(kept), f"it was made for {gpu}, and the two do not live together")
    extras = _ordered(present | {gpu, *wanted})
    if state["digest"] != digest:
        return Action("install", extras, "pyproject.toml has changed")
    if not set(wanted) <= present:
        return Action("install", extras, f"{', '.join(sorted(set(wanted) - present))} is missing in it")
    return Action("keep", extras, "it is up to date")


def _ordered(extras: set[str]) -> tuple[str, ...]:
    return tuple(sorted(extras, key=lambda name: (name not in GPU_EXTRAS, name)))


def missing(needs: dict[str, str], find: Callable[[str], Any] = importlib.util.find_spec) -> list[str]:
    """Names for pip of the modules that this interpreter cannot import."""
    absent = []
    for module, package in needs.items():
        try:
            present = find(module) is not None
        except ModuleNotFoundError:  # a parent package is absent
            present = False
        if not present:
            absent.append(package)
    return absent


def check(purpose: str, driver: int | None, find: Callable[[str], Any] = importlib.util.find_spec) -> str | None:
    """One sentence that names what this interpreter or machine lacks for `make <purpose>`, or None."""
    needs = dict(NEEDS[purpose])
    choice = choose(driver)
    if purpose == "bench" and choice.extra == "nvrtc":
        return "make bench-gpu: it measures a GPU, and no NVIDIA driver for CUDA 12 or newer answers here."
    if choice.extra != "nvrtc" and purpose != "lint":
        needs["cupy"] = f"cupy-{choice.extra}x"
        needs["cuda.bindings"] = "cuda-bindings"
    absent = missing(needs, find)
    if not absent:
        return None
    return (
        f"make {purpose}: {sys.executable} lacks {', '.join(absent)} (nothing is installed with PYTHON=...); "
        f"add them with its pip, or run `make {purpose}` without PYTHON= to get an environment in .venv."
    )


def make_venv(folder: Path, wanted: tuple[str, ...], driver: int | None) -> None:
    """Bring the environment in `folder` up to date, saying what is done and why."""
    choice = choose(driver)
    python, record = folder / "bin" / "python", folder / "cupy_gmm.json"
    digest = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
    action = decide(choice, wanted, _read_state(python, record), digest)
    gpu = action.extras[0]
    if gpu != choice.extra:
        print(f"{folder}: stays with extra {gpu} although {choice.reason}")
    else:
        print(f"{folder}: extra {gpu}, because {choice.reason}")
    if action.kind == "keep":
        return
    doing = {"install": "installing in place", "rebuild": "building from nothing"}[action.kind]
    print(f"{folder}: {doing}, with [{','.join(action.extras)}], because {action.reason}", flush=True)
    if action.kind == "rebuild":
        base = getattr(sys, "_base_executable", sys.executable)  # this may be the environment's own python
        subprocess.run([base, "-m", "venv", "--clear", str(folder)], check=True)
    record.unlink(missing_ok=True)  # half an installation must not look like a whole one
    target = f"{ROOT}[{','.join(action.extras)}]"
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", "--editable", target], check=True)
    record.write_text(json.dumps({"digest": digest, "extras": list(action.extras)}) + "\n")


def _read_state(python: Path, record: Path) -> dict[str, Any] | None:
    try:
        works = subprocess.run([str(python), "-m", "pip", "--version"], capture_output=True).returncode == 0
    except OSError:
        works = False
    if not works:
        return None
    try:
        state = json.loads(record.read_text())
        return {"digest": str(state["digest"]), "extras": [str(name) for name in state["extras"]]}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def main(arguments: list[str] | None = None) -> int:
    if sys.version_info < OLDEST_PYTHON:
        found, oldest = (".".join(map(str, v)) for v in (sys.version_info[:3], OLDEST_PYTHON))
        print(
            f"Python {oldest} or newer is needed, and {sys.executable} is {found}: name another one with BOOTSTRAP=..."
        )
        return 1
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    venv = commands.add_parser("venv", help="create or refresh a virtual environment")
    venv.add_argument("folder", type=Path)
    venv.add_argument("--extras", default="", help="comma-separated extras of pyproject.toml besides the GPU one")
    look = commands.add_parser("check", help="name what this interpreter lacks")
    look.add_argument("purpose", choices=sorted(NEEDS))
    options = parser.parse_args(arguments)
    if options.command == "check":
        if sentence := check(options.purpose, read_driver()):
            print(sentence, file=sys.stderr)
            return 1
        return 0
    try:
        make_venv(options.folder, tuple(filter(None, options.extras.split(","))), read_driver())
    except subprocess.CalledProcessError as error:
        print(
            f"{options.folder}: this step failed with status {error.returncode}: {' '.join(error.cmd)}",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
