"""`permute`, `combine` and their gradients where only a GPU can tell: large arrays, many runs, graphs."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import cupy_gmm
from tests import backends, oracle, routes
from tests.backends import DTYPES, Backend

pytestmark = pytest.mark.gpu

BF16 = DTYPES["bfloat16"]
PERIOD = 1021  # rows repeat with a prime period: an index that wraps at a power of two finds other values


@pytest.fixture(autouse=True)
def _memory_goes_back() -> Iterator[None]:
    import cupy

    cupy.get_default_memory_pool().free_all_blocks()
    yield
    cupy.get_default_memory_pool().free_all_blocks()


def tall(gpu: Backend, block: np.ndarray, rows: int) -> Any:
    """(rows, columns) whose row r is row r % PERIOD of `block`."""
    halfwords = gpu.cupy.empty((rows, block.shape[1]), np.uint16)
    whole = rows // PERIOD * PERIOD
    halfwords[:whole].reshape(-1, *block.shape)[...] = gpu.cupy.asarray(block.view(np.uint16))
    halfwords[whole:] = halfwords[: rows - whole]
    return gpu.cupy.ndarray(halfwords.shape, BF16, halfwords.data)


def differing(gpu: Backend, y: Any, block: np.ndarray, wanted: Any) -> int:
    """Elements of y that are not row `wanted[r]` of `block`; row -1 is zeros. In pieces, on the device."""
    cupy = gpu.cupy
    table = cupy.asarray(np.concatenate([block.view(np.uint16), np.zeros((1, block.shape[1]), np.uint16)]))
    halfwords = cupy.ndarray(y.shape, np.uint16, y.data)
    total = cupy.zeros((), np.int64)
    for first in range(0, len(y), 2**15):
        piece = slice(first, first + 2**15)
        total += (halfwords[piece] != table[wanted[piece]]).sum()
    return int(total)


@pytest.mark.parametrize("slots", [1, 8])
def test_C32_past_2_to_31_elements(slots: int, gpu: Backend, rng: np.random.Generator) -> None:
    """320000 assignments of 7168 columns, ids with -1: every element of all four calls."""
    cupy, width, assignments = gpu.cupy, 7168, 320000
    tokens = assignments // slots
    block = oracle.integers(rng, (PERIOD, width), "bfloat16")
    x = tall(gpu, block, tokens)
    ids = rng.integers(-1, 64, (tokens, slots)).astype(np.int32)
    ids[-1, -1] = 63  # the last token's row is the last live one
    routing = cupy_gmm.route(cupy.asarray(ids), 64)
    used = int(routing.offs[-1])
    token = routing.order // slots
    wanted = cupy.where(cupy.arange(assignments) < used, token % PERIOD, -1)
    y = cupy_gmm.permute(x, routing)
    assert differing(gpu, y, block, wanted) == 0
    assert gpu.get(y[used - 1]).tobytes() == block[(tokens - 1) % PERIOD].tobytes()

    # Dyadic weights that add up to one over live slots: the combination is the token's row again.
    live = cupy.asarray((ids >= 0).astype(np.float32))
    first = (cupy.cumsum(live, axis=1) == 1) * live
    weights = first.astype(np.float32)
    alive = cupy.where(live.any(axis=1), cupy.arange(tokens) % PERIOD, -1)
    back = cupy_gmm.combine(y, routing, weights)
    assert differing(gpu, back, block, alive) == 0
    if slots == 1:
        assert differing(gpu, cupy_gmm.permute_backward(y, routing), block, alive) == 0
    del back

    d_y, d_weights = cupy_gmm.combine_backward(x, y, routing, cupy.ones((tokens, slots), np.float32))
    assert differing(gpu, d_y, block, wanted) == 0
    squares = cupy.asarray((block.astype(np.float32) ** 2).sum(axis=1))
    assert bool((d_weights == squares[cupy.arange(tokens) % PERIOD][:, None] * live).all())


def test_C84_40_runs_give_one_hash(gpu: Backend, rng: np.random.Generator) -> None:
    """512 tokens, top 8; each call of the layer's routing."""
    plain = routes.route(rng.integers(0, 64, (512, 8)).astype(np.int32), 64)
    routing = plain.on(gpu)
    x, dy = (gpu.place(routes.normal(rng, (512, 1024), "bfloat16")).array for _ in range(2))
    y = gpu.place(routes.normal(rng, (4096, 1024), "bfloat16")).array
    weights = gpu.place(routes.normal(rng, (512, 8), "float32")).array
    calls = {
        "permute": lambda: (cupy_gmm.permute(x, routing),),
        "permute_backward": lambda: (cupy_gmm.permute_backward(y, routing),),
        "combine": lambda: (cupy_gmm.combine(y, routing, weights),),
        "combine_backward": lambda: cupy_gmm.combine_backward(dy, y, routing, weights),
    }
    for name, call in calls.items():
        runs = {b"".join(gpu.get(a).tobytes() for a in call()) for _ in range(40)}
        assert len(runs) == 1, f"{name}: {len(runs)} different results"


@pytest.mark.parametrize("tokens, width", [(3, 4096), (40, 7168), (2000, 4096), (9000, 264), (5000, 1)])
def test_launch_shapes(tokens: int, width: int, gpu: Backend, rng: np.random.Generator) -> None:
    """Few rows spread over many blocks and many rows on few threads each: the CPU's bits."""
    ids = routes.ids_of(rng, tokens, 4, 16)
    x, weights = routes.normal(rng, (tokens, width), "bfloat16"), routes.normal(rng, (tokens, 4), "float32")
    here, there = cupy_gmm.route(ids, 16), cupy_gmm.route(gpu.ints(ids), 16)
    y = cupy_gmm.permute(x, here)
    placed = gpu.place(y).array
    oracle.assert_same_bits(gpu.get(cupy_gmm.permute(gpu.place(x).array, there)), y, "permute")
    given = gpu.place(weights).array
    oracle.assert_same_bits(
        gpu.get(cupy_gmm.combine(placed, there, given)), cupy_gmm.combine(y, here, weights), "combine"
    )
    oracle.assert_same_bits(
        gpu.get(cupy_gmm.permute_backward(placed, there)), cupy_gmm.permute_backward(y, here), "backward"
    )
    d_y, _ = cupy_gmm.combine_backward(gpu.place(x).array, placed, there, given)
    oracle.assert_same_bits(gpu.get(d_y), cupy_gmm.combine_backward(x, y, here, weights)[0], "d_y")


def test_side_stream_and_graph(gpu: Backend, rng: np.random.Generator) -> None:
    """Captured on a side stream with `out=`, replayed with other rows and another routing."""
    cupy = gpu.cupy
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        ids = cupy.asarray(routes.ids_of(rng, 70, 3, 8))
        x = gpu.place(routes.normal(rng, (70, 136), "float16")).array
        weights = gpu.place(routes.normal(rng, (70, 3), "float32")).array
        routing = cupy_gmm.route(ids, 8)
        y, out = (
            cupy_gmm.permute(x, routing),
            cupy_gmm.combine(cupy_gmm.permute(x, routing), routing, weights),
        )
        grads = cupy_gmm.combine_backward(x, y, routing, weights)
        dx = cupy_gmm.permute_backward(grads[0], routing)
        stream.begin_capture()
        cupy_gmm.route(ids, 8, out=routing)
        cupy_gmm.permute(x, routing, out=y)
        cupy_gmm.combine(y, routing, weights, out=out)
        cupy_gmm.combine_backward(x, y, routing, weights, out=grads)
        cupy_gmm.permute_backward(grads[0], routing, out=dx)
        graph = stream.end_capture()
        for _ in range(4):
            given, rows = routes.ids_of(rng, 70, 3, 8), routes.normal(rng, (70, 136), "float16")
            ids.set(given)
            x.set(rows)
            for array in (y, out, grads[0], dx):
                cupy.ndarray(array.shape, np.uint16, array.data).fill(backends.POISON)
            graph.launch(stream)
            stream.synchronize()
            here = cupy_gmm.route(given, 8)
            gathered = cupy_gmm.permute(rows, here)
            rates = gpu.get(weights)
            d_y = cupy_gmm.combine_backward(rows, gathered, here, rates)[0]
            oracle.assert_same_bits(gpu.get(y), gathered, "permute")
            oracle.assert_same_bits(gpu.get(out), cupy_gmm.combine(gathered, here, rates), "combine")
            oracle.assert_same_bits(gpu.get(grads[0]), d_y, "combine_backward")
            oracle.assert_same_bits(gpu.get(dx), cupy_gmm.permute_backward(d_y, here), "permute_backward")


def test_capture_without_out_is_a_sentence(gpu: Backend, rng: np.random.Generator) -> None:
    stream = gpu.cupy.cuda.Stream(non_blocking=True)
    with stream:
        ids = gpu.cupy.asarray(routes.ids_of(rng, 7, 3, 8))
        cupy_gmm.route(ids, 8)
        stream.begin_capture()
        with pytest.raises(cupy_gmm.ArgumentError, match="pass `out=`"):
            cupy_gmm.route(ids, 8)
        stream.end_capture()
