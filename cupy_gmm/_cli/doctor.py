"""`doctor`: what this machine has, what it lacks, and the remedy for each."""

import contextlib
import dataclasses
import importlib
import importlib.metadata
import os
import platform
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .. import _cache, _device, _env, _nvrtc, _source, ops
from .._version import __version__
from ..errors import GmmError
from .output import Json, emit

_STATES = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "problem": "[bold red]problem[/]"}
_EXTRAS = {"cli": ("typer", "rich", "matplotlib"), "jax": ("jax",), "torch": ("torch",)}
_CACHE_RULES = "a folder of yours that nobody else can write, no link; one checked file a kernel; safe to delete"


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. A problem stops the GPU path; a note does not."""

    what: str
    state: str
    found: str
    remedy: str = ""


def doctor(json: Json = False) -> None:
    """Look at driver, toolkit, architecture, kernel cache and extras, and say what to fix.

    A machine without a GPU is usable: NumPy arrays, and CPU arrays of PyTorch and JAX, take the NumPy path.
    Exit code 0 when this machine is usable, 1 when it has a GPU that the library cannot use, or gives wrong
    numbers.
    """
    findings = [finding for look in _LOOKS for finding in _guarded(look)]
    usable = all(each.state != "problem" for each in findings)
    gpus = _device.count()
    verdict = f"Usable, on {gpus} GPU{'s' * (gpus > 1)}." if gpus else "Usable, on the CPU only: there is no GPU here."
    document = {
        "version": __version__,
        "usable": usable,
        "gpus": gpus,
        "verdict": verdict if usable else "Not usable as it is: see each problem's remedy.",
        "findings": findings,
    }
    emit(document, json, lambda console: _draw(console, document))
    if not usable:
        raise typer.Exit(1)


def _guarded(look: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """A look that fails is itself a finding: a report must never stop halfway."""
    try:
        yield from look()
    except Exception as error:
        what = (look.__doc__ or look.__name__).rstrip(".")
        yield Finding(
            what,
            "problem",
            f"{type(error).__name__}: {error}",
            "report this with the whole output of `doctor`",
        )


def _python() -> Iterator[Finding]:
    """Python."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("numpy", "ml_dtypes"))
    found = f"cupy_gmm {__version__} on Python {platform.python_version()}, {platform.machine()}; {versions}"
    yield Finding("Python", "ok", found)
    yield Finding("kernel sources", "ok", f"{_source.kernels_dir()}, digest {_source.digest()[:12]}")


def _gpus() -> Iterator[Finding]:
    """GPU."""
    if not (gpus := _device.count()):
        try:
            _device.driver()
            reason = "the CUDA driver sees no device"
        except GmmError as error:
            reason = str(error)
        yield Finding("GPU", "note", f"none: {reason}", "nothing to do for CPU use")
        return
    for ordinal in range(gpus):
        gpu = _device.info(ordinal)
        driver = ".".join(map(str, gpu.driver_version))
        found = f"{gpu.name}, {gpu.arch}, {gpu.sm_count} SMs, L2 {gpu.l2_bytes >> 20} MB; driver: CUDA {driver}"
        if gpu.arch in _device.PORTABLE:
            yield Finding(f"GPU {ordinal}", "ok", found)
        else:
            remedy = f"use one of {', '.join(_device.PORTABLE)}; CUDA_VISIBLE_DEVICES hides this one"
            yield Finding(f"GPU {ordinal}", "problem", found + ": no kernels ship for it", remedy)


def _compiler() -> Iterator[Finding]:
    """Compiler."""
    gpus = _device.count()
    try:
        nvrtc = _nvrtc.version()
    except GmmError as error:
        yield Finding(
            "NVRTC",
            "problem" if gpus else "note",
            str(error),
            f"{_device.advice()}, or [nvrtc] without a GPU",
        )
        return
    served = _device.info(0).driver_version if gpus else None
    if served is not None and int(nvrtc.split(".")[0]) > served[0]:
        yield Finding(
            "NVRTC", "problem", f"{nvrtc}, newer than the driver, which serves CUDA {served[0]}.{served[1]}",
            f"update the driver, or install `cupy-gmm[cuda{served[0]}]` in place of what is there",
        )  # fmt: skip
    else:
        yield Finding("NVRTC", "ok", nvrtc)


def _cupy() -> Iterator[Finding]:
    """CuPy."""
    names = {dist.metadata["Name"] or "" for dist in importlib.metadata.distributions()}
    wheels = sorted(name for name in names if name.lower() in ("cupy", "cupy-cuda12x", "cupy-cuda13x"))
    if len(wheels) > 1:
        remedy = f"pip uninstall -y {' '.join(wheels)}, then install one extra, cuda12 or cuda13"
        yield Finding("CuPy", "problem", f"{' and '.join(wheels)} are both installed, in one folder", remedy)
    elif not _device.count():
        yield Finding(
            "CuPy",
            "ok" if wheels else "note",
            ", ".join(wheels) or "not installed; it is needed on a GPU only",
        )
    else:
        try:
            cupy = _device.import_cupy()
            yield Finding("CuPy", "ok", f"{cupy.__version__} ({', '.join(wheels) or 'built from source'})")
        except GmmError as error:
            yield Finding("CuPy", "problem", str(error), _device.advice())


def _kernel_cache() -> Iterator[Finding]:
    """Kernel cache."""
    remedy = "set CUPY_GMM_CACHE_DIR to such a folder; until then each process compiles again"
    if (problem := _cache.problem()) is not None:
        yield Finding("kernel cache", "note", f"in memory only: {problem}. Rules: {_CACHE_RULES}", remedy)
        return
    folder = _env.cache_dir()
    assert folder is not None
    sizes = []
    for entry in os.scandir(folder):
        with contextlib.suppress(FileNotFoundError):  # another process names a new kernel, or removes one
            sizes.append(entry.stat(follow_symlinks=False).st_size)
    kept = f"{len(sizes)} file{'s' * (len(sizes) != 1)}, {sum(sizes) / 2**20:.1f} MB"
    yield Finding("kernel cache", "ok", f"{folder}: {kept}. Rules: {_CACHE_RULES}")


def _extras() -> Iterator[Finding]:
    """Extras."""
    for extra, modules in _EXTRAS.items():
        found, missing = [], []
        for name in modules:
            try:
                found.append(f"{name} {importlib.metadata.version(name)}")
            except importlib.metadata.PackageNotFoundError:
                missing.append(name)
        if missing:
            text = f"{', '.join(missing)} not installed"
            yield Finding(f"extra {extra}", "note", text, f"pip install 'cupy-gmm[{extra}]', if you want it")
        else:
            yield Finding(f"extra {extra}", "ok", ", ".join(found))


def _product() -> Iterator[Finding]:
    """A small product."""
    counts, k, n = (3, 0, 5), 16, 8
    numbers = np.arange(8 * k).reshape(8, k) % 7 - 3
    weights = np.arange(3 * k * n).reshape(3, k, n) % 5 - 2
    ends = np.cumsum(counts)
    want = np.concatenate([numbers[end - m : end] @ w for end, m, w in zip(ends, counts, weights, strict=True)])
    x, w = numbers.astype(ml_dtypes.bfloat16), weights.astype(ml_dtypes.bfloat16)
    for where in ("CPU", "GPU") if _device.count() else ("CPU",):
        put = _device.import_cupy().asarray if where == "GPU" else np.asarray
        got = ops.grouped_mm(put(x), put(w), put(ends.astype(np.int32)), out_dtype="float32")
        exact = np.array_equal(np.asarray(got.tolist()), want)
        remedy = (
            "" if exact else "the results of this machine cannot be trusted: report this with the output of `doctor`"
        )
        text = f"grouped_mm of {counts} rows: {'exact' if exact else 'WRONG'}"
        yield Finding(f"a product, {where}", "ok" if exact else "problem", text, remedy)


_LOOKS = (_python, _gpus, _compiler, _cupy, _kernel_cache, _extras, _product)


def _draw(console: Console, document: dict[str, Any]) -> None:
    rows = Table(title=f"cupy_gmm {document['version']}", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for column in ("what", "state", "found", "remedy"):
        rows.add_column(column, overflow="fold")
    for each in document["findings"]:
        rows.add_row(each.what, _STATES[each.state], escape(each.found), escape(each.remedy))
    console.print(rows)
    console.print(document["verdict"])
