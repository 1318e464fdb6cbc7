"""Rounding, infinities, subnormals, and random data inside their error bound."""

from collections.abc import Callable

import numpy as np
import pytest

import cupy_gmm
from tests import oracle
from tests.backends import DTYPES, Backend

# Worst error over its bound that was seen, by backend and output type, with some room: a rise is a finding.
RATCHET = {("cpu", "float32"): 0.25}


def product(backend: Backend, x: np.ndarray, w: np.ndarray, out_dtype: str) -> np.ndarray:
    """One group that owns all rows."""
    placed = backend.place(x), backend.place(w[None])
    offs = backend.ints([len(x)])
    y = cupy_gmm.grouped_mm(placed[0].array, placed[1].array, offs, out_dtype=DTYPES[out_dtype])
    return backend.get(y)


def gradient(backend: Backend, x: np.ndarray, dy: np.ndarray, out_dtype: str) -> np.ndarray:
    placed = backend.place(x), backend.place(dy)
    offs = backend.ints([len(x)])
    dw = cupy_gmm.grouped_mm_wgrad(placed[0].array, placed[1].array, offs, out_dtype=DTYPES[out_dtype])
    return backend.get(dw)[0]


@pytest.mark.parametrize("out_dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("spread", ["normal", "wide", "positive"])
def test_random_data(
    spread: str,
    dtype: str,
    out_dtype: str,
    backend: Backend,
    rng: np.random.Generator,
    record_property: Callable[[str, object], None],
) -> None:
    """Every element within its own bound; the worst ratio is logged."""
    sizes = [0, 1, 70, 0, 201, 33]
    offs, rows = np.cumsum(sizes).astype(np.int32), 310
    spans = oracle.bounds_of(offs, rows)
    worst = 0.0
    for k, n in ((1, 5), (67, 37), (264, 136), (1031, 72), (4096, 24)):
        shapes = ((rows, k), (len(sizes), k, n), (rows, n))
        x, w, dy = (_values(rng, shape, spread).astype(DTYPES[dtype]) for shape in shapes)
        kind = DTYPES[out_dtype]
        ends = backend.ints(offs)
        xp, wp, dyp = (backend.place(array).array for array in (x, w, dy))
        y = backend.get(cupy_gmm.grouped_mm(xp, wp, ends, out_dtype=kind))
        dw = backend.get(cupy_gmm.grouped_mm_wgrad(xp, dyp, ends, out_dtype=kind))
        x64, w64, dy64 = (array.astype(np.float64) for array in (x, w, dy))
        for group, (start, end) in enumerate(spans):
            a, b, d = x64[start:end], w64[group], dy64[start:end]
            magnitude = np.abs(a) @ np.abs(b)
            worst = max(worst, oracle.worst_ratio(y[start:end], a @ b, magnitude, k, "forward"))
            magnitude = np.abs(a.T) @ np.abs(d)
            worst = max(worst, oracle.worst_ratio(dw[group], a.T @ d, magnitude, end - start, "gradient"))
    record_property("worst_error_over_bound", worst)
    print(f"worst error over bound: {worst:.4f}")
    assert worst <= RATCHET.get((backend.name, out_dtype), 1.0)


def _values(rng: np.random.Generator, shape: tuple[int, ...], spread: str) -> np.ndarray:
    if spread == "positive":  # nothing cancels: partial sums grow as far as they can
        return rng.random(shape)
    if spread == "wide":  # six binary orders of magnitude
        return rng.standard_normal(shape) * 2.0 ** rng.integers(-3, 4, shape) / 4
    return rng.standard_normal(shape) / 2


def test_C93_subnormal_results_are_kept(backend: Backend) -> None:
    x = np.full((3, 16), 0, DTYPES["bfloat16"])
    x[:, 0] = [2.0**-70, -(2.0**-70), 2.0**-75]
    w = np.zeros((16, 8), DTYPES["bfloat16"])
    w[0] = 2.0**-70
    expected = np.repeat(np.array([2.0**-140, -(2.0**-140), 2.0**-145], np.float32)[:, None], 8, 1)
    oracle.assert_same_bits(product(backend, x, w, "float32"), expected)
    tiny = np.zeros((4, 16), np.float16)
    tiny[:, 0] = [2.0**-24, -(2.0**-24), 2.0**-20, 3 * 2.0**-24]
    one = np.eye(16, 8, dtype=np.float16)
    for out_dtype in ("float16", "float32"):
        expected = np.zeros((4, 8), DTYPES[out_dtype])
        expected[:, 0] = tiny[:, 0]
        oracle.assert_same_bits(product(backend, tiny, one, out_dtype), expected)


@pytest.mark.parametrize(
    "terms,expected",
    [
        ([1, 2.0**-8], 1.0),
        ([1, 3 * 2.0**-8], 1 + 2.0**-6),
        ([1, 2.0**-8, 2.0**-16], 1 + 2.0**-7),
        ([-1, -(2.0**-8)], -1.0),
        ([-1, -3 * 2.0**-8], -1 - 2.0**-6),
    ],
)
def test_C94_nearest_even(terms: list[float], expected: float, backend: Backend) -> None:
    x = np.array([terms] * 5, DTYPES["bfloat16"])
    ones = np.ones((len(terms), 9), DTYPES["bfloat16"])
    assert (product(backend, x, ones, "bfloat16").astype(np.float64) == expected).all()
    assert (gradient(backend, np.ascontiguousarray(x.T), ones, "bfloat16").astype(np.float64) == expected).all()


def test_C94_every_tie_of_fp16_and_bf16(backend: Backend, rng: np.random.Generator) -> None:
    """Sums that fall on, just below and just above the middle of two neighbours, all rounded like NumPy."""
    base = rng.integers(1, 2**8, 300).astype(np.float64) / 2**7
    for dtype, unit in (("bfloat16", 2.0**-8), ("float16", 2.0**-11)):
        for nudge in (0.0, 2.0**-16, -(2.0**-16)):
            x = np.stack([base, np.full(300, unit), np.full(300, nudge)], axis=1).astype(DTYPES["bfloat16"])
            exact = x.astype(np.float64).sum(axis=1)
            assert (exact.astype(np.float32) == exact).all()
            y = product(backend, x, np.ones((3, 2), DTYPES["bfloat16"]), dtype)
            expected = np.repeat(exact.astype(np.float32).astype(DTYPES[dtype])[:, None], 2, 1)
            oracle.assert_same_bits(y, expected)


def test_C94_infinities_and_nan(backend: Backend) -> None:
    """Overflow gives Inf, Inf * 0 a NaN, each in its own element."""
    x = np.zeros((4, 16), DTYPES["bfloat16"])
    x[0, 0], x[1, 1], x[2, 0], x[3, 0] = 3e38, np.inf, 5, -3e38
    w = np.zeros((16, 3), DTYPES["bfloat16"])
    w[0], w[1] = [2, 1, 0], [1, 0, -1]
    for out_dtype in ("float32", "bfloat16"):
        y = product(backend, x, w, out_dtype).astype(np.float64)
        assert y[0, 0] == np.inf
        assert y[3, 0] == -np.inf
        assert np.isfinite(y[[0, 3], 1:]).all()
        assert y[1, 0] == np.inf
        assert np.isnan(y[1, 1])
        assert y[1, 2] == -np.inf
        assert y[2].tolist() == [10, 5, 0]


def test_fp16_overflows_in_the_last_rounding_only(backend: Backend) -> None:
    x, w = np.full((2, 4), 60000, np.float16), np.zeros((4, 3), np.float16)
    w[:, 0], w[:2, 1], w[:2, 2] = 1, [1, -1], [2, -1]
    wide = product(backend, x, w, "float32")
    assert wide[0].tolist() == [240000, 0, 60000]
    narrow = product(backend, x, w, "float16").astype(np.float64)
    assert narrow[0].tolist() == [np.inf, 0, 60000]
    assert product(backend, x, w, "bfloat16")[0, 0] == DTYPES["bfloat16"].type(240000)
