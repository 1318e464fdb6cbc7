"""Routing, combination, activation and the expert layer of `cupy_gmm.torch`: gradients and ways of a call.

That the plain functions are right is shown elsewhere: the first derivatives here must have their bits. Second
derivatives are compared with those of a formula of PyTorch in float64.
"""

from typing import Any

import numpy as np
import pytest

import cupy_gmm
from tests.torches import BF16, assert_same, assert_same_bits, gradients, torch, usable, whole

import cupy_gmm.torch as face  # isort: skip  (needs PyTorch, without which the line above skips)

TOKENS, SLOTS, EXPERTS, H, INNER = 29, 3, 5, 24, 16


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return usable(request.param)


def choices(rng: np.random.Generator, device: str) -> Any:
    """Experts of each token; some dropped, expert 2 without tokens."""
    ids = rng.integers(-1, EXPERTS + 1, (TOKENS, SLOTS))
    ids[ids == 2] = 3
    return torch.from_numpy(ids).to(device)


def layer(rng: np.random.Generator, device: str, dtype: Any = BF16) -> tuple[Any, ...]:
    def of(*shape: int) -> Any:
        return torch.from_numpy(rng.standard_normal(shape)).to(device, dtype)

    weight = torch.from_numpy(rng.random((TOKENS, SLOTS), np.float32)).to(device)
    return of(TOKENS, H), of(EXPERTS, H, 2 * INNER), of(EXPERTS, INNER, H), choices(rng, device), weight, of(TOKENS, H)


def run(call: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """y and the gradients of x, both weights and the weights of the experts."""
    x, up, down, ids, weight, dy = inputs
    return gradients(lambda x, up, down, weight: call(x, up, down, ids, weight), dy, x, up, down, weight)


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("weight_dtype", [torch.float32, BF16])
def test_layer_has_the_bits_of_the_plain_one(
    dtype: Any, weight_dtype: Any, device: str, rng: np.random.Generator
) -> None:
    x, up, down, ids, weight, dy = layer(rng, device, dtype)
    weight = weight.to(weight_dtype)
    results = run(face.expert_ffn, (x, up, down, ids, weight, dy))
    y, saved = cupy_gmm.expert_ffn(x, up, down, ids, weight, save=True)
    *grads, d_weight = cupy_gmm.expert_ffn_backward(dy, saved)
    for actual, expected in zip(results, (y, *grads, d_weight.to(weight_dtype)), strict=True):
        assert_same_bits(actual, expected)
    with torch.no_grad():
        assert_same_bits(face.expert_ffn(x, up, down, ids, weight), y)


def test_layer_with_weights_stored_transposed(device: str, rng: np.random.Generator) -> None:
    x, up, down, ids, weight, dy = layer(rng, device)
    x, dy, up, down = (whole(rng, *each.shape, device=device) for each in (x, dy, up, down))
    plain = run(face.expert_ffn, (x, up, down, ids, weight, dy))
    across = run(face.expert_ffn, (x, up.mT.contiguous().mT, down.mT.contiguous().mT, ids, weight, dy))
    for actual, expected in zip(across[:2], plain[:2], strict=True):
        assert_same_bits(actual, expected)
    assert across[2].mT.is_contiguous()
    assert across[3].mT.is_contiguous()


def test_one_schedule_for_the_whole_layer(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    from cupy_gmm import ops

    made: list[Any] = []
    real = ops.make_schedule
    monkeypatch.setattr(ops, "make_schedule", lambda *args: made.append(real(*args)) or made[-1])
    for name in ("grouped_mm", "grouped_mm_wgrad"):
        product = getattr(ops, name)
        monkeypatch.setattr(
            ops, name, lambda a, b, offs, p=product, **words: seen.append(offs) or p(a, b, offs, **words)
        )
    seen: list[Any] = []
    run(face.expert_ffn, layer(rng, "cpu"))
    assert len(made) == 1
    assert len(seen) == 6
    assert all(offs is made[0] for offs in seen)


def test_second_derivatives(device: str, rng: np.random.Generator) -> None:
    """On whole numbers; `permute` and `combine` are linear in each input."""
    routing = face.route(choices(rng, device), EXPERTS)
    live = int(routing.offs[-1])
    x, weights = whole(rng, TOKENS, H, device=device), whole(rng, TOKENS, SLOTS, dtype=torch.float32, device=device)
    dy, rows = whole(rng, TOKENS, H, device=device), whole(rng, TOKENS * SLOTS, H, device=device)
    rows[live:] = 0

    def permute(x: Any) -> Any:
        chosen = x.double()[routing.order.long() // SLOTS]
        return torch.cat([chosen[:live], 0 * chosen[live:]])

    def combine(y: Any, weights: Any) -> Any:
        inverse = routing.inverse.long()
        taken = torch.where((inverse < 0)[:, None], 0, y.double()[inverse.clamp(0)])
        return (taken.view(TOKENS, SLOTS, H) * weights.double()[..., None]).sum(1)

    def second(permute: Any, combine: Any) -> tuple[Any, ...]:
        leaves = [each.detach().clone().requires_grad_() for each in (x, rows, weights, dy)]
        a, y, w, d = leaves
        first = torch.autograd.grad(combine(y, w), (y, w), d.to(combine(y, w).dtype), create_graph=True)
        inner = (first[0] * rows).sum() + (first[1] * weights).sum()
        (d_a,) = torch.autograd.grad(permute(a), a, first[0].to(permute(a).dtype), create_graph=True)
        return *first, d_a, *torch.autograd.grad(inner + (d_a * x).sum(), (y, w, d))

    ours = second(lambda x: face.permute(x, routing), lambda y, w: face.combine(y, routing, w))
    for actual, expected in zip(ours[:3], second(permute, combine)[:3], strict=True):
        assert_same(actual, expected)
    for actual, expected in zip(ours[3:], second(permute, combine)[3:], strict=True):
        error = (actual.double() - expected.double()).abs().max()
        assert error <= 2.0**-7 * expected.abs().max()


def test_activation_and_its_derivatives(device: str, rng: np.random.Generator) -> None:
    gate_up = torch.from_numpy(3 * rng.standard_normal((31, 2 * INNER))).to(device, torch.float32)
    dh, other = (torch.from_numpy(rng.standard_normal((31, n * INNER))).to(device, torch.float32) for n in (1, 2))
    h, grad = gradients(face.silu_mul, dh, gate_up)
    assert_same_bits(h, cupy_gmm.silu_mul(gate_up))
    assert_same_bits(grad, cupy_gmm.silu_mul_backward(gate_up, dh))
    assert_same_bits(face.silu_mul(gate_up), h)

    def formula(gate_up: Any) -> Any:
        gate, up = gate_up.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    def second(call: Any, dtype: Any) -> tuple[Any, ...]:
        a, b = (each.to(dtype, copy=True).requires_grad_() for each in (gate_up, dh))
        (first,) = torch.autograd.grad(call(a), a, b, create_graph=True)
        return torch.autograd.grad(first, (a, b), other.to(dtype))

    for actual, expected in zip(second(face.silu_mul, torch.float32), second(formula, torch.float64), strict=True):
        assert actual.dtype == torch.float32
        assert ((actual - expected).abs() <= 2.0**-18 * (1 + expected.abs())).all()


def test_gates_without_bounds(device: str) -> None:
    """Where exp overflows, the second derivative stays finite too."""
    gate_up = torch.tensor([[-1e4, 1e4, 3.0, 5.0]], device=device).requires_grad_()
    (first,) = torch.autograd.grad(face.silu_mul(gate_up).sum(), gate_up, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), gate_up)
    assert first.tolist() == [[0.0, 5.0, 0.0, 1e4]]
    assert second.tolist() == [[0.0, 1.0, 0.0, 1.0]]


@pytest.mark.parametrize("name", ["permute", "combine", "silu_mul"])
def test_no_machinery_where_nothing_is_recorded(
    name: str, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    from cupy_gmm.torch import _rows

    operator = name.upper()
    went: list[str] = []
    real = getattr(_rows, operator)
    monkeypatch.setattr(_rows, operator, lambda *args: went.append(operator) or real(*args))
    routing = face.route(choices(rng, "cpu"), EXPERTS)
    first = whole(rng, TOKENS if name == "permute" else TOKENS * SLOTS, H)
    rest = {"permute": (routing,), "combine": (routing, torch.ones(TOKENS, SLOTS)), "silu_mul": ()}[name]
    call = getattr(face, name)
    direct = call(first, *rest)
    assert not went
    recorded = call(first.requires_grad_(), *rest)
    assert went == [operator]
    assert recorded.requires_grad
    assert_same_bits(recorded.detach(), direct)


def test_wrong_calls_are_sentences(rng: np.random.Generator) -> None:
    x, up, down, ids, weight, _ = layer(rng, "cpu")
    routing = face.route(ids, EXPERTS)
    rows = face.permute(x, routing)

    def raises(text: str, call: Any, first: Any, *rest: Any) -> None:
        for grad in (False, True):
            with pytest.raises((cupy_gmm.ArgumentError, cupy_gmm.DtypeError)) as caught:
                call(first.detach().requires_grad_(grad) if first.is_floating_point() else first, *rest)
            assert text in str(caught.value)

    raises("`routing` is a Tensor: expected the Routing that `route` returned; pass that.", face.permute, x, ids)
    raises("`x` has 28 tokens: expected 29, as `routing` was made for", face.permute, x[:-1], routing)
    raises("`y` has shape (29, 24): expected (87, h), a row for each element of", face.combine, x, routing, weight)
    raises("`weights` has shape (29,): expected (tokens, slots)", face.combine, rows, routing, weight[:, 0])
    raises("`gate_up` has shape (29, 23): expected an even last axis", face.silu_mul, x[:, 1:])
    raises("`expert_idx` has shape (87,): expected (tokens, slots)", face.route, ids.reshape(-1), EXPERTS)
    raises("`w_down` has shape (5, 24, 16): expected (5, 16, 24)", face.expert_ffn, x, up, down.mT, ids, weight)
    raises(
        "`expert_idx` has dtype bfloat16: expected int32 or int64", face.expert_ffn, x, up, down, ids.to(BF16), weight
    )
    for name, call in {"x": face.permute, "gate_up": face.silu_mul, "expert_idx": face.route}.items():
        rest = {"x": (routing,), "gate_up": (), "expert_idx": (EXPERTS,)}[name]
        with pytest.raises(cupy_gmm.ArgumentError, match=f"`{name}` is a ndarray: expected a tensor of PyTorch"):
            call(np.ones((4, 4)), *rest)
    with pytest.raises(cupy_gmm.ArgumentError, match="`w_down` is a NoneType: expected a tensor of PyTorch"):
        face.expert_ffn(x, up, None, ids, weight)
    with pytest.raises(cupy_gmm.UnsupportedError, match=r"inside a transform of torch\.func"):
        torch.func.grad(lambda x: face.silu_mul(x).sum())(x)
