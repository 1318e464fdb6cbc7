"""What a histogram of expert counts is, and how it comes in (lists, arrays, JSON) and is logged.

Used by `counts`, which offers all of it to users. Knows no device: an array copies or lists itself.
"""

import dataclasses
import json
import operator
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .errors import ArgumentError


@dataclasses.dataclass(frozen=True, slots=True)
class Histogram:
    """One recorded histogram: its name, its counts, and the extents its file states (None: not stated)."""

    name: str
    counts: tuple[int, ...]
    k: int | None = None
    n: int | None = None


def check(counts: Any, name: str = "counts") -> tuple[int, ...]:
    """Return `counts` as a tuple of Python integers, or say in a sentence why that cannot be.

    Args:
        counts: a sequence of whole numbers >= 0, or a 1-D integer array of any framework (it waits).
        name: what the caller calls it; used in the message.

    Returns:
        One int a group.

    Raises:
        ArgumentError: not a flat list of whole numbers >= 0, or no group at all.
    """
    values = counts.tolist() if hasattr(counts, "tolist") else counts
    if isinstance(values, str | bytes | dict) or not isinstance(values, Iterable):
        raise ArgumentError(f"`{name}` is {_short(counts)}: expected a list with the rows of each group, as [3, 0, 5]")
    out = []
    for index, value in enumerate(values):
        try:
            number = -1 if isinstance(value, bool) else operator.index(value)
        except TypeError:
            number = -1
        if number < 0:
            raise ArgumentError(
                f"`{name}[{index}]` is {_short(value)}: expected the rows of a group, a whole number >= 0"
            )
        out.append(number)
    if not out:
        raise ArgumentError(f"`{name}` is empty: expected the rows of at least one group")
    return tuple(out)


def whole(name: str, value: Any, least: int) -> int:
    """Return `value` as an int of at least `least`, or say in a sentence why that cannot be."""
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise ArgumentError(f"`{name}` is {_short(value)}: expected a whole number >= {least}")
    return number


def load(path: str | Path) -> list[Histogram]:
    """Read histograms from a JSON file; `counts.load` describes its forms."""
    path = Path(path)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ArgumentError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ArgumentError(f'{path} is not JSON ({error}): expected {{"counts": [3, 0, 5]}} or [3, 0, 5]') from error
    if isinstance(data, list) and data and all(isinstance(item, dict | list) for item in data):
        return [_histogram(item, f"{path.stem}[{i}]", f"{path}: item {i}: ") for i, item in enumerate(data)]
    return [_histogram(data, path.stem, f"{path}: ")]


class Recorder:
    """Log the counts of every step without waiting for the device.

    `add` keeps a copy where the counts are; only `histograms` and `save` bring them to the host.

    Args:
        name: stem of the names of the recorded histograms.
    """

    def __init__(self, name: str = "step") -> None:
        self.name = name
        self._steps: list[Any] = []

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, counts: Any) -> None:
        """Keep a copy of one step's counts: a list, or an array of any framework (`Routing.counts`)."""
        copy = getattr(counts, "clone", None) or getattr(counts, "copy", None)
        self._steps.append(copy() if copy else tuple(counts))

    def histograms(self) -> list[Histogram]:
        """Copy all recorded counts to the host: waits for the device."""
        return [Histogram(f"{self.name}[{i}]", check(step, f"step {i}")) for i, step in enumerate(self._steps)]

    def save(self, path: str | Path) -> Path:
        """Write all counts as JSON for `load` and `python -m cupy_gmm counts`; waits for the device."""
        records = [{"name": item.name, "counts": item.counts} for item in self.histograms()]
        Path(path).write_text(json.dumps(records) + "\n", encoding="utf-8")
        return Path(path)


def _histogram(item: Any, name: str, where: str) -> Histogram:
    record = item if isinstance(item, dict) else {"counts": item}
    if "counts" not in record:
        keys = ", ".join(map(repr, record)) or "nothing"
        raise ArgumentError(f"{where}there is no list 'counts' among its keys ({keys})")
    try:
        k, n = (None if record.get(key) is None else whole(key, record[key], 0) for key in ("k", "n"))
        return Histogram(str(record.get("name", name)), check(record["counts"]), k, n)
    except ArgumentError as error:
        raise ArgumentError(f"{where}{error}") from None


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
