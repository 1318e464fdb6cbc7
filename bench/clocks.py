"""SM clock and power while something is timed, as `nvidia-smi` samples them; nothing where it is missing."""

import contextlib
import datetime
import statistics
import subprocess
import threading
from collections.abc import Iterable

FIELDS = ("sm_mhz", "watts")
QUERY = "timestamp,clocks.sm,power.draw.instant"


def parse(line: str) -> tuple[float, dict[str, float]] | None:
    """(time, values) of one line of `nvidia-smi`; a field that it does not know is left out."""
    parts = [part.strip() for part in line.split(",")]
    try:
        moment = datetime.datetime.strptime(parts[0], "%Y/%m/%d %H:%M:%S.%f").timestamp()
    except ValueError:
        return None
    values = {}
    for name, text in zip(FIELDS, parts[1:], strict=False):
        with contextlib.suppress(ValueError):
            values[name] = float(text)
    return moment, values


class Clocks:
    """Samples in the background; a context manager."""

    def __init__(self, device: str | None = None, milliseconds: int = 50) -> None:
        which = ["-i", device] if device else []
        self._command = ["nvidia-smi", *which, f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"]
        self._command += ["-lms", str(milliseconds)]
        self._samples: list[tuple[float, dict[str, float]]] = []
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> "Clocks":
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(
                self._command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
            assert self._process.stdout is not None
            threading.Thread(target=self.read, args=(self._process.stdout,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()

    def read(self, lines: Iterable[str]) -> None:
        for line in lines:
            if found := parse(line):
                self._samples.append(found)

    def during(self, window: tuple[float, float]) -> dict[str, float]:
        """Medians over a window of `time.time()`; empty where nothing was sampled in it."""
        inside = [values for moment, values in list(self._samples) if window[0] <= moment <= window[1]]
        found = {name: [values[name] for values in inside if name in values] for name in FIELDS}
        return {name: statistics.median(values) for name, values in found.items() if values}
