"""What is right: exact integer inputs and results, bit comparison, and the error bound for random data.

Written apart from `cupy_gmm.reference` on purpose: the reference is itself under test.
"""

from collections.abc import Sequence

import numpy as np

from tests import backends, layouts
from tests.backends import DTYPES

# A prime number of pool values: no two rows, columns or groups of a test repeat each other.
_POOL_LENGTH = 1_000_003


def integers(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Integers from -4 to 4: float32 sums of up to 2^20 products are exact."""
    count = layouts.elements(shape)
    if count <= _POOL_LENGTH:
        return rng.integers(-4, 5, shape, np.int8).astype(DTYPES[dtype])
    pool = rng.integers(-4, 5, _POOL_LENGTH, np.int8).astype(DTYPES[dtype])
    return np.resize(pool, count).reshape(shape)


def bounds_of(offs: Sequence[int] | np.ndarray, rows: int) -> list[tuple[int, int]]:
    """First and end row of each group, one plain step at a time."""
    spans, reached = [], 0
    for end in offs:
        start, reached = reached, min(rows, max(reached, int(end)))
        spans.append((start, reached))
    return spans


def expected_mm(
    x: np.ndarray, w: np.ndarray, spans: Sequence[tuple[int, int]], dtype: str, group_offset: int = 0
) -> np.ndarray:
    """Forward product of integer inputs: exact sums, one rounding, +0 elsewhere."""
    y = np.zeros((len(x), w.shape[2]), np.float32)
    for group, (start, end) in enumerate(spans):
        local = group - group_offset
        if start < end and 0 <= local < len(w):
            y[start:end] = x[start:end].astype(np.float32) @ w[local].astype(np.float32)
    return rounded(y, dtype)


def expected_wgrad(
    x: np.ndarray,
    dy: np.ndarray,
    spans: Sequence[tuple[int, int]],
    dtype: str,
    groups: int,
    group_offset: int = 0,
    before: np.ndarray | None = None,
) -> np.ndarray:
    """Weight gradient of integer inputs, added to `before` where that is given."""
    dw = np.zeros((groups, x.shape[1], dy.shape[1]), DTYPES[dtype])
    for local in range(groups):
        group = local + group_offset
        start, end = spans[group] if 0 <= group < len(spans) else (0, 0)
        if start < end:
            total = x[start:end].astype(np.float32).T @ dy[start:end].astype(np.float32)
            dw[local] = rounded(total if before is None else total + before[local].astype(np.float32), dtype)
        elif before is not None:
            dw[local] = before[local]
    return dw


def rounded(value: np.ndarray, dtype: str) -> np.ndarray:
    """Round exact float32 integers once. A sum that starts at +0 is never -0."""
    with np.errstate(over="ignore", invalid="ignore"):
        return (value + np.float32(0)).astype(DTYPES[dtype])


def assert_same_bits(actual: np.ndarray, expected: np.ndarray, what: object = "") -> None:
    assert actual.shape == expected.shape, f"{what}: shape {actual.shape}, expected {expected.shape}"
    assert actual.dtype == expected.dtype, f"{what}: dtype {actual.dtype}, expected {expected.dtype}"
    wrong = np.argwhere(backends.bits(actual) != backends.bits(expected))
    if len(wrong):
        at = tuple(int(i) for i in wrong[0])
        last = tuple(int(i) for i in wrong[-1])
        stale = int(backends.is_poison(actual).sum()) if actual.dtype.itemsize > 1 else 0
        raise AssertionError(
            f"{what}: {len(wrong)} of {actual.size} elements differ ({stale} never written); first at {at}: "
            f"{actual[at]} instead of {expected[at]}; "
            f"last at {last}: {actual[last]} instead of {expected[last]}"
        )


def error_bound(value: np.ndarray, magnitude: np.ndarray, terms: np.ndarray | int, dtype: str) -> np.ndarray:
    """4 sqrt(K) 2^-23 (|A||B|) + u |y| + half the smallest number: a float32 sum with one rounding."""
    unit, smallest = {
        "float32": (0.0, 2.0**-150),
        "float16": (2.0**-11, 2.0**-25),
        "bfloat16": (2.0**-8, 2.0**-134),
    }[dtype]
    return 4 * np.sqrt(np.asarray(terms, np.float64)) * 2.0**-23 * magnitude + unit * np.abs(value) + smallest


def worst_ratio(
    actual: np.ndarray, value: np.ndarray, magnitude: np.ndarray, terms: np.ndarray | int, what: object = ""
) -> float:
    """Largest error divided by its own bound, element by element; above 1 is a failure."""
    bound = error_bound(value, magnitude, terms, actual.dtype.name)
    error = np.abs(actual.astype(np.float64) - value)
    assert not np.isnan(error).any(), f"{what}: {int(np.isnan(error).sum())} NaN"
    worst = float((error / bound).max(initial=0.0))
    assert worst <= 1, f"{what}: error is {worst:.3g} times the bound"
    return worst
