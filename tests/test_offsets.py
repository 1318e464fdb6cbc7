"""What offsets mean, and offsets that mean nothing."""

import re

import numpy as np
import pytest

import cupy_gmm
from tests import calls, layouts, offsets, oracle
from tests.backends import Backend
from tests.calls import Case
from tests.layouts import Groups
from tests.offsets import Offsets


def with_offsets(rows: int, offs: list[int], kn: tuple[int, int], dtype: str = "bfloat16") -> Case:
    return Case(Groups((), rows), kn, dtype, offs=np.array(offs, np.int32))


def test_C19_sizes_instead_of_offsets(backend: Backend, rng: np.random.Generator) -> None:
    """Group 0 gets 64 rows, the other groups none; no fault."""
    case = with_offsets(1024, [64] * 16, (64, 64))
    calls.mm(backend, rng, case)
    calls.wgrad(backend, rng, case)
    assert re.search(r"offs_from_sizes|cumsum", cupy_gmm.grouped_mm.__doc__ or "")


def test_C19_offs_from_sizes(backend: Backend) -> None:
    for sizes in ([3, 0, 5], [0], [7], [0, 0, 0, 1], list(range(300))):
        for dtype in ("int32", "int64"):
            ends = backend.get(cupy_gmm.offs_from_sizes(backend.ints(sizes, dtype)))
            assert ends.tolist() == np.cumsum(sizes).tolist()
            assert ends.dtype.kind == "i"


def test_C20_the_last_offset_may_equal_the_rows(backend: Backend, rng: np.random.Generator) -> None:
    for offs in ([3, 5], [3, 4]):
        calls.mm(backend, rng, with_offsets(5, offs, (24, 40)))
        calls.wgrad(backend, rng, with_offsets(5, offs, (24, 40)))
    x, w = (backend.place(np.ones(shape, np.float16)) for shape in ((5, 8), (2, 8, 3)))
    full, short = (backend.get(cupy_gmm.grouped_mm(x.array, w.array, backend.ints(o))) for o in ([3, 5], [3, 4]))
    assert (full == 8).all()
    assert (short[:4] == 8).all()
    assert (short[4] == 0).all()


@pytest.mark.parametrize("given", offsets.ALL, ids=str)
def test_C21_any_offsets_are_safe(given: Offsets, backend: Backend, rng: np.random.Generator) -> None:
    """The same bits as the effective offsets give, and 4 KiB around every buffer untouched."""
    case = with_offsets(given.rows, given.offs, (40, 56))
    calls.mm(backend, rng, case)
    calls.mm(backend, rng, case, out_layout=layouts.padded(3), w_layout=layouts.transposed)
    calls.wgrad(backend, rng, case, out_layout=layouts.padded(3))
    calls.wgrad(backend, rng, Case(case.groups, case.kn, offs=case.offs, accumulate=True))
    x = backend.place(rng.standard_normal((given.rows, 40)).astype(np.float16))
    w = backend.place(rng.standard_normal((len(given.offs), 40, 56)).astype(np.float16))
    ys = [
        backend.get(cupy_gmm.grouped_mm(x.array, w.array, backend.ints(offs)))
        for offs in (given.offs, given.bounds[1:])
    ]
    oracle.assert_same_bits(ys[0], ys[1])


def test_C21_many_groups_of_noise(backend: Backend, rng: np.random.Generator) -> None:
    for count in (33, 257, 2048):
        noise = rng.integers(-(2**31), 2**31, count)
        near = rng.integers(-20, 400, count)
        offs = np.where(rng.random(count) < 0.2, noise, near)
        calls.mm(backend, rng, with_offsets(333, offs.tolist(), (16, 8)))
        calls.wgrad(backend, rng, with_offsets(333, offs.tolist(), (16, 8)))


@pytest.mark.parametrize("w_layout", ["contiguous", "transposed"])
def test_C22_offset_bytes_off_16(w_layout: str, backend: Backend, rng: np.random.Generator) -> None:
    """Sizes [5, 7, 9, 11] with rows of 48 and 80 bytes; afterwards the process can still compute."""
    groups = Groups((5, 7, 9, 11), 32)
    for kn in ((24, 40), (40, 24)):
        calls.mm(backend, rng, Case(groups, kn), w_layout=layouts.LAYOUTS[w_layout])
        calls.wgrad(backend, rng, Case(groups, kn))
    backend.synchronize()
    calls.mm(backend, rng, Case(Groups((1,), 1), (1, 1)))


@pytest.mark.parametrize("given", offsets.ALL, ids=str)
def test_C24_schedule_of_the_fixture(given: Offsets, backend: Backend, rng: np.random.Generator) -> None:
    """Offsets and a schedule made from them give the same bits, forward and backward."""
    offs = backend.ints(given.offs)
    x = backend.place(rng.standard_normal((given.rows, 24)).astype(np.float16))
    dy = backend.place(rng.standard_normal((given.rows, 40)).astype(np.float16))
    w = backend.place(rng.standard_normal((len(given.offs), 24, 40)).astype(np.float16))
    schedule = cupy_gmm.make_schedule(offs, given.rows)
    for direct, shared in (
        (cupy_gmm.grouped_mm(x.array, w.array, offs), cupy_gmm.grouped_mm(x.array, w.array, schedule)),
        (
            cupy_gmm.grouped_mm_wgrad(x.array, dy.array, offs),
            cupy_gmm.grouped_mm_wgrad(x.array, dy.array, schedule),
        ),
    ):
        oracle.assert_same_bits(backend.get(direct), backend.get(shared))


@pytest.mark.parametrize("count", [1023, 1024, 1025, 4096])
def test_C26_many_groups(count: int, backend: Backend, rng: np.random.Generator) -> None:
    chosen = np.zeros(count, int)
    chosen[rng.permutation(count)[:147]] = 1
    for sizes in (chosen, chosen[::-1]):
        groups = Groups(tuple(sizes.tolist()), 147)
        calls.mm(backend, rng, Case(groups, (32, 32)))
        calls.wgrad(backend, rng, Case(groups, (32, 32)))
