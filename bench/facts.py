"""What a record of a run must say of itself: sources, device, versions, clocks."""

import datetime
import subprocess
from typing import Any

from cupy_gmm import _device, _nvrtc, _source


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def run(commit: str | None = None) -> dict[str, Any]:
    """Commit, digest of the kernels, device, driver, compiler and the clocks of this moment."""
    device = _device.info(0)
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit or _output("git", "rev-parse", "HEAD"),
        "kernels": _source.digest(),
        "device": device.name,
        "arch": device.arch,
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "driver_cuda": ".".join(map(str, device.driver_version)),
        "nvrtc": _nvrtc.version(),
        "clocks_power": _output("nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,power.draw", "--format=csv,noheader"),
    }
