"""`cupy_gmm.torch` on a GPU: sizes that fill it, streams, CUDA graphs of forward and backward, inductor."""

from typing import Any

import numpy as np
import pytest

import cupy_gmm
from tests import apart
from tests.torches import BF16, assert_same_bits, gradients, ints, torch, usable

import cupy_gmm.torch as face  # isort: skip  (needs PyTorch, without which the line above skips)

pytestmark = pytest.mark.gpu

ROWS, K, N, GROUPS = 3000, 512, 384, 12


@pytest.fixture(autouse=True)
def _gpu() -> None:
    usable("cuda")


def random(rng: np.random.Generator, *shape: int, dtype: Any = BF16) -> Any:
    return torch.from_numpy(rng.standard_normal(shape).astype(np.float32)).to("cuda", dtype)


def ends(rng: np.random.Generator) -> np.ndarray:
    """End offsets with empty groups, a long one, and a tail."""
    inner = np.sort(rng.integers(0, ROWS // 3, GROUPS - 1))
    inner[4] = inner[3]
    return np.append(inner, ROWS - 50)


def step(x: Any, w: Any, offs: Any, dy: Any) -> tuple[Any, ...]:
    return gradients(lambda x, w: face.grouped_mm(x, w, offs), dy, x, w)


@pytest.mark.parametrize("given", ["offs", "schedule"])
@pytest.mark.parametrize("layout", ["stored", "transposed"])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_same_bits_as_the_plain_products(given: str, layout: str, dtype: Any, rng: np.random.Generator) -> None:
    x, w, dy = (random(rng, *s, dtype=dtype) for s in ((ROWS, K), (GROUPS, K, N), (ROWS, N)))
    if layout == "transposed":
        w = w.mT.contiguous().mT
    offs: Any = ints(ends(rng), "cuda")
    if given == "schedule":
        offs = cupy_gmm.make_schedule(offs, ROWS)
    y, dx, dw = step(x, w, offs, dy)
    assert_same_bits(y, cupy_gmm.grouped_mm(x, w, offs))
    assert_same_bits(dx, cupy_gmm.grouped_mm(dy, w.mT, offs))
    if layout == "transposed":
        assert_same_bits(dw.mT, cupy_gmm.grouped_mm_wgrad(dy, x, offs))
    else:
        assert_same_bits(dw, cupy_gmm.grouped_mm_wgrad(x, dy, offs))
    for actual, again in zip((y, dx, dw), step(x, w, offs, dy), strict=True):
        assert_same_bits(actual, again)


@pytest.mark.parametrize("given", ["offs", "schedule"])
def test_streams(given: str, rng: np.random.Generator) -> None:
    """What is late on its own stream is waited for there, also in the thread of the backward pass."""
    x, w, dy = (random(rng, *s) for s in ((ROWS, K), (GROUPS, K, N), (ROWS, N)))
    plain = ints(ends(rng), "cuda")
    expected = step(x, w, plain, dy)
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(5):
        with torch.cuda.stream(side):
            late_x, late_w, late_dy, late_offs = (torch.zeros_like(each) for each in (x, w, dy, plain))
            torch.cuda._sleep(20_000_000)
            for late, now in ((late_x, x), (late_w, w), (late_offs, plain)):
                late.copy_(now)
            late_x.requires_grad_()
            late_w.requires_grad_()
            offs = cupy_gmm.make_schedule(late_offs, ROWS) if given == "schedule" else late_offs
            y = face.grouped_mm(late_x, late_w, offs)
            torch.cuda._sleep(20_000_000)
            late_dy.copy_(dy)
            dx, dw = torch.autograd.grad(y, (late_x, late_w), late_dy)
        side.synchronize()
        for actual, value in zip((y.detach(), dx, dw), expected, strict=True):
            assert_same_bits(actual, value)


@pytest.mark.parametrize("given", ["offs", "schedule"])
def test_graph_of_forward_and_backward(given: str, rng: np.random.Generator) -> None:
    """Captured once, replayed with other groups and other numbers."""
    x, w, dy = (random(rng, *s) for s in ((ROWS, K), (GROUPS, K, N), (ROWS, N)))
    offs = ints(ends(rng), "cuda")
    leaves = x.requires_grad_(), w.requires_grad_()

    def work() -> tuple[Any, ...]:
        table: Any = cupy_gmm.make_schedule(offs, ROWS) if given == "schedule" else offs
        y = face.grouped_mm(*leaves, table)
        return y.detach(), *torch.autograd.grad(y, leaves, dy)

    captured, results = capture(work)
    for _ in range(4):
        offs.copy_(ints(ends(rng), "cuda"))
        with torch.no_grad():
            for each in (x, w, dy):
                each.copy_(random(rng, *each.shape))
        for each in results:
            each.fill_(torch.nan)
        captured.replay()
        for actual, expected in zip(results, step(x, w, offs, dy), strict=True):
            assert_same_bits(actual, expected)


def test_graph_of_the_layer(rng: np.random.Generator) -> None:
    """Routing included: other experts in each replay, beside eager calls."""
    tokens, slots, experts, h, inner = 500, 4, 16, 256, 192
    x, up, down = random(rng, tokens, h), random(rng, experts, h, 2 * inner), random(rng, experts, inner, h)
    weight, dy = random(rng, tokens, slots, dtype=torch.float32), random(rng, tokens, h)
    ids = torch.zeros(tokens, slots, dtype=torch.int32, device="cuda")
    leaves = [each.requires_grad_() for each in (x, up, down, weight)]

    def work() -> tuple[Any, ...]:
        y = face.expert_ffn(x, up, down, ids, weight)
        return y.detach(), *torch.autograd.grad(y, leaves, dy)

    captured, results = capture(work)
    for last in (1, 5, experts, experts + 3):
        ids.copy_(torch.from_numpy(rng.integers(-1, last, (tokens, slots))))
        for each in results:
            each.fill_(torch.nan)
        captured.replay()
        for actual, expected in zip(results, work(), strict=True):
            assert_same_bits(actual, expected)


def capture(work: Any) -> tuple[Any, tuple[Any, ...]]:
    """(graph, its results), after a few rounds on another stream, as PyTorch asks for."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = work()
    return graph, results


def twice(*args: Any) -> Any:
    return 2 * face.expert_ffn(*args)


def layer_step(way: Any, ids: Any, dy: Any, *inputs: Any) -> list[Any]:
    """Copies of the result and the gradients: memory of a graph is written again in the next call."""
    results = gradients(lambda x, up, down, weight: way(x, up, down, ids, weight), dy, *inputs)
    return [each.clone() for each in results]


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_layer_through_inductor(mode: str, rng: np.random.Generator) -> None:
    """Generated kernels around ours, and with the second mode graphs that PyTorch captures by itself."""
    pytest.importorskip("triton", reason="triton is not installed")
    torch.compiler.reset()
    tokens, slots, experts, h, inner = 300, 2, 8, 128, 96
    call = torch.compile(twice, fullgraph=True, mode=mode)
    up, down = random(rng, experts, h, 2 * inner), random(rng, experts, inner, h)
    for last in (experts, 3, experts):
        x, dy, weight = random(rng, tokens, h), random(rng, tokens, h), random(rng, tokens, slots, dtype=torch.float32)
        ids = torch.from_numpy(rng.integers(0, last, (tokens, slots))).cuda()
        results = [layer_step(way, ids, dy, x, up, down, weight) for way in (call, twice)]
        for actual, expected in zip(*results, strict=True):
            assert_same_bits(actual, expected)


def test_no_wait_for_the_device(rng: np.random.Generator) -> None:
    x, w, dy = (random(rng, *s) for s in ((ROWS, K), (GROUPS, K, N), (ROWS, N)))
    offs = ints(ends(rng), "cuda")
    step(x, w, offs, dy)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(x, w, offs, dy)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_first_of_all_on_the_device() -> None:
    """Nothing else has touched CuPy or the driver; the backward pass is the first work of its thread."""
    apart.python(
        """
import torch
from cupy_gmm.torch import grouped_mm
x = torch.ones(40, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
w = torch.ones(2, 64, 32, dtype=torch.bfloat16, device="cuda", requires_grad=True)
grouped_mm(x, w, offs=torch.tensor([10, 40], dtype=torch.int32, device="cuda")).sum().backward()
assert (x.grad == 32).all() and (w.grad[0] == 10).all() and (w.grad[1] == 30).all()
"""
    )
