"""The operators of `cupy_gmm.torch` as PyTorch's compiler sees them: its own checks, whole graphs, layouts."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cupy_gmm
from tests.torches import BF16, assert_same_bits, gradients, ints, torch, usable, whole

import cupy_gmm.torch as face  # isort: skip  (needs PyTorch, without which the line above skips)

OFFS = (5, 5, 18, 31)
ROWS, K, N = 37, 24, 16
TOKENS, SLOTS, EXPERTS = 11, 2, 4


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    torch.compiler.reset()
    return usable(request.param)


def samples(rng: np.random.Generator, device: str) -> dict[str, tuple[Any, ...]]:
    """Arguments for every registered operator."""
    x, w, dy = (whole(rng, *shape, device=device) for shape in ((ROWS, K), (4, K, N), (ROWS, N)))
    offs, one = ints(OFFS, device), ints([1], device)
    ids = torch.from_numpy(rng.integers(-1, EXPERTS + 1, (TOKENS, SLOTS))).to(device)
    routes = face.route(ids, EXPERTS)
    given = routes.order, routes.inverse, routes.offs
    rows, tokens = whole(rng, TOKENS * SLOTS, K, device=device), whole(rng, TOKENS, K, device=device)
    weights = whole(rng, TOKENS, SLOTS, dtype=torch.float32, device=device)
    for each in (x, w, dy, rows, tokens, weights):
        each.requires_grad_()
    return {
        "grouped_mm": (x, w, offs, 0, None, None),
        "grouped_mm transposed": (x, w.detach().mT.contiguous().mT.requires_grad_(), offs, 0, None, torch.float32),
        "grouped_mm of some groups": (x, w[:2].detach().requires_grad_(), offs, 0, one, None),
        "grouped_mm_wgrad": (x, dy, offs, 1, None, 3, None),
        "route": (ids, EXPERTS),
        "permute": (tokens, *given, TOKENS),
        "permute_backward": (rows, *given, TOKENS),
        "combine": (rows, *given, weights, None),
        "combine_backward": (tokens, rows, *given, weights),
        "silu_mul": (x,),
        "silu_mul_backward": (dy.detach().repeat(1, 2).requires_grad_(), dy),
    }


def test_every_operator_has_a_sample(rng: np.random.Generator) -> None:
    defined = {name.partition("::")[2] for name in torch._C._dispatch_get_all_op_names() if "cupy_gmm::" in name}
    assert {name.partition(" ")[0] for name in samples(rng, "cpu")} == defined


@pytest.mark.parametrize("name", samples(np.random.default_rng(0), "cpu"))
def test_opcheck(name: str, device: str, rng: np.random.Generator) -> None:
    """Schema, registration of the gradient, shapes without memory, and the compiled graph with symbols for extents."""
    operator = getattr(torch.ops.cupy_gmm, name.partition(" ")[0]).default
    torch.library.opcheck(operator, samples(rng, device)[name], rtol=0, atol=0)


def compiled(call: Callable[..., Any], backend: str = "aot_eager", **options: Any) -> Callable[..., Any]:
    return torch.compile(call, fullgraph=True, backend=backend, **options)


@pytest.mark.parametrize(
    "device, backend",
    [("cpu", "eager"), ("cpu", "aot_eager")]  # inductor would need a C++ compiler there
    + [pytest.param("cuda", backend, marks=pytest.mark.gpu) for backend in ("eager", "aot_eager", "inductor")],
    indirect=["device"],
)
@pytest.mark.parametrize("layout", ["stored", "transposed"])
@pytest.mark.parametrize("offset", ["none", "host", "device"])
def test_products_in_one_graph(backend: str, layout: str, offset: str, device: str, rng: np.random.Generator) -> None:
    x, w, dy = (whole(rng, *shape, device=device) for shape in ((ROWS, K), (3, K, N), (ROWS, N)))
    if layout == "transposed":
        w = w.mT.contiguous().mT
    offs = ints(OFFS, device)
    first: Any = {"none": 0, "host": 1, "device": ints([1], device)}[offset]

    def call(x: Any, w: Any) -> Any:
        y = face.grouped_mm(x, w, offs=offs, out_dtype=torch.float32, group_offset=first)
        return 2 * y

    for actual, expected in zip(gradients(compiled(call, backend), dy, x, w), gradients(call, dy, x, w), strict=True):
        assert_same_bits(actual, expected)
        assert actual.stride() == expected.stride()


def test_weight_gradients_in_one_graph(device: str, rng: np.random.Generator) -> None:
    x, dy, ddw = (whole(rng, *shape, device=device) for shape in ((ROWS, K), (ROWS, N), (4, K, N)))
    offs = ints(OFFS, device)
    for call in (
        lambda x, dy: face.grouped_mm(x.mT, dy, offs=offs),
        lambda x, dy: face.grouped_mm_wgrad(x, dy, offs, num_groups=4),
    ):
        pairs = zip(gradients(compiled(call), ddw, x, dy), gradients(call, ddw, x, dy), strict=True)
        for actual, expected in pairs:
            assert_same_bits(actual, expected)


def test_one_graph_for_any_number_of_rows(device: str, rng: np.random.Generator) -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    call = torch.compile(lambda x, w, offs: face.grouped_mm(x, w, offs), fullgraph=True, backend=counter, dynamic=True)
    w = whole(rng, 4, K, N, device=device)
    for rows in (37, 61, 40, 103):
        x, offs = whole(rng, rows, K, device=device), ints(OFFS, device)
        assert_same_bits(call(x, w, offs), cupy_gmm.grouped_mm(x, w, offs))
    assert counter.frame_count == 1


def test_rows_that_only_the_device_counts(device: str, rng: np.random.Generator) -> None:
    """No check in a trace may ask for a number of rows that is data."""
    x, w, dy = (whole(rng, *shape, device=device) for shape in ((ROWS, K), (4, K, N), (ROWS, N)))
    offs = ints(OFFS, device)

    def call(x: Any, w: Any) -> Any:
        chosen = (x[:, 0] > 0).nonzero()[:, 0]
        y = face.grouped_mm(x[chosen], w, offs)
        return torch.zeros_like(dy).index_copy(0, chosen, y)

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        results = gradients(compiled(call), dy, x, w)
    for actual, expected in zip(results, gradients(call, dy, x, w), strict=True):
        assert_same_bits(actual, expected)


@pytest.mark.parametrize("dynamic", [False, True])
def test_layer_in_one_graph(dynamic: bool, device: str, rng: np.random.Generator) -> None:
    """From routing to combination; with symbols for the number of tokens too."""
    call = compiled(face.expert_ffn, dynamic=dynamic)
    for tokens in (TOKENS, 17):
        ids = torch.from_numpy(rng.integers(-1, EXPERTS + 1, (tokens, SLOTS))).to(device)
        inputs = [whole(rng, *shape, device=device) for shape in ((tokens, K), (EXPERTS, K, 2 * N), (EXPERTS, N, K))]
        weight, dy = whole(rng, tokens, SLOTS, dtype=torch.float32, device=device), whole(rng, tokens, K, device=device)
        results = [
            gradients(lambda x, up, down, weight: way(x, up, down, ids, weight), dy, *inputs, weight)  # noqa: B023
            for way in (call, face.expert_ffn)
        ]
        for actual, expected in zip(*results, strict=True):
            assert_same_bits(actual, expected)


def test_a_routing_crosses_the_border_of_a_graph(device: str, rng: np.random.Generator) -> None:
    ids = torch.from_numpy(rng.integers(-1, EXPERTS + 1, (TOKENS, SLOTS))).to(device)
    x = whole(rng, TOKENS, K, device=device)
    routes = compiled(face.route)(ids, EXPERTS)
    expected = cupy_gmm.route(ids, EXPERTS)
    assert isinstance(routes, cupy_gmm.Routing)
    for name in ("order", "inverse", "offs", "counts"):
        assert torch.equal(getattr(routes, name), getattr(expected, name))
    assert_same_bits(compiled(face.permute)(x, routes), cupy_gmm.permute(x, expected))


def test_wrong_calls_are_sentences_in_a_graph(rng: np.random.Generator) -> None:
    torch.compiler.reset()
    x, w, offs = whole(rng, ROWS, K), whole(rng, 4, K, N), ints(OFFS)
    schedule = cupy_gmm.make_schedule(offs, ROWS)
    with pytest.raises(Exception, match=r"`offs` is a Schedule inside torch\.compile, which knows tensors only: pass"):
        compiled(lambda: face.grouped_mm(x, w, schedule))()
    with pytest.raises(Exception, match=r"`w` has shape \(4, 16, 24\): expected .*; pass `w\.mT`"):
        compiled(lambda: face.grouped_mm(x, w.mT, offs))()
    with pytest.raises(Exception, match=r"`bias` is given: expected None"):
        compiled(lambda: face.grouped_mm(x, w, offs=offs, bias=x))()


def test_a_schedule_breaks_the_graph_and_works(rng: np.random.Generator) -> None:
    torch.compiler.reset()
    x, w, dy = whole(rng, ROWS, K), whole(rng, 4, K, N), whole(rng, ROWS, N)
    schedule = cupy_gmm.make_schedule(ints(OFFS), ROWS)
    call = lambda x, w: face.grouped_mm(x + 0, w, schedule)  # noqa: E731
    pairs = zip(gradients(torch.compile(call, backend="aot_eager"), dy, x, w), gradients(call, dy, x, w), strict=True)
    for actual, expected in pairs:
        assert_same_bits(actual, expected)


def test_export(rng: np.random.Generator) -> None:
    class Layer(torch.nn.Module):
        def forward(self, x: Any, w: Any, offs: Any) -> Any:
            return face.grouped_mm(x, w, offs=offs)

    x, w, offs = whole(rng, ROWS, K), whole(rng, 4, K, N), ints(OFFS)
    program = torch.export.export(Layer(), (x, w, offs))
    assert torch.ops.cupy_gmm.grouped_mm.default in [node.target for node in program.graph.nodes]
    assert_same_bits(program.module()(x, w, offs), cupy_gmm.grouped_mm(x, w, offs))
    assert x.dtype is BF16
