"""What must hold between calls, whatever the sizes: Hypothesis draws them, on both backends."""

import dataclasses
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np

import cupy_gmm
from tests import calls, layouts, oracle
from tests.backends import DTYPES, Backend

SIZES = st.one_of(st.sampled_from([0, 0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 129]), st.integers(0, 150))
EXTENT = st.one_of(st.sampled_from([1, 8, 16, 40, 64, 72]), st.integers(1, 90))
SEED = st.integers(0, 2**32 - 1)


@dataclasses.dataclass(frozen=True)
class Drawn:
    """Random normal operands of one problem; every value is a bf16 or fp16 number."""

    sizes: tuple[int, ...]
    tail: int
    k: int
    n: int
    dtype: str
    seed: int

    @property
    def rows(self) -> int:
        return sum(self.sizes) + self.tail

    @property
    def ends(self) -> np.ndarray:
        return np.cumsum(self.sizes).astype(np.int32)

    def operands(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """x (rows, k), w (groups, k, n), dy (rows, n)."""
        rng = np.random.default_rng(self.seed)
        shapes = ((self.rows, self.k), (len(self.sizes), self.k, self.n), (self.rows, self.n))
        x, w, dy = (rng.standard_normal(shape).astype(DTYPES[self.dtype]) for shape in shapes)
        return x, w, dy

    def whole(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rng = np.random.default_rng(self.seed)
        shapes = ((self.rows, self.k), (len(self.sizes), self.k, self.n), (self.rows, self.n))
        x, w, dy = (oracle.integers(rng, shape, self.dtype) for shape in shapes)
        return x, w, dy


problems = st.builds(
    Drawn,
    st.lists(SIZES, min_size=1, max_size=6).map(tuple),
    st.sampled_from([0, 0, 1, 5, 70]),
    EXTENT,
    EXTENT,
    st.sampled_from(["bfloat16", "float16"]),
    SEED,
)


def product(backend: Backend, x: np.ndarray, w: np.ndarray, offs: Any, **options: Any) -> np.ndarray:
    placed = backend.place(x), backend.place(w)
    y = cupy_gmm.grouped_mm(placed[0].array, placed[1].array, backend.ints(offs), **options)
    return backend.get(y)


def gradient(backend: Backend, x: np.ndarray, dy: np.ndarray, offs: Any, **options: Any) -> np.ndarray:
    placed = backend.place(x), backend.place(dy)
    dw = cupy_gmm.grouped_mm_wgrad(placed[0].array, placed[1].array, backend.ints(offs), **options)
    return backend.get(dw)


same = oracle.assert_same_bits


@hypothesis.given(problems, st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=6), st.integers(0, 6))
def test_whole_numbers_under_any_offsets(backend: Backend, drawn: Drawn, wild: list[int], keep: int) -> None:
    """Offsets that are right at first and then anything: the oracle's bits, guard bands untouched."""
    offs = np.array([*drawn.ends[:keep], *wild], np.int64).astype(np.int32)
    case = calls.Case(layouts.Groups(drawn.sizes, drawn.rows), (drawn.k, drawn.n), drawn.dtype, offs=offs)
    rng = np.random.default_rng(drawn.seed)
    calls.mm(backend, rng, case)
    calls.wgrad(backend, rng, case)


@hypothesis.given(problems, st.lists(st.integers(-50, 700), min_size=1, max_size=8))
def test_offsets_and_their_clamped_form_give_the_same_bits(backend: Backend, drawn: Drawn, wild: list[int]) -> None:
    x, _, dy = drawn.operands()
    w = np.random.default_rng(drawn.seed).standard_normal((len(wild), drawn.k, drawn.n)).astype(x.dtype)
    clamped = [end for _, end in oracle.bounds_of(wild, drawn.rows)]
    same(product(backend, x, w, wild), product(backend, x, w, clamped))
    same(gradient(backend, x, dy, wild), gradient(backend, x, dy, clamped))


@hypothesis.given(problems, SEED)
def test_permuting_groups_permutes_results(backend: Backend, drawn: Drawn, seed: int) -> None:
    x, w, dy = drawn.operands()
    order = np.random.default_rng(seed).permutation(len(drawn.sizes))
    starts = drawn.ends - drawn.sizes
    rows = np.concatenate(
        [np.arange(starts[g], drawn.ends[g]) for g in order] + [np.arange(drawn.ends[-1], drawn.rows)]
    ).astype(np.int64)
    ends = np.cumsum(np.array(drawn.sizes)[order])
    same(product(backend, x[rows], w[order], ends), product(backend, x, w, drawn.ends)[rows])
    same(gradient(backend, x[rows], dy[rows], ends), gradient(backend, x, dy, drawn.ends)[order])


@hypothesis.given(problems, st.floats(0, 1), st.integers(0, 5))
def test_splitting_a_group_keeps_bits(backend: Backend, drawn: Drawn, share: float, group: int) -> None:
    """The same weights twice in a row, and a cut anywhere in the group: no row can tell."""
    x, w, _ = drawn.operands()
    group %= len(drawn.sizes)
    cut = drawn.ends[group] - int(share * drawn.sizes[group])
    ends = np.insert(drawn.ends, group, cut)
    split = product(backend, x, np.insert(w, group, w[group], axis=0), ends)
    same(split, product(backend, x, w, drawn.ends))


@hypothesis.given(problems, st.integers(-6, 6), st.sampled_from(["bfloat16", "float32"]))
def test_powers_of_two_scale_exactly(backend: Backend, drawn: Drawn, power: int, out_dtype: str) -> None:
    hypothesis.assume(drawn.dtype == "bfloat16")
    x, w, dy = drawn.operands()
    factor = np.float32(2.0**power)
    scaled = (x.astype(np.float32) * factor).astype(x.dtype)
    for run, other in ((product, w), (gradient, dy)):
        plain = run(backend, x, other, drawn.ends, out_dtype=DTYPES[out_dtype])
        times = run(backend, scaled, other, drawn.ends, out_dtype=DTYPES[out_dtype])
        same(times, (plain.astype(np.float32) * factor).astype(plain.dtype))


@hypothesis.given(problems)
def test_adjoint_identity(backend: Backend, drawn: Drawn) -> None:
    """<dy, x w> = <dy w^T, x> = <x^T dy, w>, exactly, on whole numbers."""
    x, w, dy = drawn.whole()
    exact = {"out_dtype": DTYPES["float32"]}
    y = product(backend, x, w, drawn.ends, **exact)
    dx = product(backend, dy, np.ascontiguousarray(w.swapaxes(1, 2)), drawn.ends, **exact)
    dw = gradient(backend, x, dy, drawn.ends, **exact)
    pairs = ((dy, y), (dx, x), (dw, w))
    sums = {int((a.astype(np.float64) * b.astype(np.float64)).sum()) for a, b in pairs}
    assert len(sums) == 1


@hypothesis.given(problems)
def test_poison_changes_nothing(backend: Backend, drawn: Drawn) -> None:
    """NaN and Inf in the tail and in the weights of empty groups leave every bit as it was."""
    x, w, dy = drawn.operands()
    clean = product(backend, x, w, drawn.ends), gradient(backend, x, dy, drawn.ends)
    used = drawn.ends[-1]
    x[used:], dy[used:] = np.inf, np.nan
    w[np.array(drawn.sizes) == 0] = np.nan
    same(product(backend, x, w, drawn.ends), clean[0])
    same(gradient(backend, x, dy, drawn.ends), clean[1])


@hypothesis.given(problems)
def test_nan_stays_in_its_row_and_in_its_group(backend: Backend, drawn: Drawn) -> None:
    """One NaN in x: one row of y, and row k of one group of the weight gradient."""
    hypothesis.assume(drawn.ends[-1] > 0)
    x, w, dy = drawn.operands()
    clean = product(backend, x, w, drawn.ends), gradient(backend, x, dy, drawn.ends)
    row, column = drawn.seed % int(drawn.ends[-1]), drawn.seed % drawn.k
    group = int(np.searchsorted(drawn.ends, row, side="right"))
    x[row, column] = np.nan
    y, dw = product(backend, x, w, drawn.ends), gradient(backend, x, dy, drawn.ends)
    assert np.isnan(y[row].astype(np.float32)).all()
    assert np.isnan(dw[group, column].astype(np.float32)).all()
    y[row], dw[group, column] = clean[0][row], clean[1][group, column]
    same(y, clean[0])
    same(dw, clean[1])


@hypothesis.given(problems)
def test_groups_sum_to_one_group(backend: Backend, drawn: Drawn) -> None:
    x, _, dy = drawn.whole()
    exact = {"out_dtype": DTYPES["float32"]}
    each = gradient(backend, x, dy, drawn.ends, **exact)
    one = gradient(backend, x, dy, drawn.ends[-1:], **exact)
    same(each.sum(axis=0, keepdims=True), one)


@hypothesis.given(problems, st.integers(0, 6))
def test_accumulating_parts_gives_the_whole(backend: Backend, drawn: Drawn, parts: int) -> None:
    """A gradient of rows in two calls, the second one accumulating, on whole numbers."""
    x, _, dy = drawn.whole()
    cut = drawn.rows * parts // 7
    exact = {"out_dtype": DTYPES["float32"]}
    whole = gradient(backend, x, dy, drawn.ends, **exact)
    first = gradient(backend, x[:cut], dy[:cut], np.minimum(drawn.ends, cut), **exact)
    out = backend.place(first)
    gradient(backend, x[cut:], dy[cut:], np.maximum(drawn.ends - cut, 0), out=out.array, accumulate=True, **exact)
    same(out.read(), whole)
    out.check_guards()


@hypothesis.given(problems, st.integers(0, 5), st.integers(0, 6))
def test_windows_of_groups_tile_the_product(backend: Backend, drawn: Drawn, start: int, length: int) -> None:
    """What three windows of the groups give adds up to the whole, bit for bit: a row is in one of them."""
    x, w, dy = drawn.operands()
    groups = len(drawn.sizes)
    start %= groups
    stop = min(start + length, groups)
    whole, dw = product(backend, x, w, drawn.ends), gradient(backend, x, dy, drawn.ends)
    y = np.zeros_like(whole)
    for low, high in ((0, start), (start, stop), (stop, groups)):
        part = product(backend, x, w[low:high], drawn.ends, group_offset=low)
        begin, end = ([0, *drawn.ends.tolist()][i] for i in (low, high))
        y[begin:end] = part[begin:end]
        assert not part[:begin].any()
        assert not part[end:].any()
        window = gradient(backend, x, dy, drawn.ends, group_offset=low, num_groups=high - low)
        same(window, dw[low:high])
    same(y, whole)


@hypothesis.given(problems)
def test_twice_the_same_bits(backend: Backend, drawn: Drawn) -> None:
    x, w, dy = drawn.operands()
    same(product(backend, x, w, drawn.ends), product(backend, x, w, drawn.ends))
    same(gradient(backend, x, dy, drawn.ends), gradient(backend, x, dy, drawn.ends))


@hypothesis.given(problems, st.sampled_from([1, 2, 17, 33, 128, 257]))
def test_rows_do_not_feel_their_group(backend: Backend, drawn: Drawn, company: int) -> None:
    """Any row, alone, has the bits it has among others."""
    hypothesis.assume(drawn.ends[-1] > 0)
    x, w, _ = drawn.operands()
    row = drawn.seed % int(drawn.ends[-1])
    group = int(np.searchsorted(drawn.ends, row, side="right"))
    among = product(backend, x, w, drawn.ends)[row : row + 1]
    crowd = np.repeat(x[row : row + 1], company, 0)
    crowd[: company - 1] = 3
    same(product(backend, crowd, w[group : group + 1], [company])[-1:], among)
