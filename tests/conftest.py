"""Fixtures and the `gpu` marker. Seeds are printed; `--seed N` repeats a run."""

import collections
import functools
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Before NumPy is imported. The products of the tests are small, and a BLAS's threads only get in their way.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Before JAX starts: it would take most of the card's memory, also for tests on the CPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import hypothesis
import numpy as np
import pytest

from cupy_gmm import _recent
from tests import backends, gpu_log

hypothesis.settings.register_profile(
    "default",
    deadline=None,
    derandomize=True,
    database=None,
    print_blob=True,
    max_examples=60,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("default")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=20, help="seed of all random inputs")
    parser.addoption("--complete", action="store_true", help="a skip for another want than that of a GPU fails")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu: needs a CUDA device; skipped with a reason where there is none")


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {config.getoption('--seed')}; gpu tests: {no_device() or 'run'}"


@functools.cache
def no_device() -> str:
    """Why tests marked `gpu` cannot run here; empty when they can."""
    try:
        import cupy
    except ImportError as error:
        return f"CuPy cannot be imported ({error})"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # a missing driver has no one type
        return f"no CUDA device ({error})"
    return "" if count else "no CUDA device"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = no_device()
    if reason:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason=reason))


def _refuse(report: Any) -> None:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
    report.outcome, report.longrepr = "failed", f"a complete run has what this test needs, and yet: {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    report = yield
    if report.skipped and item.config.getoption("--complete") and not item.get_closest_marker("gpu"):
        _refuse(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Any:
    report = yield
    if report.skipped and collector.config.getoption("--complete"):
        _refuse(report)
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Repeats the warning of `test_gpu_log` where nobody overlooks it, in runs that had that test."""
    ran = any("test_gpu_log" in report.nodeid for report in terminalreporter.stats.get("passed", ()))
    if ran and (complaint := gpu_log.complaint()):
        terminalreporter.section("not seen on a GPU", sep="!", red=True, bold=True)
        terminalreporter.line(complaint, red=True, bold=True)


@pytest.fixture(scope="session", params=["cpu", pytest.param("cupy", marks=pytest.mark.gpu)])
def backend(request: pytest.FixtureRequest) -> backends.Backend:
    """The library on NumPy arrays, and on CuPy arrays where there is a device."""
    return backends.make(request.param)


@pytest.fixture(autouse=True)
def first_gpu(request: pytest.FixtureRequest) -> None:
    """XLA leaves the GPU that it used last current in the thread; what a test makes belongs on the first one."""
    if request.node.get_closest_marker("gpu"):
        backends.use_first_gpu()


@pytest.fixture(scope="session")
def gpu() -> backends.Backend:
    """CuPy only; the test carries the `gpu` marker itself."""
    return backends.make("cupy")


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random numbers that depend on `--seed` and on the test alone, and not on which other tests run."""
    seed = [request.config.getoption("--seed"), zlib.crc32(request.node.nodeid.encode())]
    print(f"rng seed {seed}")
    return np.random.default_rng(seed)


@pytest.fixture
def remember_only(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Call it with how much is remembered by address from here on."""

    def most(count: int) -> None:
        monkeypatch.setattr(_recent, "MOST", count)
        monkeypatch.setattr(_recent, "_order", collections.deque())

    return most


@pytest.fixture
def cli(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., tuple[int, str, str]]:
    """Call `python -m cupy_gmm` in an empty folder: exit code, stdout, stderr."""
    from cupy_gmm._cli import main

    monkeypatch.chdir(tmp_path)

    def call(*words: object) -> tuple[int, str, str]:
        code = main([str(word) for word in words])
        return code, *capsys.readouterr()

    return call
