"""The same bits, run after run and whatever else is in the call."""

from typing import Any

import numpy as np
import pytest

import cupy_gmm
from cupy_gmm import _config
from tests import layouts, oracle
from tests.backends import DTYPES, Backend

COMPANY = (1, 2, 17, 33, 128, 257, 1024)


def normal(rng: np.random.Generator, *shape: int, dtype: str = "bfloat16") -> np.ndarray:
    return rng.standard_normal(shape).astype(DTYPES[dtype])


def differing(gpu: Backend, runs: int, call: Any) -> int:
    """Elements of `runs` results that differ from the first one; counted on the device, one wait in all."""
    cupy = gpu.cupy
    first = call().copy()
    word = f"u{first.dtype.itemsize}"
    reference = cupy.ndarray(first.shape, word, first.data)
    total = cupy.zeros((), np.int64)
    for _ in range(runs):
        result = call()
        total += (cupy.ndarray(result.shape, word, result.data) != reference).sum()
    return int(total)


@pytest.mark.gpu
def test_C79_weight_gradient_300_runs(gpu: Backend, rng: np.random.Generator) -> None:
    """The public regression shape, on whole numbers: every run equals the exact result."""
    sizes = [128, 128, 256, 256, 128, 256, 256, 256]
    offs = np.cumsum(sizes).astype(np.int32)
    x, dy = (oracle.integers(rng, (int(offs[-1]), width), "bfloat16") for width in (768, 2048))
    exact = oracle.expected_wgrad(x, dy, oracle.bounds_of(offs, offs[-1]), "bfloat16", len(sizes))
    expected = gpu.place(exact).array
    placed, ends = (gpu.place(x).array, gpu.place(dy).array), gpu.ints(offs)
    assert gpu.same(cupy_gmm.grouped_mm_wgrad(*placed, ends), expected)
    assert differing(gpu, 300, lambda: cupy_gmm.grouped_mm_wgrad(*placed, ends)) == 0
    assert gpu.same(cupy_gmm.grouped_mm_wgrad(*placed, ends), expected)


@pytest.mark.gpu
def test_C81_forward_2000_runs(gpu: Backend, rng: np.random.Generator) -> None:
    """64 experts of uneven size; not one differing element."""
    sizes = rng.integers(0, 130, 64)
    offs = np.cumsum(sizes).astype(np.int32)
    x, w = gpu.place(normal(rng, int(offs[-1]), 512)).array, gpu.place(normal(rng, 64, 512, 384)).array
    schedule = cupy_gmm.make_schedule(gpu.ints(offs), int(offs[-1]))
    assert differing(gpu, 2000, lambda: cupy_gmm.grouped_mm(x, w, schedule)) == 0


@pytest.mark.gpu
def test_C82_tiny_groups_2000_runs(gpu: Backend, rng: np.random.Generator) -> None:
    """Groups of 1 to 3 rows: tiles and pipeline slots turn over as fast as they can."""
    sizes = rng.integers(1, 4, 300)
    offs = np.cumsum(sizes).astype(np.int32)
    rows = int(offs[-1])
    x, w = gpu.place(normal(rng, rows, 136)).array, gpu.place(normal(rng, 300, 136, 264)).array
    dy = gpu.place(normal(rng, rows, 264)).array
    ends = gpu.ints(offs)
    assert differing(gpu, 2000, lambda: cupy_gmm.grouped_mm(x, w, ends)) == 0
    assert differing(gpu, 1000, lambda: cupy_gmm.grouped_mm_wgrad(x, dy, ends)) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("config", sorted(_config.CONFIGS))
def test_C83_every_config_50_runs(config: str, gpu: Backend, rng: np.random.Generator) -> None:
    """Also groups so long that their reduction is cut into pieces."""
    sizes = [3, 0, 5000, 70, 129, 1, 2600]
    offs = np.cumsum(sizes).astype(np.int32)
    rows = int(offs[-1])
    x, dy = gpu.place(normal(rng, rows, 200)).array, gpu.place(normal(rng, rows, 328)).array
    w, ends = gpu.place(normal(rng, len(sizes), 200, 328)).array, gpu.ints(offs)
    if _config.CONFIGS[config].op == "grouped_mm":
        assert differing(gpu, 50, lambda: cupy_gmm.grouped_mm(x, w, ends, config=config)) == 0
    else:
        for dtype in (np.float32, DTYPES["bfloat16"]):
            run = differing(gpu, 50, lambda d=dtype: cupy_gmm.grouped_mm_wgrad(x, dy, ends, config=config, out_dtype=d))
            assert run == 0


@pytest.mark.gpu
def test_C83_accumulation_50_runs(gpu: Backend, rng: np.random.Generator) -> None:
    offs, rows = gpu.ints([400, 400, 9000, 9001]), 9003
    x, dy = gpu.place(normal(rng, rows, 72)).array, gpu.place(normal(rng, rows, 264)).array
    start = gpu.place(normal(rng, 4, 72, 264)).array

    def run() -> Any:
        return cupy_gmm.grouped_mm_wgrad(x, dy, offs, out=start.copy(), accumulate=True)

    assert differing(gpu, 50, run) == 0


def test_C83_twice_on_any_backend(backend: Backend, rng: np.random.Generator) -> None:
    for name, make in layouts.GROUPS.items():
        groups = make(64)
        k, n = (13, 31) if len(groups.sizes) > 200 else (72, 40)
        x, dy = (backend.place(normal(rng, groups.rows, width)).array for width in (k, n))
        w, ends = backend.place(normal(rng, len(groups.sizes), k, n)).array, backend.ints(groups.offs)
        for call in (
            lambda x=x, w=w, ends=ends: cupy_gmm.grouped_mm(x, w, ends),
            lambda x=x, dy=dy, ends=ends: cupy_gmm.grouped_mm_wgrad(x, dy, ends),
        ):
            assert len({backend.get(call()).tobytes() for _ in range(3)}) == 1, name


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("k,n", [(64, 128), (72, 40), (67, 37), (1000, 24), (4096, 136)])
def test_C86_a_row_does_not_feel_its_company(
    k: int, n: int, dtype: str, backend: Backend, rng: np.random.Generator
) -> None:
    """One row in groups of 1 to 1024 rows, first, last and inside, weights of both layouts: the same bits."""
    row = normal(rng, 1, k, dtype=dtype)
    stored = normal(rng, 1, k, n, dtype=dtype)
    w = backend.place(stored).array
    back = backend.place(np.ascontiguousarray(stored.swapaxes(1, 2))).array.swapaxes(1, 2)
    padded = backend.place(stored, layouts.padded_to_16_bytes).array
    for weights in (w, back, padded):
        seen: set[bytes] = set()
        for count in COMPANY:
            for place in {0, count // 2, count - 1}:
                x = normal(rng, count, k, dtype=dtype)
                x[place] = row
                y = cupy_gmm.grouped_mm(backend.place(x).array, weights, backend.ints([count]), out_dtype=np.float32)
                seen.add(backend.get(y)[place].tobytes())
        assert len(seen) == 1


def test_C86_many_groups_beside_it(backend: Backend, rng: np.random.Generator) -> None:
    """All the company sizes in one call, in two orders, and each alone."""
    k, n = 264, 72
    w_one = normal(rng, 1, k, n)
    row = normal(rng, 1, k)
    seen: set[bytes] = set()
    for sizes in (COMPANY, COMPANY[::-1], *([size] for size in COMPANY)):
        ends = np.cumsum(sizes)
        x = normal(rng, int(ends[-1]) + 3, k)
        x[ends - 1] = row
        w = np.repeat(w_one, len(sizes), 0)
        y = cupy_gmm.grouped_mm(
            backend.place(x).array, backend.place(w).array, backend.ints(ends), out_dtype=np.float32
        )
        seen |= {line.tobytes() for line in backend.get(y)[ends - 1]}
    assert len(seen) == 1


@pytest.mark.gpu
def test_C86_bits_do_not_depend_on_the_config(gpu: Backend, rng: np.random.Generator) -> None:
    """All forward configs of a path add K in the same order."""
    offs, rows = gpu.ints([1, 40, 40, 333, 700]), 700
    for k, n in ((64, 128), (200, 328), (1032, 72)):
        x, w = gpu.place(normal(rng, rows, k)).array, gpu.place(normal(rng, 5, k, n)).array
        seen: dict[type, set[bytes]] = {}
        for name, config in _config.CONFIGS.items():
            if config.op == "grouped_mm":
                y = cupy_gmm.grouped_mm(x, w, offs, out_dtype=np.float32, config=name)
                seen.setdefault(type(config), set()).add(gpu.get(y).tobytes())
        assert all(len(results) == 1 for results in seen.values())
