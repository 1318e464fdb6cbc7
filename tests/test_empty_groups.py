"""Empty experts, nothing to do at all, tail rows, NaN that must stay where it is."""

import time

import numpy as np
import pytest

import cupy_gmm
from tests import calls, layouts, oracle
from tests.backends import DTYPES, Backend
from tests.calls import Case
from tests.layouts import Groups

C01_SIZES = (162, 0, 2577, 446, 0, 83)


def spread(rows: int, groups: int, used: int) -> Groups:
    """`rows` over the first `used` of `groups` groups, unevenly."""
    sizes = [rows // used] * used
    sizes[-1] += rows - sum(sizes)
    return Groups((*sizes, *[0] * (groups - used)), rows)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_C01_weight_gradient_of_empty_experts(dtype: str, backend: Backend, rng: np.random.Generator) -> None:
    groups = Groups(C01_SIZES, sum(C01_SIZES))
    calls.wgrad(backend, rng, Case(groups, (64, 48), dtype), out_layout=layouts.contiguous)
    calls.wgrad(backend, rng, Case(groups, (64, 48), dtype))


@pytest.mark.gpu
def test_C01_full_size(gpu: Backend, rng: np.random.Generator) -> None:
    groups = Groups(C01_SIZES, sum(C01_SIZES))
    calls.wgrad(gpu, rng, Case(groups, (2048, 768)), out_layout=layouts.contiguous)
    calls.wgrad(gpu, rng, Case(groups, (2048, 768), out_dtype="float32", accumulate=True))


def test_C02_accumulators_start_at_zero(backend: Backend, rng: np.random.Generator) -> None:
    offs = np.array([0, 8, 16, 16, 32], np.int32)
    x, dy = (backend.place(oracle.integers(rng, (32, 16), "bfloat16")) for _ in range(2))
    for _ in range(3):
        backend.dirty_chip()
        dw = backend.get(cupy_gmm.grouped_mm_wgrad(x.array, dy.array, backend.ints(offs)))
        spans = oracle.bounds_of(offs, 32)
        oracle.assert_same_bits(dw, oracle.expected_wgrad(x.values, dy.values, spans, "bfloat16", 5))
        assert not dw[0].any()
        assert not dw[3].any()
        backend.dirty_chip()
        calls.mm(backend, rng, Case(Groups((0, 8, 8, 0, 16), 40), (16, 16)))
        backend.dirty_chip()
        calls.mm(backend, rng, Case(Groups((0, 8, 8, 0, 16), 40), (0, 16)))


def test_C03_counts_of_ones(backend: Backend) -> None:
    ones = backend.place(np.ones((192, 128), DTYPES["bfloat16"]))
    dw = backend.get(cupy_gmm.grouped_mm_wgrad(ones.array, ones.array, backend.ints([0, 128, 128, 192])))
    for group, count in enumerate((0, 128, 0, 64)):
        assert (dw[group].astype(np.float32) == count).all()
    ones.check_untouched()


@pytest.mark.parametrize("rows,k,n", [(0, 4096, 4096), (0, 33, 17), (0, 0, 0), (0, 8, 0), (5, 0, 0), (8, 24, 0)])
def test_C04_zero_extents_of_the_weight_gradient(rows: int, k: int, n: int, backend: Backend) -> None:
    x, dy = (backend.place(np.ones((rows, width), DTYPES["bfloat16"])) for width in (k, n))
    begin = time.monotonic()
    dw = backend.get(cupy_gmm.grouped_mm_wgrad(x.array, dy.array, backend.ints([0, rows])))
    expected = np.zeros((2, k, n), DTYPES["bfloat16"])
    expected[1] = rows
    oracle.assert_same_bits(dw, expected)
    assert time.monotonic() - begin < 30, "hangs, or builds something for a zero extent"


@pytest.mark.parametrize(
    "rows,k,n", [(8, 0, 16), (0, 16, 16), (0, 0, 16), (8, 16, 0), (0, 0, 0), (130, 0, 3), (8, 0, 0)]
)
def test_C04_zero_extents_of_the_product(rows: int, k: int, n: int, backend: Backend) -> None:
    """A sum of nothing is +0, and it is written."""
    x, w = (backend.place(np.ones(shape, DTYPES["bfloat16"])) for shape in ((rows, k), (2, k, n)))
    out = backend.output((rows, n), "bfloat16", layouts.padded(3))
    cupy_gmm.grouped_mm(x.array, w.array, backend.ints([rows // 2, rows]), out=out.array)
    oracle.assert_same_bits(out.read(), np.full((rows, n), k, DTYPES["bfloat16"]))
    out.check_guards()


def test_C04_no_groups_at_all(backend: Backend) -> None:
    x, w = backend.place(np.ones((6, 8), np.float16)), backend.place(np.ones((0, 8, 4), np.float16))
    offs = backend.ints(np.zeros(0, np.int32))
    y = backend.get(cupy_gmm.grouped_mm(x.array, w.array, offs))
    oracle.assert_same_bits(y, np.zeros((6, 4), np.float16))
    assert cupy_gmm.grouped_mm_wgrad(x.array, x.array, offs).shape == (0, 8, 8)


def test_C05_most_experts_unused(backend: Backend, rng: np.random.Generator) -> None:
    for used in (6, 1):
        calls.wgrad(backend, rng, Case(spread(32, 18, used), (64, 43)))
        calls.mm(backend, rng, Case(spread(32, 18, used), (64, 43)))


def test_C07_short_groups_next_to_an_empty_one(backend: Backend, rng: np.random.Generator) -> None:
    for out_dtype in ("bfloat16", "float32"):
        case = Case(Groups((1, 127, 0, 64), 192), (96, 80), out_dtype=out_dtype)
        calls.wgrad(backend, rng, case, out_layout=layouts.contiguous)
        calls.wgrad(backend, rng, case)


@pytest.mark.parametrize("rows", [0, 256])
def test_C08_all_local_experts_empty(rows: int, backend: Backend, rng: np.random.Generator) -> None:
    case = Case(Groups((0,) * 8, rows), (48, 80))
    for w_layout in (layouts.contiguous, layouts.transposed):
        calls.mm(backend, rng, case, w_layout=w_layout)
        calls.mm(backend, rng, Case(case.groups, (80, 48)), w_layout=w_layout, out_layout=layouts.contiguous)
    calls.wgrad(backend, rng, case)
    calls.wgrad(backend, rng, case, out_layout=layouts.transposed)


def test_C09_zero_tokens_do_not_hang(backend: Backend, rng: np.random.Generator) -> None:
    for groups in (Groups((0,) * 64, 1024), Groups((0, 1) * 32, 32), Groups((1, 0) * 32, 40)):
        begin = time.monotonic()
        calls.mm(backend, rng, Case(groups, (64, 72)))
        calls.wgrad(backend, rng, Case(groups, (64, 72)))
        assert time.monotonic() - begin < 60


def test_C10_tail_is_zero_in_recycled_memory(backend: Backend, rng: np.random.Generator) -> None:
    """Ten calls in a row, each into memory that held NaN a moment ago."""
    offs = backend.ints([137, 500, 1000])
    x = backend.place(oracle.integers(rng, (1024, 40), "bfloat16"))
    w = backend.place(oracle.integers(rng, (3, 40, 56), "bfloat16"))
    dy = backend.place(oracle.integers(rng, (1024, 56), "bfloat16"))
    kept = []
    for _ in range(10):
        backend.poison_allocator((1024, 56), "bfloat16")
        kept.append(cupy_gmm.grouped_mm(x.array, w.array, offs))
        backend.poison_allocator((1024, 40), "bfloat16")
        dx = cupy_gmm.grouped_mm(dy.array, w.array.swapaxes(1, 2), offs)
        for result in (kept[-1], dx):
            assert (backend.get(result)[1000:].view(np.uint16) == 0).all()
    assert len({backend.get(y).tobytes() for y in kept}) == 1


def test_C12_nan_rows_stay_in_their_expert(backend: Backend, rng: np.random.Generator) -> None:
    """One NaN row of expert 1, NaN in the tail: the other gradients keep their bits."""
    x, dy = (rng.standard_normal((16, width)).astype(DTYPES["bfloat16"]) for width in (24, 40))
    offs = backend.ints([5, 8, 12])
    clean = backend.get(cupy_gmm.grouped_mm_wgrad(backend.place(x).array, backend.place(dy).array, offs))
    x[6, 10:13], x[12:], dy[12:] = np.nan, np.nan, np.inf
    dw = backend.get(cupy_gmm.grouped_mm_wgrad(backend.place(x).array, backend.place(dy).array, offs))
    assert np.isnan(dw[1, 10:13].astype(np.float32)).all()
    dw[1, 10:13] = clean[1, 10:13]
    oracle.assert_same_bits(dw, clean)


@pytest.mark.parametrize("layout", ["first-axis-fastest", "first-axis-middle"])
@pytest.mark.parametrize("kn", [(40, 72), (64, 64), (29, 23)])
def test_C14_expert_axis_anywhere(layout: str, kn: tuple[int, int], backend: Backend, rng: np.random.Generator) -> None:
    """E as the fastest or the middle axis of w, and of the weight gradient's `out`."""
    case = Case(Groups((17, 0, 66, 3), 90), kn)
    chosen = layouts.LAYOUTS[layout]
    calls.mm(backend, rng, case, w_layout=chosen, out_layout=layouts.padded(5))
    calls.wgrad(backend, rng, case, out_layout=chosen)


def test_C16_skipped_experts_never_give_nan(backend: Backend, rng: np.random.Generator) -> None:
    """Experts outside the window of the weights: their rows read as zeros."""
    case = Case(Groups((9, 70, 0, 33, 5), 121), (72, 40), group_offset=1, local=2)
    calls.mm(backend, rng, case)
    calls.wgrad(backend, rng, case)


@pytest.mark.parametrize("height", layouts.HEIGHTS)
def test_C18_every_element_is_written(height: int, backend: Backend, rng: np.random.Generator) -> None:
    groups = Groups((height + 1, 0, height - 1), 2 * height + 37)
    for kn in ((40, 72), (64, 129)):
        for out_dtype in ("bfloat16", "float32"):
            case = Case(groups, kn, out_dtype=out_dtype)
            calls.mm(backend, rng, case, out_layout=layouts.contiguous)
            calls.mm(backend, rng, case)
            calls.wgrad(backend, rng, case, out_layout=layouts.contiguous)
