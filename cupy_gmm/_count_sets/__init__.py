"""Count sets: expert counts of many steps and layers of one model, those that ship (README.md here) or an .npz file.

`counts` offers all of it to users. Knows no device, and reads a file only when asked to.
"""

import dataclasses
import operator
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from .. import _histogram
from .._histogram import Histogram
from ..errors import ArgumentError

# Name -> what its file does not say: origin, extents of the experts' first product, and what `load` takes.
# Of moe-example: at step 20 layer 5 is near its worst, with an expert that got nothing and four that got one row; half
# way layer 2 is still far from even; at the end it is twice as even, by its Gini.
_FACTS: dict[str, dict[str, Any]] = {
    "moe-example": {
        "origin": "recorded while examples.moe_jax trained on an H200",
        "k": 512,
        "n": 1024,
        "telling": ((20, 5), (1000, 2), (2000, 2)),
    },
}
SETS = tuple(_FACTS)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class CountSet:
    """Recorded expert counts of one model, step by step and layer by layer.

    Attributes:
        name: of a set that ships one of `SETS`, else the stem of the file.
        steps: training steps that were recorded, rising; the first step of a run is 1.
        counts: int32 (len(steps), layers, experts), read-only: rows that each expert received.
        k: length of the reduction in the model's own experts; None: not known.
        n: columns of their first product; None: not known.
        telling: a few (step, layer) worth looking at first; may be empty.
        origin: how the set came to be, in a few words; may be empty.
    """

    name: str
    steps: tuple[int, ...]
    counts: np.ndarray
    k: int | None = None
    n: int | None = None
    telling: tuple[tuple[int, int], ...] = ()
    origin: str = ""

    @property
    def layers(self) -> int:
        return self.counts.shape[1]

    def histogram(self, step: int, layer: int) -> Histogram:
        """Counts of one layer at one step, called NAME-sSTEP-lLAYER.

        Args:
            step: one of `steps`.
            layer: from 0.

        Raises:
            ArgumentError: that step or layer was not recorded; the message says which were.
        """
        if _number(step) not in self.steps:
            raise ArgumentError(f"{self.name} has no step {step}: it holds {_runs(self.steps)}")
        if not 0 <= _number(layer) < self.layers:
            raise ArgumentError(f"{self.name} has no layer {layer}: it holds layers 0 to {self.layers - 1}")
        values = tuple(self.counts[self.steps.index(step), layer].tolist())
        return Histogram(f"{self.name}-s{step}-l{layer}", values, self.k, self.n)

    def histograms(self, steps: Iterable[int] | None = None, layers: Iterable[int] | None = None) -> list[Histogram]:
        """Counts of each of `steps` and each of `layers`, all of them where None; otherwise as `histogram`."""
        of_layers = range(self.layers) if layers is None else tuple(layers)
        return [self.histogram(step, layer) for step in (self.steps if steps is None else steps) for layer in of_layers]


def load_set(source: str | Path = SETS[0]) -> CountSet:
    """Read a count set: one that ships, by its name, or a file of your own.

    Args:
        source: one of `SETS`, or an .npz file with an integer array `counts` (steps, layers, experts) and
            perhaps `steps` (steps,), as the examples write it. A `Path` is always a file.

    Returns:
        A `CountSet` with all that was recorded.

    Raises:
        ArgumentError: no such set or file, or a file of another form.
    """
    if isinstance(source, str) and source in _FACTS:
        steps, counts = _read(Path(__file__).with_name(f"{source}.npz"))
        return CountSet(source, steps, counts, **_FACTS[source])
    if Path(source).suffix != ".npz":
        raise ArgumentError(f"{source} is no count set: expected an .npz file or the name of a set, {_names()}")
    return CountSet(Path(source).stem, *_read(Path(source)))


def load(source: str | Path) -> list[Histogram]:
    """Read histograms from a file, or the telling ones of a count set that ships.

    Args:
        source: a JSON file with an object that has a list `counts` (and perhaps `name`, `k`, `n`), a bare list of
            whole numbers, or a list of either, one a step or layer, such as `Recorder.save` writes; an .npz file as
            for `load_set`; or the name of a set, one of `SETS`. A `Path` is always a file.

    Returns:
        At least one `Histogram`: all of a file, the few of `CountSet.telling` of a set. One without a name is
        called after the file, numbered if of several.

    Raises:
        ArgumentError: no such file or set, or not of this form; the message names file and place.
    """
    if isinstance(source, str) and source in _FACTS:
        found = load_set(source)
        return [found.histogram(*each) for each in found.telling]
    if Path(source).suffix == ".npz":
        return load_set(source).histograms()
    if not Path(source).exists():
        raise ArgumentError(f"{source} cannot be read: No such file or directory; count sets by name: {_names()}")
    return _histogram.load(source)


def _read(path: Path) -> tuple[tuple[int, ...], np.ndarray]:
    wanted = "expected an integer array `counts` (steps, layers, experts), and perhaps `steps`, rising, one a step"
    try:
        with np.load(path, allow_pickle=False) as file:
            counts = file["counts"]
            steps = file["steps"] if "steps" in file else np.arange(1, len(counts) + 1)
    except OSError as error:
        raise ArgumentError(f"{path} cannot be read: {error.strerror or error}") from error
    except (AttributeError, EOFError, KeyError, TypeError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise ArgumentError(f"{path}: {wanted}; {error}") from error
    shapes = f"`counts` is {counts.dtype} {counts.shape}, `steps` {steps.dtype} {steps.shape}"
    if (
        counts.ndim != 3
        or 0 in counts.shape
        or steps.shape != counts.shape[:1]
        or {counts.dtype.kind, steps.dtype.kind} - {*"iu"}
    ):
        raise ArgumentError(f"{path}: {wanted}; {shapes}")
    if counts.min() < 0 or counts.max() > 0x7FFFFFFF or (np.diff(steps.astype(np.int64)) <= 0).any():
        raise ArgumentError(f"{path}: {wanted}; a count is negative or past 2^31, or the steps do not rise")
    counts = counts.astype(np.int32)
    counts.setflags(write=False)
    return tuple(steps.tolist()), counts


def _names() -> str:
    return ", ".join(SETS)


def _number(value: Any) -> int:
    """The whole number that `value` is, -1 for anything else, which no set has."""
    try:
        return -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return -1


def _runs(steps: tuple[int, ...]) -> str:
    """Steps as a sentence says them: "steps 1 to 100, 110 to 2000 by 10"."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and (len(runs[-1]) == 1 or step - runs[-1][-1] == runs[-1][1] - runs[-1][0]):
            runs[-1].append(step)
        else:
            runs.append([step])
    words = []
    for run in runs:
        apart = run[1] - run[0] if len(run) > 1 else 1
        few = ", ".join(map(str, run))
        words.append(few if len(run) < 3 else f"{run[0]} to {run[-1]}" + (f" by {apart}" if apart > 1 else ""))
    return f"steps {', '.join(words)}"
