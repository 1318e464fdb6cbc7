"""The host compiler that some tests need: those that run kernels on the CPU, read XLA's header, or need a C thread.

Whoever only uses the library need not have one, so without it these tests skip. CI must have one: `--complete` makes
such a skip a failure.
"""

import platform
import shutil
import subprocess

import pytest


def find() -> str | None:
    """A C++ compiler of the machine."""
    return shutil.which("g++") or shutil.which("clang++")


def cxx() -> str:
    """A C++ compiler, or a skip: the library needs none, so who has it may have none.

    CI has one, and its `--complete` makes this skip a failure.
    """
    found = find()
    if found is None:
        pytest.skip("this machine has no C++ compiler")
    return found


def gxx_for_kernels() -> str:
    """g++ 12 or later, for _Float16, on x86-64, in whose assembly the fibers of `tests/shim` switch; or a skip.

    Nothing stands in for either; in CI the skip is a failure, as that of `cxx`.
    """
    found, version = shutil.which("g++"), "none"
    if found is not None:
        asked = subprocess.run([found, "-dumpversion"], capture_output=True, text=True, check=True, timeout=60)
        version = asked.stdout.strip()
    if found is None or int(version.split(".")[0]) < 12 or platform.machine() != "x86_64":
        pytest.skip(f"needs g++ 12 or later on x86-64: here is {version} on {platform.machine()}")
    return found
