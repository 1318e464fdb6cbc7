"""`cupy_gmm.reference` and the tests' own oracle against slow whole-number loops."""

import itertools
import time

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from cupy_gmm import reference
from tests import layouts, offsets, oracle
from tests.backends import DTYPES, bits
from tests.offsets import Offsets

INT32 = st.integers(-(2**31), 2**31 - 1)
ROWS = st.integers(0, 40)


@st.composite
def ends(draw: st.DrawFn) -> tuple[list[int], int]:
    """Any offsets, half of the time well formed, and the rows."""
    rows = draw(ROWS)
    near = st.integers(-3, rows + 3)
    offs = draw(st.lists(st.one_of(near, near, INT32), min_size=1, max_size=7))
    return (sorted(min(max(o, 0), rows) for o in offs) if draw(st.booleans()) else offs), rows


def slow_bounds(offs: list[int], rows: int) -> list[int]:
    """The contract, word by word: end_g = min(rows, max(0, offs[0], ..., offs[g]))."""
    return [0] + [min(rows, max([0, *offs[: g + 1]])) for g in range(len(offs))]


def slow_mm(x: list[list[int]], w: list[list[list[int]]], bounds: list[int], n: int, offset: int) -> list[list[int]]:
    y = [[0] * n for _ in x]
    for g in range(len(bounds) - 1):
        for row in range(bounds[g], bounds[g + 1]):
            if 0 <= g - offset < len(w):
                for column in range(n):
                    y[row][column] = sum(a * w[g - offset][k][column] for k, a in enumerate(x[row]))
    return y


def whole(array: np.ndarray) -> list:
    return array.astype(np.int64).tolist()


@pytest.mark.parametrize("given", offsets.ALL, ids=str)
def test_bounds_and_status_of_the_fixture(given: Offsets) -> None:
    assert reference.clamp_offsets(np.array(given.offs, np.int32), given.rows).tolist() == given.bounds
    assert reference.status(np.array(given.offs, np.int32), given.rows) == given.status
    assert slow_bounds(given.offs, given.rows) == given.bounds
    spans = oracle.bounds_of(given.offs, given.rows)
    assert spans == list(zip(given.bounds[:-1], given.bounds[1:], strict=True))


@hypothesis.given(ends(), st.sampled_from([np.int32, np.int64]))
@hypothesis.settings(max_examples=300)
def test_clamp_is_the_contract(given: tuple[list[int], int], kind: type) -> None:
    offs, rows = given
    bounds = reference.clamp_offsets(np.array(offs, kind), rows)
    assert bounds.tolist() == slow_bounds(offs, rows)
    assert (np.diff(bounds) >= 0).all()
    assert 0 <= bounds[-1] <= rows
    assert reference.clamp_offsets(bounds[1:], rows).tolist() == bounds.tolist()
    assert reference.status(bounds[1:], rows) == 0
    flags = reference.status(np.array(offs, kind), rows)
    assert bool(flags & 1) == (min(offs) < 0)
    assert bool(flags & 4) == (max(offs) > rows)
    assert bool(flags & 2) == any(b < a for a, b in itertools.pairwise(offs))


def test_clamp_takes_int64_before_it_narrows() -> None:
    offs = np.array([2**32 + 5, -(2**40), 2**62], np.int64)
    assert reference.clamp_offsets(offs, 9).tolist() == [0, 9, 9, 9]
    assert reference.clamp_offsets(np.array([], np.int32), 9).tolist() == [0]


@hypothesis.given(
    ends(),
    st.integers(0, 9),
    st.integers(0, 9),
    st.integers(-2, 3),
    st.integers(0, 6),
    st.integers(0, 2**32 - 1),
)
@hypothesis.settings(max_examples=200)
def test_forward_against_whole_numbers(
    given: tuple[list[int], int], k: int, n: int, offset: int, local: int, seed: int
) -> None:
    """The oracle, the reference and plain Python integers agree; NaN in unused places reaches nothing."""
    offs, rows = given
    rng = np.random.default_rng(seed)
    bounds = slow_bounds(offs, rows)
    spans = oracle.bounds_of(offs, rows)
    for dtype in ("bfloat16", "float16"):
        x, w = oracle.integers(rng, (rows, k), dtype), oracle.integers(rng, (local, k, n), dtype)
        truth = np.array(slow_mm(whole(x), whole(w), bounds, n, offset), np.float64).reshape(rows, n)
        sizes = np.array(slow_mm(whole(abs(x)), whole(abs(w)), bounds, n, offset), np.float64).reshape(rows, n)
        expected = truth.astype(DTYPES[dtype])
        oracle.assert_same_bits(oracle.expected_mm(x, w, spans, dtype, offset), expected, "oracle")
        value, magnitude = reference.exact64(x, w, np.array(bounds), offset)
        assert (value == truth).all()
        assert (magnitude == sizes).all()
        used = np.zeros(rows, bool)
        for index in range(local):
            start, end = spans[index + offset] if 0 <= index + offset < len(spans) else (0, 0)
            used[start:end] = True
            if start == end:
                w[index] = np.nan
        x[~used] = np.inf
        y = np.full((rows, n), np.nan, DTYPES[dtype])
        reference.grouped_mm(x, w, np.array(bounds), y, offset)
        oracle.assert_same_bits(y, expected, "reference")


@hypothesis.given(
    ends(),
    st.integers(0, 7),
    st.integers(0, 7),
    st.integers(-2, 3),
    st.integers(0, 6),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
@hypothesis.settings(max_examples=200)
def test_weight_gradient_against_whole_numbers(
    given: tuple[list[int], int], k: int, n: int, offset: int, local: int, accumulate: bool, seed: int
) -> None:
    offs, rows = given
    rng = np.random.default_rng(seed)
    bounds = slow_bounds(offs, rows)
    x, dy = oracle.integers(rng, (rows, k), "bfloat16"), oracle.integers(rng, (rows, n), "bfloat16")
    before = oracle.integers(rng, (local, k, n), "float16")
    truth, sizes = np.zeros((2, local, k, n), np.int64)
    a, b = np.array(whole(x), np.int64).reshape(rows, k), np.array(whole(dy), np.int64).reshape(rows, n)
    for index in range(local):
        group = index + offset
        for row in range(bounds[group], bounds[group + 1]) if 0 <= group < len(offs) else ():
            truth[index] += np.multiply.outer(a[row], b[row])
            sizes[index] += np.multiply.outer(abs(a[row]), abs(b[row]))
    expected = (truth + (before.astype(np.int64) if accumulate else 0)).astype(np.float16)
    value, magnitude = reference.exact64_wgrad(x, dy, np.array(bounds), local, offset)
    assert (value == truth).all()
    assert (magnitude == sizes).all()
    x[bounds[-1] :], dy[bounds[-1] :] = np.nan, np.inf
    spans = oracle.bounds_of(offs, rows)
    mine = oracle.expected_wgrad(x, dy, spans, "float16", local, offset, before if accumulate else None)
    oracle.assert_same_bits(mine, expected, "oracle")
    out = before.copy() if accumulate else np.full(before.shape, np.nan, np.float16)
    reference.grouped_mm_wgrad(x, dy, np.array(bounds), out, accumulate, offset)
    oracle.assert_same_bits(out, expected, "reference")


@pytest.mark.parametrize("layout", layouts.LAYOUTS)
def test_out_of_any_strides(layout: str, rng: np.random.Generator) -> None:
    """Written in place, and nothing between its elements."""
    where = layouts.LAYOUTS[layout]((9, 5))
    flat = np.full(where.span + 8, 77, np.float16)
    out = np.ndarray((9, 5), np.float16, flat.data, where.first * 2, tuple(s * 2 for s in where.strides))
    x, w = oracle.integers(rng, (9, 3), "float16"), oracle.integers(rng, (2, 3, 5), "float16")
    reference.grouped_mm(x, w, np.array([0, 4, 8]), out)
    oracle.assert_same_bits(np.ascontiguousarray(out), oracle.expected_mm(x, w, [(0, 4), (4, 8)], "float16"))
    out[...] = 77
    assert (flat == 77).all()


def test_empty_accumulated_groups_keep_their_bytes() -> None:
    blank = np.full((2, 3, 4), 0x7FA5, np.uint16).view(np.float16)
    out = blank.copy()
    reference.grouped_mm_wgrad(np.ones((5, 3), np.float16), np.ones((5, 4), np.float16), np.array([0, 0, 0]), out, True)
    assert (bits(out) == 0x7FA5).all()


def test_zeros_are_positive() -> None:
    """Rows of products that are all -0, and rows that no group owns."""
    x, w = np.full((40, 1), -1, np.float16), np.zeros((1, 1, 6), np.float16)
    for k in (1, 2, 17):
        y = np.empty((40, 6), np.float32)
        reference.grouped_mm(np.repeat(x, k, 1), np.repeat(w, k, 1), np.array([0, 33]), y)
        assert (bits(y) == 0).all()
        dw = np.empty((1, k, 6), np.float32)
        reference.grouped_mm_wgrad(np.repeat(x, k, 1), np.zeros((40, 6), np.float16), np.array([0, 1]), dw)
        assert (bits(dw) == 0).all()


Shape = tuple[int, int, int, bool]  # height, split, granule, by height


def slow_blocks(bounds: list[int], rows: int, offset: int, local: int, shape: Shape) -> list[list[int]]:
    """One granule after the other, dealt to the blocks of its group."""
    height, split, granule, by_height = shape
    dealt = {}
    for g in range(len(bounds) - 1):
        length = bounds[g + 1] - bounds[g]
        lengths = [0] * -(-length // (split if length > height else height))
        for unit in range(-(-length // granule)):
            lengths[unit % len(lengths)] += granule
        dealt[g] = lengths
    walked = list(dealt)
    if by_height:
        sizes = [end - start for start, end in itertools.pairwise(bounds)]
        walked.sort(key=sizes.__getitem__, reverse=True)
        walked.sort(key=lambda g: max(dealt[g], default=0), reverse=True)
        walked.sort(key=lambda g: sizes[g] * sum(size > 0 for size in sizes) < sum(sizes))
    blocks = []
    for g in walked:
        start, end, lengths = bounds[g], bounds[g + 1], dealt[g]
        owner = g - offset if 0 <= g - offset < local else -1
        for length in lengths:
            last = min(start + length, end)
            blocks.append([owner, start, last, length])
            start = last
    for start in range(bounds[-1], rows, height):
        last = min(start + height, rows)
        blocks.append([-1, start, last, -(-(last - start) // granule) * granule])
    return blocks


@hypothesis.given(
    ends(),
    st.integers(-2, 5),
    st.sampled_from([None, 0, 1, 3]),
    st.sampled_from([(16, 16, 16), (64, 64, 16), (64, 48, 16), (4, 4, 1), (5, 3, 1), (24, 16, 8)]),
    st.booleans(),
    st.integers(1, 60),
)
@hypothesis.settings(max_examples=300)
def test_schedule_table(
    given: tuple[list[int], int],
    offset: int,
    local: int | None,
    extents: tuple[int, int, int],
    by_height: bool,
    scale: int,
) -> None:
    """Header, bounds and order as documented; the blocks are those of a slow loop."""
    offs, rows = [o * scale for o in given[0]], given[1] * scale
    offs = [min(max(o, -(2**31)), 2**31 - 1) for o in offs]
    height, split, granule = extents
    table = reference.schedule(np.array(offs, np.int32), rows, offset, local, *extents, by_height)
    groups, bounds = len(offs), slow_bounds(offs, rows)
    flags = reference.status(np.array(offs), rows)
    assert table.dtype == np.int32
    assert table[1:8].tolist() == [flags, bounds[-1], offset, groups, rows, height, granule]
    assert not table[10 : reference.HEADER_WORDS].any()
    at = reference.HEADER_WORDS
    assert table[at : at + groups + 1].tolist() == bounds
    lengths = np.diff(bounds)
    order = sorted(range(groups), key=lambda g: (-lengths[g], g))
    assert table[at + groups + 1 : at + 2 * groups + 1].tolist() == order
    first = at + -(-(2 * groups + 1) // 4) * 4
    assert (len(table) - first) // 4 == reference.capacity(rows, groups, split)
    blocks = table[first:].reshape(-1, 4)
    expected = slow_blocks(bounds, rows, offset, 2**31 - 1 if local is None else local, (*extents, by_height))
    assert blocks[: table[0]].tolist() == expected
    assert table[0] <= reference.capacity(rows, groups, split)
    check_blocks(blocks[: table[0]], rows, height, granule)
    check_long_blocks(table, lengths, expected, by_height)


def check_long_blocks(table: np.ndarray, lengths: np.ndarray, blocks: list[list[int]], by_height: bool) -> None:
    """How many blocks belong to groups no shorter than the mean, and that every prefix can have its share of them."""
    ends = np.cumsum(lengths)
    rows_of_groups = int(ends[-1]) if len(ends) else 0
    owners = [int(np.searchsorted(ends, first, side="right")) for _, first, _, _ in blocks if first < rows_of_groups]
    used = int(np.count_nonzero(lengths))
    long = sum(1 for owner in owners if not by_height or lengths[owner] * used >= rows_of_groups)
    assert table[8] == long
    share = int(table[9:10].view(np.uint32)[0])
    if long == len(blocks):
        assert share == 0
        return
    handed = [strip * share >> 32 for strip in range(3 * len(blocks) + 1)]
    assert handed[:: len(blocks)] == [0, long, 2 * long, 3 * long]
    assert set(np.diff(handed)) <= {0, 1}


def check_blocks(blocks: np.ndarray, rows: int, height: int, granule: int) -> None:
    """They cover every row once; none is empty or longer than `height`."""
    first, end, n = blocks[np.argsort(blocks[:, 1]), 1:].T
    assert (first[1:] == end[:-1]).all()
    assert len(blocks) == 0 or (first[0] == 0 and end[-1] == rows)
    assert (end > first).all()
    assert (end - first <= n).all()
    assert (n <= height).all()
    assert (n % granule == 0).all()
    assert (n - (end - first) < granule).all()


def test_schedule_of_many_groups_is_fast(rng: np.random.Generator) -> None:
    offs = np.sort(rng.integers(0, 65537, 8192)).astype(np.int32)
    begin = time.perf_counter()
    table = reference.schedule(offs, 65536, 0, None, 256, 208, 16, True)
    assert time.perf_counter() - begin < 0.5
    first = reference.HEADER_WORDS + -(-(2 * 8192 + 1) // 4) * 4
    check_blocks(table[first:].reshape(-1, 4)[: table[0]], 65536, 256, 16)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_error_bound_of_random_data(dtype: str, rng: np.random.Generator) -> None:
    """Random data stay inside the bound; one rounding more, or one row off, does not."""
    x = rng.standard_normal((60, 301)).astype(DTYPES["bfloat16"])
    w = rng.standard_normal((3, 301, 23)).astype(DTYPES["bfloat16"])
    bounds = np.array([0, 20, 20, 55])
    y = np.empty((60, 23), DTYPES[dtype])
    reference.grouped_mm(x, w, bounds, y)
    value, magnitude = reference.exact64(x, w, bounds)
    assert 0 < oracle.worst_ratio(y, value, magnitude, 301) <= 1
    bound = reference.error_bound(value, magnitude, 301, dtype)
    assert (bound == oracle.error_bound(value, magnitude, 301, dtype)).all()
    assert (np.abs(y.astype(np.float64) - value) <= bound).all()
    swapped = y.copy()
    swapped[[3, 4]] = y[[4, 3]]
    with pytest.raises(AssertionError, match="times the bound"):
        oracle.worst_ratio(swapped, value, magnitude, 301)
    halves = sum(
        (x[:20, part].astype(np.float32) @ w[0][part].astype(np.float32)).astype(DTYPES["bfloat16"]).astype(np.float32)
        for part in (slice(0, 150), slice(150, 301))
    )
    with pytest.raises(AssertionError, match="times the bound"):
        oracle.worst_ratio(halves.astype(DTYPES[dtype]), value[:20], magnitude[:20], 301)


def test_error_bound_in_figures() -> None:
    value, magnitude = np.array([-2.0]), np.array([3.0])
    sums = 4 * 4 * 2.0**-23 * 3
    for dtype, rounding in (("float32", 0.0), ("float16", 2.0**-10), ("bfloat16", 2.0**-7)):
        bound = reference.error_bound(value, magnitude, 16, dtype)
        np.testing.assert_allclose(bound, sums + rounding, rtol=1e-4)
    for dtype, least in (("float16", 2.0**-25), ("bfloat16", 2.0**-134)):
        assert reference.error_bound(0 * value, 0 * magnitude, 16, dtype) == [least]


def test_products_are_summed_in_float32() -> None:
    """4095 products of 1 + 2^-7 and 1: a bf16 sum would stop growing at 256, an fp16 one would be rounded."""
    for dtype in ("bfloat16", "float16"):
        x, w = np.full((3, 4095), 1 + 2.0**-7, DTYPES[dtype]), np.ones((1, 4095, 2), DTYPES[dtype])
        y = np.empty((3, 2), np.float32)
        reference.grouped_mm(x, w, np.array([0, 3]), y)
        assert (y == 4095 * 129 / 128).all()
        dw = np.empty((1, 3, 2), np.float32)
        dy = np.ascontiguousarray(w[0])
        reference.grouped_mm_wgrad(np.ascontiguousarray(x.T), dy, np.array([0, 4095]), dw)
        assert (dw == 4095 * 129 / 128).all()
