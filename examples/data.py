"""The text that the examples learn: the sources of Python's standard library, split by file, a token a byte."""

import functools
import math
import sysconfig
from pathlib import Path

import numpy as np

# No library text, or the same lines over and over.
_LEFT_OUT = {
    "__pycache__", "dist-packages", "encodings", "idle_test", "site-packages", "test", "tests", "turtledemo",
}  # fmt: skip
_HELD_OUT = 16  # every sixteenth file is for validation


@functools.cache
def text() -> tuple[np.ndarray, np.ndarray]:
    """Bytes for training and for validation, uint8; always the same for one installation of Python.

    Raises:
        FileNotFoundError: This Python has no sources of its library.
    """
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    paths = [path for path in paths if not _LEFT_OUT & set(path.split("/"))]
    files = [(root / path).read_bytes() for path in paths]
    held_out = [b"\n".join(files[start::_HELD_OUT]) for start in range(_HELD_OUT)]
    if len(files) < 2 * _HELD_OUT:
        raise FileNotFoundError(f"{root} has {len(files)} Python files: expected the sources of the standard library")
    train = b"\n".join(held_out[:-1])
    return np.frombuffer(train, np.uint8), np.frombuffer(held_out[-1], np.uint8)


def batch(source: np.ndarray, rows: int, context: int, *seed: int) -> np.ndarray:
    """(rows, context + 1) int32 from random places, which `seed` decides: inputs and, one on, targets."""
    starts = np.random.default_rng(seed).integers(0, len(source) - context, rows)
    return source[starts[:, None] + np.arange(context + 1)].astype(np.int32)


def unigram_entropy(source: np.ndarray) -> float:
    """Nats a byte for whoever knows how often each byte occurs, and nothing else."""
    counts = np.bincount(source, minlength=256)
    shares = counts[counts > 0] / counts.sum()
    return -math.fsum(float(share) * math.log(share) for share in shares)
