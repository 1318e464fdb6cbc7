"""What a run leaves in its folder: checkpoint, losses, expert counts, picture. Knows NumPy arrays only."""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .model import Config

_POINTS = 200  # of a line of the picture, at most: it is some hundred pixels wide, and the file stays small
State = dict[str, dict[str, Any]]


@dataclasses.dataclass
class History:
    """So far: a loss a step, counts (layers, experts) a step, and `validation` from step to loss."""

    losses: list[Any] = dataclasses.field(default_factory=list)
    counts: list[Any] = dataclasses.field(default_factory=list)
    validation: dict[int, float] = dataclasses.field(default_factory=dict)

    @property
    def step(self) -> int:
        return len(self.losses)


def save(folder: Path, config: Config, seed: int, state: State, history: History) -> None:
    """Write checkpoint.npz, whole or not at all."""
    arrays: dict[str, Any] = {f"{part}/{name}": value for part, tree in state.items() for name, value in tree.items()}
    arrays["losses"], arrays["counts"] = np.array(history.losses), np.array(history.counts)
    arrays["about"] = np.array(_about(config, seed, history.validation))
    unfinished = folder / "checkpoint.tmp"
    with unfinished.open("wb") as file:
        np.savez(file, **arrays)
    os.replace(unfinished, folder / "checkpoint.npz")


def load(folder: Path, config: Config, seed: int) -> tuple[State, History]:
    """What `save` wrote.

    Raises:
        ValueError: There is none, or it is of another model, length or seed.
    """
    path = folder / "checkpoint.npz"
    if not path.is_file():
        raise ValueError(f"{path} is not there: leave out `--resume`, or name the folder of an earlier run by `--out`")
    with np.load(path) as file:
        arrays = dict(file)
    about = json.loads(str(arrays.pop("about")))
    validation = {int(step): loss for step, loss in about.pop("validation").items()}
    wanted = json.loads(_about(config, seed, {}))
    differing = [f"{key} {about.get(key)}" for key in wanted if key != "validation" and about.get(key) != wanted[key]]
    if differing:
        raise ValueError(f"{path} is of a run with {', '.join(differing)}: pass the same options to resume it")
    history = History(list(arrays.pop("losses")), list(arrays.pop("counts")), validation)
    state: State = {}
    for key, value in arrays.items():
        part, name = key.split("/")
        state.setdefault(part, {})[name] = value
    return state, history


def _about(config: Config, seed: int, validation: Mapping[int, float]) -> str:
    return json.dumps({**dataclasses.asdict(config), "seed": seed, "validation": validation})


def write(folder: Path, name: str, history: History, entropy: float) -> None:
    """counts.npz with every step, for `python -m cupy_gmm counts` too; losses.json and losses.svg."""
    counts = np.array(history.counts, np.int32)
    np.savez_compressed(folder / "counts.npz", counts=counts)
    losses = [round(float(loss), 5) for loss in history.losses]
    document = {"unigram_entropy": entropy, "validation": history.validation, "train": losses}
    (folder / "losses.json").write_text(json.dumps(document) + "\n")
    draw(folder / "losses.svg", name, history, entropy)


def thinned(values: Any) -> tuple[np.ndarray, np.ndarray]:
    """(steps, values) of at most `_POINTS` points along the first axis, each the mean of as many neighbours."""
    values = np.asarray(values, np.float64)
    parts = np.array_split(np.arange(len(values)), min(len(values), _POINTS))
    return np.array([part.mean() + 1 for part in parts]), np.array([values[part].mean(axis=0) for part in parts])


def draw(path: Path, name: str, history: History, entropy: float) -> None:
    """Losses of training and validation against the unigram entropy; beside, how uneven each layer's experts were."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.4, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    mean_of = -(-history.step // _POINTS)
    step = "step" if mean_of == 1 else f"step (thin lines: means of {mean_of} steps)"
    left.plot(*thinned(history.losses), color="#2a7fc1", linewidth=0.8, alpha=0.6, label="training")
    left.plot(*zip(*history.validation.items(), strict=True), color="#d55e00", marker="o", label="validation")
    left.axhline(entropy, color="#1f2328", linewidth=0.9, linestyle=":", label="unigram entropy")
    left.set(title=name, xlabel=step, ylabel="loss, nats a byte")
    left.legend(frameon=False)
    counts = np.array(history.counts, np.float64)
    right.plot(*thinned(counts.max(-1) / counts.mean(-1)), linewidth=0.8)
    right.legend([f"layer {layer}" for layer in range(counts.shape[1])], frameon=False)
    right.set(title="How uneven the experts are", xlabel=step, ylabel="busiest expert / mean", ylim=(1, None))
    fonts = {"font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"]}  # each text repeats the list: a short one
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "cupy_gmm"} | fonts):
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": "cupy_gmm"})
