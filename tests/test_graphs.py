"""CUDA graphs: capture once, replay with anything else.

Everything that a graph reads or writes is made before the capture: `out=` arrays, and a Schedule that is
refilled inside the capture, so that the offsets of each replay are those of the moment.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cupy_gmm
from cupy_gmm.errors import ArgumentError
from tests import layouts, oracle
from tests.backends import POISON, Backend
from tests.layouts import Groups

pytestmark = pytest.mark.gpu

K, N = 72, 136


def capture(gpu: Backend, body: Callable[[], Any]) -> tuple[Any, Any]:
    """A side stream and the graph of `body`, which has run once before so that its kernels are loaded."""
    stream = gpu.cupy.cuda.Stream(non_blocking=True)
    gpu.synchronize()
    with stream:
        body()
        stream.synchronize()
        stream.begin_capture()
        try:
            body()
        finally:
            graph = stream.end_capture()
    return stream, graph


@dataclasses.dataclass
class Layer:
    """Operands, results and a schedule at fixed addresses; the product and both gradients in one body."""

    gpu: Backend
    rng: np.random.Generator
    groups: int
    rows: int

    def __post_init__(self) -> None:
        gpu, rng, rows = self.gpu, self.rng, self.rows
        self.x = gpu.place(oracle.integers(rng, (rows, K), "bfloat16"))
        self.dy = gpu.place(oracle.integers(rng, (rows, N), "bfloat16"))
        self.w = gpu.place(oracle.integers(rng, (self.groups, K, N), "bfloat16"))
        self.y = gpu.output((rows, N), "bfloat16", layouts.padded(8))
        self.dx = gpu.output((rows, K), "bfloat16")
        self.dw = gpu.output((self.groups, K, N), "float32")
        self.offs = gpu.place(np.zeros(self.groups, np.int32)).array
        self.schedule = cupy_gmm.make_schedule(self.offs, rows)

    def run(self) -> None:
        cupy_gmm.make_schedule(self.offs, self.rows, out=self.schedule)
        cupy_gmm.grouped_mm(self.x.array, self.w.array, self.schedule, out=self.y.array)
        cupy_gmm.grouped_mm(self.dy.array, self.w.array.swapaxes(1, 2), self.schedule, out=self.dx.array)
        cupy_gmm.grouped_mm_wgrad(self.x.array, self.dy.array, self.schedule, out=self.dw.array)

    def poison(self) -> None:
        """NaN into all results, so that a replay that does nothing is seen."""
        for placed in (self.y, self.dx, self.dw):
            word = placed.values.dtype.itemsize
            pattern = np.full(word // 2, POISON, np.uint16).view(f"u{word}")[0]
            array = placed.array
            self.gpu.cupy.ndarray(array.shape, f"u{word}", array.data, array.strides)[...] = pattern

    def set_offsets(self, ends: np.ndarray) -> None:
        self.offs.set(np.asarray(ends, np.int32))

    def check(self, ends: np.ndarray, what: object) -> None:
        spans = oracle.bounds_of(ends, self.rows)
        x, dy, w = self.x.values, self.dy.values, self.w.values
        same = oracle.assert_same_bits
        same(self.y.read(), oracle.expected_mm(x, w, spans, "bfloat16"), (what, "y"))
        same(self.dx.read(), oracle.expected_mm(dy, w.swapaxes(1, 2), spans, "bfloat16"), (what, "dx"))
        same(self.dw.read(), oracle.expected_wgrad(x, dy, spans, "float32", self.groups), (what, "dw"))
        for placed in (self.y, self.dx, self.dw):
            placed.check_guards()


def twelve(groups: int, rows: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Ends of twelve ways to deal the rows, some malformed."""
    each = rows // groups
    hot = np.full(groups, rows * 2 // 5 // (groups - 1))
    hot[groups // 2] = rows * 3 // 5
    steps = np.arange(groups)
    sizes = [
        np.where(steps == 0, rows, 0),
        np.where(steps == groups - 1, rows, 0),
        np.where(steps == groups // 3, rows, 0),
        np.zeros(groups, int),
        np.ones(groups, int),
        hot,
        np.where(steps % 2, 2 * each, 0),
        2 * each * steps // groups,
        (2 * each * steps // groups)[::-1],
        np.full(groups, each - 1),
    ]
    ends = [np.minimum(np.cumsum(s), rows) for s in sizes]
    return [*ends, rng.integers(-rows, 2 * rows, groups), np.sort(rng.integers(0, rows + 1, groups))]


def test_C17_tail_in_a_graph(gpu: Backend, rng: np.random.Generator) -> None:
    """640 rows, of which groups own 130: replayed 5 times, the tail is zero each time."""
    layer = Layer(gpu, rng, 5, 640)
    ends = np.array([30, 30, 99, 129, 130])
    layer.set_offsets(ends)
    stream, graph = capture(gpu, layer.run)
    for turn in range(5):
        layer.poison()
        gpu.synchronize()
        graph.launch(stream)
        stream.synchronize()
        layer.check(ends, turn)


def test_C67_capture_on_a_side_stream(gpu: Backend, rng: np.random.Generator) -> None:
    """Capturing runs nothing, replaying does: the kernels are in the graph."""
    layer = Layer(gpu, rng, 3, 200)
    layer.set_offsets(np.array([70, 70, 200]))
    stream, graph = capture(gpu, layer.run)
    layer.poison()
    gpu.synchronize()
    stream.synchronize()
    assert all(np.isnan(placed.read().astype(np.float32)).all() for placed in (layer.y, layer.dx, layer.dw))
    graph.launch(stream)
    stream.synchronize()
    layer.check(np.array([70, 70, 200]), "replay")


@pytest.mark.parametrize("groups,rows", [(8, 640), (288, 2304)])
def test_C76_replay_with_other_layouts(groups: int, rows: int, gpu: Backend, rng: np.random.Generator) -> None:
    """Captured with uniform groups, replayed with twelve other layouts; each equals eager, bit for bit."""
    layer = Layer(gpu, rng, groups, rows)
    uniform = (np.arange(groups) + 1) * (rows // groups)
    layer.set_offsets(uniform)
    stream, graph = capture(gpu, layer.run)
    for index, ends in enumerate([*twelve(groups, rows, rng), uniform]):
        layer.set_offsets(ends)
        layer.poison()
        gpu.synchronize()
        graph.launch(stream)
        stream.synchronize()
        layer.check(ends, index)
        fresh = gpu.ints(ends)
        eager = cupy_gmm.grouped_mm(layer.x.array, layer.w.array, fresh)
        oracle.assert_same_bits(gpu.get(eager), layer.y.read(), f"eager, layout {index}")


def test_C77_replay_with_other_inputs(gpu: Backend, rng: np.random.Generator) -> None:
    """Twelve replays back to back, inputs and offsets changed in between: all counters start anew."""
    layer = Layer(gpu, rng, 8, 640)
    layer.set_offsets(np.arange(1, 9) * 80)
    stream, graph = capture(gpu, layer.run)
    cupy = gpu.cupy
    kept, inputs = [], []
    for ends in twelve(8, 640, rng):
        x = oracle.integers(rng, (640, K), "bfloat16")
        inputs.append((x, ends))
        staged, offs = cupy.asarray(x.view(np.uint16)), cupy.asarray(ends.astype(np.int32))
        gpu.synchronize()
        with stream:
            cupy.ndarray(x.shape, np.uint16, layer.x.array.data)[...] = staged
            layer.offs[...] = offs
            graph.launch(stream)
            y = layer.y.array
            kept.append(cupy.ndarray(y.shape, np.uint16, y.data, y.strides).copy())
    stream.synchronize()
    for index, ((x, ends), y) in enumerate(zip(inputs, kept, strict=True)):
        expected = oracle.expected_mm(x, layer.w.values, oracle.bounds_of(ends, 640), "bfloat16")
        oracle.assert_same_bits(gpu.get(y).view(expected.dtype), expected, index)


def test_C78_nothing_but_the_graph_keeps_its_memory(gpu: Backend, rng: np.random.Generator) -> None:
    """What the calls took for themselves is the graph's own: free all else, fill memory with NaN, replay."""
    layer = Layer(gpu, rng, 8, 640)
    ends = np.array([1, 1, 300, 301, 301, 420, 600, 640])
    layer.set_offsets(ends)
    stream, graph = capture(gpu, layer.run)
    pool = gpu.cupy.get_default_memory_pool()
    for size in (2**30, 2**20, 2**12, 512):
        pool.free_all_blocks()
        blocks = [gpu.cupy.full(size // 2, POISON, np.uint16) for _ in range(1 if size == 2**30 else 40)]
        layer.poison()
        gpu.synchronize()
        graph.launch(stream)
        stream.synchronize()
        layer.check(ends, size)
        assert all(bool((block == POISON).all()) for block in blocks), "the replay wrote into memory of others"
        del blocks


def test_two_graphs_beside_eager_calls(gpu: Backend, rng: np.random.Generator) -> None:
    """Two graphs and eager calls on three streams at once, 20 rounds: no counter and no scratch is shared."""
    layers = [Layer(gpu, rng, 8, 640), Layer(gpu, rng, 5, 777)]
    ends = [np.array([0, 50, 51, 300, 301, 302, 639, 640]), np.array([7, 390, 390, 600, 770])]
    for layer, offsets in zip(layers, ends, strict=True):
        layer.set_offsets(offsets)
    made = [capture(gpu, layer.run) for layer in layers]
    groups = Groups((200, 0, 3, 130), 340)
    x, w = oracle.integers(rng, (340, K), "float16"), oracle.integers(rng, (4, K, N), "float16")
    expected = gpu.place(oracle.expected_mm(x, w, oracle.bounds_of(groups.offs, 340), "float16")).array
    placed, offs = (gpu.place(x).array, gpu.place(w).array), gpu.ints(groups.offs)
    eager_stream = gpu.cupy.cuda.Stream(non_blocking=True)
    for layer in layers:
        layer.poison()
    gpu.synchronize()
    results = []
    for _ in range(20):
        for stream, graph in made:
            graph.launch(stream)
        with eager_stream:
            results.append(cupy_gmm.grouped_mm(*placed, offs))
    for stream in (eager_stream, *(stream for stream, _ in made)):
        stream.synchronize()
    assert all(gpu.same(result, expected) for result in results)
    for layer, offsets in zip(layers, ends, strict=True):
        layer.check(offsets, "two graphs")


def test_two_graphs_of_one_schedule(gpu: Backend, rng: np.random.Generator) -> None:
    """Input and weight gradient, each in its own graph and stream, read the same table 20 times."""
    layer = Layer(gpu, rng, 8, 640)
    ends = np.array([100, 100, 103, 300, 301, 302, 639, 640])
    layer.set_offsets(ends)
    layer.run()
    x, dy, w, schedule = layer.x.array, layer.dy.array, layer.w.array, layer.schedule
    made = [
        capture(gpu, lambda: cupy_gmm.grouped_mm(dy, w.swapaxes(1, 2), schedule, out=layer.dx.array)),
        capture(gpu, lambda: cupy_gmm.grouped_mm_wgrad(x, dy, schedule, out=layer.dw.array)),
    ]
    gpu.synchronize()
    for _ in range(20):
        for stream, graph in made:
            graph.launch(stream)
    for stream, _ in made:
        stream.synchronize()
    layer.check(ends, "two graphs, one schedule")


def test_accumulation_in_a_graph(gpu: Backend, rng: np.random.Generator) -> None:
    """Five replays add five times."""
    x, dy = (oracle.integers(rng, (300, width), "bfloat16") for width in (K, N))
    placed = gpu.place(x).array, gpu.place(dy).array
    total = gpu.place(np.zeros((3, K, N), np.float32))
    schedule = cupy_gmm.make_schedule(gpu.ints([100, 100, 290]), 300)
    stream, graph = capture(gpu, lambda: cupy_gmm.grouped_mm_wgrad(*placed, schedule, out=total.array, accumulate=True))
    for _ in range(4):
        graph.launch(stream)
    stream.synchronize()
    once = oracle.expected_wgrad(x, dy, [(0, 100), (100, 100), (100, 290)], "float32", 3)
    oracle.assert_same_bits(total.read(), 5 * once, "one eager call and four replays")


def test_a_capture_without_memory_says_so(gpu: Backend, rng: np.random.Generator) -> None:
    """Without `out=`, or with plain offsets, a sentence; the capture goes on and its graph works."""
    layer = Layer(gpu, rng, 3, 100)
    ends = np.array([40, 40, 90])
    layer.set_offsets(ends)
    calls = (
        (lambda: cupy_gmm.grouped_mm(layer.x.array, layer.w.array, layer.schedule), "`out="),
        (lambda: cupy_gmm.grouped_mm_wgrad(layer.x.array, layer.dy.array, layer.schedule), "`out="),
        (
            lambda: cupy_gmm.grouped_mm(layer.x.array, layer.w.array, layer.offs, out=layer.y.array),
            "Schedule",
        ),
        (lambda: cupy_gmm.make_schedule(layer.offs, 100), "`out="),
        (
            lambda: cupy_gmm.grouped_mm(layer.x.array, layer.w.array, layer.schedule, out=layer.y.array, check="sync"),
            "`check`",
        ),
    )
    layer.run()
    gpu.synchronize()
    stream = gpu.cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        caught = []
        for call, _ in calls:
            try:
                call()
                caught.append("")
            except ArgumentError as error:
                caught.append(str(error))
        layer.run()
        graph = stream.end_capture()
    for message, (_, word) in zip(caught, calls, strict=True):
        assert word in message, message
    layer.poison()
    gpu.synchronize()
    graph.launch(stream)
    stream.synchronize()
    layer.check(ends, "after refusals")
