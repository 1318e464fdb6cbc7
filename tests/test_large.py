"""Operands and results past 2^31 elements.

Rows repeat with a prime period, so an index that wraps at a power of two lands on other values, and every
element of a huge result can be compared on the device with a small exact one.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import cupy_gmm
from tests import oracle
from tests.backends import DTYPES, Backend

pytestmark = pytest.mark.gpu

PERIOD = 1021
BF16 = DTYPES["bfloat16"]
CHUNK_ELEMENTS = 2**29


@pytest.fixture(autouse=True)
def _memory_goes_back() -> Iterator[None]:
    import cupy

    cupy.get_default_memory_pool().free_all_blocks()
    yield
    cupy.get_default_memory_pool().free_all_blocks()


def as_bf16(gpu: Backend, halves: Any) -> Any:
    return gpu.cupy.ndarray(halves.shape, BF16, halves.data)


def as_halves(gpu: Backend, array: Any) -> Any:
    return gpu.cupy.ndarray(array.shape, np.uint16, array.data)


def tall(gpu: Backend, block: np.ndarray, rows: int) -> Any:
    """(rows, columns) whose row r is row r % PERIOD of `block`."""
    pattern = gpu.cupy.asarray(block.view(np.uint16))
    whole = rows // PERIOD * PERIOD
    halves = gpu.cupy.empty((rows, block.shape[1]), np.uint16)
    halves[:whole].reshape(-1, *block.shape)[...] = pattern
    halves[whole:] = pattern[: rows - whole]
    return as_bf16(gpu, halves)


def nan(gpu: Backend, shape: tuple[int, ...]) -> Any:
    """An output full of the poison NaN."""
    from tests.backends import POISON

    return as_bf16(gpu, gpu.cupy.full(shape, POISON, np.uint16))


def check_rows(gpu: Backend, y: Any, blocks: list[np.ndarray], bounds: list[int]) -> None:
    """Every element: row r of group g is row r % PERIOD of blocks[g]; rows past the last bound are zeros."""
    halves = as_halves(gpu, y)
    step = max(1, CHUNK_ELEMENTS // y.shape[1])
    for group, block in enumerate(blocks):
        pattern = gpu.cupy.asarray(block.view(np.uint16))
        for first in range(bounds[group], bounds[group + 1], step):
            end = min(first + step, bounds[group + 1])
            expected = pattern[gpu.cupy.arange(first, end) % PERIOD]
            wrong = int((halves[first:end] != expected).sum())
            assert wrong == 0, f"{wrong} elements differ in rows {first} to {end} of group {group}"
    assert not bool(halves[bounds[-1] :].any())


def whole(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return oracle.integers(rng, shape, "bfloat16")


def products(block: np.ndarray, w: np.ndarray) -> list[np.ndarray]:
    """One period of rows through every group's weights."""
    return [oracle.expected_mm(block, w[g : g + 1], [(0, PERIOD)], "bfloat16") for g in range(len(w))]


def test_C27_input_past_2_31(gpu: Backend, rng: np.random.Generator) -> None:
    """x (525312, 4096): product, input gradient (also past 2^31) and weight gradient."""
    rows, k, n, groups = 525312, 4096, 128, 8
    bounds = [0, 70001, 70001, 150007, 250013, 300017, 524277, rows - 1000, rows]
    x_block, dy_block, w = whole(rng, PERIOD, k), whole(rng, PERIOD, n), whole(rng, groups, k, n)
    x, dy, w_device = tall(gpu, x_block, rows), tall(gpu, dy_block, rows), gpu.place(w).array
    schedule = cupy_gmm.make_schedule(gpu.ints(bounds[1:]), rows)

    y = cupy_gmm.grouped_mm(x, w_device, schedule, out=nan(gpu, (rows, n)))
    check_rows(gpu, y, products(x_block, w), bounds)
    dx = cupy_gmm.grouped_mm(dy, w_device.swapaxes(1, 2), schedule, out=nan(gpu, (rows, k)))
    check_rows(gpu, dx, products(dy_block, w.swapaxes(1, 2)), bounds)
    del y, dx

    dw = gpu.get(cupy_gmm.grouped_mm_wgrad(x, dy, schedule, out_dtype=np.float32))
    for g in range(groups):
        used = np.bincount(np.arange(bounds[g], bounds[g + 1]) % PERIOD, minlength=PERIOD).astype(np.float32)
        expected = (x_block.astype(np.float32) * used[:, None]).T @ dy_block.astype(np.float32)
        oracle.assert_same_bits(dw[g], oracle.rounded(expected, "float32"), f"group {g}")


def test_C28_output_past_2_31(gpu: Backend, rng: np.random.Generator) -> None:
    """y (448000, 7168), K = 16: every row, the last one too."""
    rows, k, n = 448000, 16, 7168
    bounds = [0, 224001, 447999, rows]
    block, w = whole(rng, PERIOD, k), whole(rng, 3, k, n)
    out = nan(gpu, (rows, n))
    cupy_gmm.grouped_mm(tall(gpu, block, rows), gpu.place(w).array, gpu.ints(bounds[1:]), out=out)
    check_rows(gpu, out, products(block, w), bounds)


@pytest.mark.parametrize("more", [-1, 0, 1])
@pytest.mark.parametrize("k,n", [(8, 1), (1, 8)])
def test_C33_rows_around_2_31_elements(k: int, n: int, more: int, gpu: Backend, rng: np.random.Generator) -> None:
    """x, or y, of 2^31 - 8, 2^31 and 2^31 + 8 elements; the last row is a tail."""
    rows = 2**28 + more
    bounds = [0, 2**27 + 5, rows - 2, rows - 1]
    block, w = whole(rng, PERIOD, k), whole(rng, 3, k, n)
    out = nan(gpu, (rows, n))
    cupy_gmm.grouped_mm(tall(gpu, block, rows), gpu.place(w).array, gpu.ints(bounds[1:]), out=out)
    check_rows(gpu, out, products(block, w), bounds)


@pytest.mark.parametrize("groups,n", [(15, 17895697), (16, 2**24), (17, 15790321)])
def test_C33_weights_around_2_31_elements(groups: int, n: int, gpu: Backend, rng: np.random.Generator) -> None:
    """w (groups, 8, n) of 2^31 - 8, 2^31 and 2^31 + 8 elements; the first and the last group are used."""
    k, columns = 8, 64
    block = whole(rng, PERIOD, n // 64 + 1)  # columns of w repeat with a period that is no power of two
    period = block.shape[1]
    w = gpu.cupy.full((groups, k, n), 0x7FE5, np.uint16)
    host = {}
    for g in (0, groups - 1):
        host[g] = block[g * k : (g + 1) * k]
        pattern = gpu.cupy.asarray(host[g].view(np.uint16))
        w[g] = pattern[:, gpu.cupy.arange(n) % period]
    x = whole(rng, 5, k)
    ends = gpu.ints([2] * (groups - 1) + [5])
    y = as_halves(gpu, cupy_gmm.grouped_mm(gpu.place(x).array, as_bf16(gpu, w), ends))
    for first in (0, n // 2, n - columns):
        at = np.arange(first, first + columns)
        weights = np.stack([host[0][:, at % period], host[groups - 1][:, at % period]])
        expected = oracle.expected_mm(x, weights, [(0, 2), (2, 5)], "bfloat16")
        actual = gpu.get(y[:, first : first + columns]).view(BF16)
        oracle.assert_same_bits(actual, expected, f"columns from {first}")
    whole_row = gpu.cupy.asarray(
        oracle.expected_mm(x[2:], host[groups - 1][None], [(0, 3)], "bfloat16").view(np.uint16)
    )
    assert bool((y[2:] == whole_row[:, gpu.cupy.arange(n) % period]).all())


@pytest.mark.parametrize("accumulate", [False, True])
def test_weight_gradient_past_2_31(accumulate: bool, gpu: Backend, rng: np.random.Generator) -> None:
    """dw (9, 16384, 16384): the last groups begin past 2^31 elements; one group is empty."""
    groups, k, n = 9, 16384, 16384
    bounds = [0, 7, 20, 20, 37, 50, 61, 74, 80, 96]
    x_block, dy_block = whole(rng, 96, 509), whole(rng, 96, 521)  # columns repeat with prime periods
    x, dy = x_block[:, np.arange(k) % 509], dy_block[:, np.arange(n) % 521]
    out = nan(gpu, (groups, k, n))
    if accumulate:
        as_halves(gpu, out)[...] = 0x3F80  # 1.0
    cupy_gmm.grouped_mm_wgrad(
        gpu.place(x).array, gpu.place(dy).array, gpu.ints(bounds[1:]), out=out, accumulate=accumulate
    )
    halves = as_halves(gpu, out)
    at = (gpu.cupy.arange(k) % 509)[:, None], (gpu.cupy.arange(n) % 521)[None, :]
    for g in range(groups):
        rows = slice(bounds[g], bounds[g + 1])
        exact = x_block[rows].astype(np.float32).T @ dy_block[rows].astype(np.float32)
        block = oracle.rounded(exact + np.float32(accumulate), "bfloat16").view(np.uint16)
        wrong = int((halves[g] != gpu.cupy.asarray(block)[at]).sum())
        assert wrong == 0, f"{wrong} elements of group {g} differ"
