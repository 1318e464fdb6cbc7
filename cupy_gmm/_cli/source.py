"""Where `counts` and `demo` take histograms from: a file, or steps and layers of a count set."""

from collections.abc import Sequence
from pathlib import Path

from ..counts import SETS, Histogram, load, load_set
from ..errors import ArgumentError


def histograms(source: str, steps: Sequence[int] | None = None, layers: Sequence[int] | None = None) -> list[Histogram]:
    """Those of these steps and layers; with neither, all of a file and the telling ones of a set that ships."""
    if not steps and not layers:
        return load(source)
    if source not in SETS and Path(source).suffix != ".npz":
        raise ArgumentError(
            f"{source} has no steps and layers to pick from: leave out --step and --layer, or name a count set "
            f"({', '.join(SETS)}) or an .npz file"
        )
    return load_set(source).histograms(steps or None, layers or None)


def told(name: str) -> str:
    """A sentence about a set that ships."""
    found = load_set(name)
    return (
        f"{name}: {found.origin}; s is the step, l the layer.\n"
        f"It holds {len(found.steps)} steps and {found.layers} layers: --step and --layer pick."
    )
