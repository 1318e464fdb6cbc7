"""What a record of a run must say of itself: sources, device, versions, clocks."""

import contextlib
import datetime
import importlib.metadata
import subprocess
from typing import Any

from cupy_gmm import _device, _nvrtc, _source


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


PACKAGES = (
    "cupy-cuda12x", "cupy-cuda13x", "cuda-bindings", "numpy", "torch", "jax", "quack-kernels", "nvidia-cutlass-dsl",
)  # fmt: skip


def packages() -> dict[str, str]:
    """Versions of what is installed of `PACKAGES`."""
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def run(commit: str | None = None) -> dict[str, Any]:
    """Commit, digest of the kernels, device, driver, compiler and the clocks of this moment."""
    device = _device.info(0)
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit or _output("git", "rev-parse", "HEAD"),
        "kernels": _source.digest(),
        "device": device.name,
        "arch": device.arch,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0],
        "driver_cuda": ".".join(map(str, device.driver_version)),
        "nvrtc": _nvrtc.version(),  # the toolkit that compiles the kernels
        "packages": packages(),
        "clocks_power": _output("nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,power.draw", "--format=csv,noheader"),
    }
