"""`route`: histogram, scan and stable order, against Python's own stable sort."""

from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

import cupy_gmm
from cupy_gmm import _rowwise
from tests import backends, layouts, oracle, routes
from tests.backends import Backend

C34_EXPERTS = (1, 2, 31, 32, 33, 127, 128, 255, 256, 257, 512, 1023, 1025, 2048, 4096)


@pytest.mark.parametrize("experts", [*C34_EXPERTS, 8192])
def test_C34_many_experts(experts: int, backend: Backend, rng: np.random.Generator) -> None:
    """Also with one expert that takes all, and with experts that take none."""
    routes.check_route(backend, routes.ids_of(rng, 4097, 8, experts), experts)
    routes.check_route(backend, np.full((700, 8), experts - 1, np.int32), experts)
    routes.check_route(backend, np.full((77, 2), experts // 2, np.int32), experts)


@pytest.mark.parametrize("tokens", [65535, 65536, 65537])
def test_C36_around_65536_assignments(tokens: int, backend: Backend, rng: np.random.Generator) -> None:
    routes.check_route(backend, routes.ids_of(rng, tokens, 1, 256), 256)


@pytest.mark.parametrize("experts", [3, 5, 7, 96, 160, 384])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_C37_no_power_of_two(dtype: str, experts: int, backend: Backend, rng: np.random.Generator) -> None:
    for tokens in (7, 1500):
        routes.check_route(backend, routes.ids_of(rng, tokens, 6, experts, dtype), experts)


@pytest.mark.parametrize("slots", [1, 8])
@pytest.mark.parametrize("tokens", [5, 1031])
def test_C39_C32_ids_out_of_range_are_dropped(
    tokens: int, slots: int, backend: Backend, rng: np.random.Generator
) -> None:
    experts = 6
    wild = np.array([-1, -7, experts, 2**31 - 1, -(2**31), 0, 3], np.int32)
    routes.check_route(backend, rng.choice(wild, (tokens, slots)), experts)
    routes.check_route(backend, rng.choice(wild[:5], (tokens, slots)), experts)
    # Past 32 bits: what is left of them is a valid id.
    wild64 = np.array([2**32, 2**32 + 3, -(2**32) + 3, 2**63 - 1, -(2**63), 3], np.int64)
    routes.check_route(backend, rng.choice(wild64, (tokens, slots)), experts)


@pytest.mark.parametrize("experts", [0, 1, 8, 8192])
@pytest.mark.parametrize("shape", [(0, 4), (0, 0), (5, 0), (0, 1)])
def test_C41_no_assignments(shape: tuple[int, int], experts: int, backend: Backend) -> None:
    routes.check_route(backend, np.zeros(shape, np.int32), experts)


@pytest.mark.parametrize("tokens", [3, 4097])
def test_no_experts(tokens: int, backend: Backend, rng: np.random.Generator) -> None:
    """All are dropped, in order."""
    routes.check_route(backend, routes.ids_of(rng, tokens, 2, 4), 0)


def test_C42_equal_experts_keep_token_order(backend: Backend, rng: np.random.Generator) -> None:
    """Exact indices, also where one token chooses an expert twice."""
    ids = np.array([[2, 0], [2, 2], [9, 0], [2, -1], [0, 2]], np.int32)
    routing = cupy_gmm.route(backend.ints(ids), 3)
    assert backend.get(routing.order).tolist() == [1, 5, 8, 0, 2, 3, 6, 9, 4, 7]
    assert backend.get(routing.inverse).tolist() == [3, 0, 4, 5, -1, 1, 6, -1, 2, 7]
    assert backend.get(routing.offs).tolist() == [3, 3, 8]
    assert backend.get(routing.counts).tolist() == [3, 0, 5]
    for experts in (2, 3):
        routes.check_route(backend, rng.integers(0, experts, (3001, 8)).astype(np.int32), experts)


@pytest.mark.parametrize("assignments", [1, 31, 32, 33, 127, 128, 129, 1024, 4095, 4096, 4097, 5119, 5120, 5121])
def test_edges_of_warps_rounds_and_blocks(assignments: int, backend: Backend, rng: np.random.Generator) -> None:
    routes.check_route(backend, routes.ids_of(rng, assignments, 1, 11), 11)


@pytest.mark.parametrize("name", sorted(layouts.INPUT_LAYOUTS))
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_ids_of_any_layout(name: str, dtype: str, backend: Backend, rng: np.random.Generator) -> None:
    for tokens in (101, 1201):
        routes.check_route(backend, routes.ids_of(rng, tokens, 5, 19, dtype), 19, layouts.INPUT_LAYOUTS[name])


@hypothesis.given(
    st.integers(0, 9).flatmap(
        lambda experts: st.tuples(
            st.just(experts),
            st.lists(st.lists(st.integers(-3, 11), min_size=3, max_size=3), max_size=40),
        )
    )
)
def test_any_ids(case: tuple[int, list[list[int]]]) -> None:
    experts, ids = case
    routes.check_route(Backend(), np.array(ids, np.int32).reshape(-1, 3), experts)


def test_refilled_routing_is_complete(backend: Backend, rng: np.random.Generator) -> None:
    """`out=` of an earlier call: nothing of it shines through."""
    for tokens in (40, 2000):
        first = cupy_gmm.route(backend.ints(routes.ids_of(rng, tokens, 4, 9)), 9)
        ids = rng.choice(np.array([-1, 8], np.int32), (tokens, 4))
        assert cupy_gmm.route(backend.ints(ids), 9, out=first) is first
        routes.same_routing(backend, first, routes.route(ids, 9), "refilled")


def test_chunks_cover_all_assignments_and_bound_the_scratch() -> None:
    for experts in (0, 1, 256, 1023, 1024, 4000, 8192):
        for assignments in (4097, 8191, 131072, 2**20, 2**24 + 1, 2**31 - 1):
            chunk, chunks = _rowwise._chunks(assignments, experts)
            assert chunk % 1024 == 0
            assert (chunks - 1) * chunk < assignments <= chunks * chunk < 2**31 + chunk
            assert 4 * chunks * (experts + 1) <= 4 * 128 * 8193
            assert chunks <= 1024


# ---- wrong calls


def raises(kind: type[Exception], text: str, *args: Any, **options: Any) -> None:
    with pytest.raises(kind) as caught:
        cupy_gmm.route(*args, **options)
    assert text in str(caught.value)


def test_wrong_arguments_are_sentences(backend: Backend) -> None:
    ids = backend.ints(np.zeros((4, 2), np.int32))
    argument, dtype = cupy_gmm.ArgumentError, cupy_gmm.DtypeError
    raises(
        argument,
        "`expert_idx` has shape (4,): expected (tokens, slots); for one expert a token pass "
        "`expert_idx[:, None]`.",
        backend.ints([0, 1, 2, 3]), 3,
    )  # fmt: skip
    raises(
        argument,
        "`expert_idx` has shape (1, 2, 2): expected (tokens, slots).",
        ids.reshape(1, 4, 2)[:, :2],
        3,
    )
    raises(
        dtype,
        "`expert_idx` has dtype float32: expected int32 or int64; cast it, for example `expert_idx.astype",
        backend.place(np.zeros((4, 2), np.float32)).array, 3,
    )  # fmt: skip
    for wrong in (True, 2.0, None, "3"):
        raises(argument, f"`num_experts` is {wrong!r}: expected the number of experts, an int.", ids, wrong)
    for wrong in (-1, 8193):
        raises(argument, f"`num_experts` is {wrong}: expected 0 to 8192", ids, wrong)
    raises(argument, "`out` is a tuple: expected the Routing that `route` returned", ids, 3, out=(1, 2, 3, 4))
    assert len(cupy_gmm.route(ids, np.int64(3)).offs) == 3


def test_wrong_out_is_a_sentence(backend: Backend) -> None:
    ids = backend.ints(np.zeros((4, 2), np.int32))

    def out(*lengths: int, dtype: str = "int32", layout: layouts.Layout = layouts.contiguous) -> cupy_gmm.Routing:
        return cupy_gmm.Routing(*(backend.output((n,), dtype, layout).array for n in lengths))

    argument = cupy_gmm.ArgumentError
    raises(argument, "`out.order` has shape (7,): expected (8,), the shape of", ids, 3, out=out(7, 8, 3, 3))
    raises(argument, "`out.counts` has shape (4,): expected (3,), the shape of", ids, 3, out=out(8, 8, 3, 4))
    raises(
        cupy_gmm.DtypeError, "`out.order` has dtype int64: expected int32",
        ids, 3, out=out(8, 8, 3, 3, dtype="int64"),
    )  # fmt: skip
    raises(
        argument, "`out.order` has strides (2,) for shape (8,): expected contiguous elements",
        ids, 3, out=out(8, 8, 3, 3, layout=layouts.step_two),
    )  # fmt: skip


def test_too_many_assignments_is_a_sentence() -> None:
    ids = np.broadcast_to(np.zeros((1, 1), np.int32), (2**28, 8))
    raises(cupy_gmm.ArgumentError, "expected less than 2^31 assignments; split the tokens", ids, 3)


# ---- GPU only


@pytest.mark.gpu
@pytest.mark.parametrize("experts", [256, 8192])
def test_a_million_assignments(experts: int, gpu: Backend, rng: np.random.Generator) -> None:
    """Several rounds a block, all 128 blocks; compared with NumPy's stable sort."""
    ids = routes.ids_of(rng, 2**17 + 3, 8, experts)
    routing = cupy_gmm.route(gpu.ints(ids), experts)
    bucket = np.where((ids >= 0) & (ids < experts), ids, experts).reshape(-1)
    order = np.argsort(bucket, kind="stable").astype(np.int32)
    inverse = np.empty_like(order)
    inverse[order] = np.arange(order.size)
    inverse[bucket == experts] = -1
    counts = np.bincount(bucket, minlength=experts + 1)[:experts].astype(np.int32)
    expected = routes.Plain(order, inverse, np.cumsum(counts).astype(np.int32), counts, len(ids))
    routes.same_routing(gpu, routing, expected, f"{experts} experts")


@pytest.mark.gpu
def test_40_runs_give_one_order(gpu: Backend, rng: np.random.Generator) -> None:
    for tokens in (512, 16384):
        ids = gpu.ints(routes.ids_of(rng, tokens, 8, 64))
        runs = [cupy_gmm.route(ids, 64) for _ in range(40)]
        assert len({gpu.get(run.order).tobytes() + gpu.get(run.inverse).tobytes() for run in runs}) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [200, 4000])
def test_no_host_wait_and_replay_with_other_ids(tokens: int, gpu: Backend, rng: np.random.Generator) -> None:
    """A capture fails at any wait; the graph then serves ids that it never saw, in poisoned memory."""
    cupy = gpu.cupy
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        ids = cupy.asarray(routes.ids_of(rng, tokens, 8, 33))
        out = cupy_gmm.route(ids, 33)
        stream.begin_capture()
        cupy_gmm.route(ids, 33, out=out)
        graph = stream.end_capture()
        for _ in range(5):
            given = routes.ids_of(rng, tokens, 8, 33)
            ids.set(given)
            for array in (out.order, out.inverse, out.offs, out.counts):
                array.fill(backends.POISON)
            gpu.poison_allocator((1 << 20,), "int32")
            graph.launch(stream)
            stream.synchronize()
            routes.same_routing(gpu, out, routes.route(given, 33), "replay")


@pytest.mark.gpu
def test_cpu_and_gpu_agree(gpu: Backend, rng: np.random.Generator) -> None:
    ids = routes.ids_of(rng, 3000, 6, 40)
    here, there = cupy_gmm.route(ids, 40), cupy_gmm.route(gpu.ints(ids), 40)
    for name in ("order", "inverse", "offs", "counts"):
        oracle.assert_same_bits(gpu.get(getattr(there, name)), getattr(here, name), name)
