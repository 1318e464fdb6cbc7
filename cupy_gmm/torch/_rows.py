"""Routing, permutation, combination and activation as operators of PyTorch, with their gradients.

Each gradient is an operator again and has one itself. A Routing crosses as its arrays, since an operator takes
tensors only. Used by `layer`.
"""

from typing import Any

import torch

from .. import _checks, _row_checks, moe, routing
from ..routing import Routing
from ._library import define, seen


def _routing(order: Any, inverse: Any, offs: Any, tokens: Any) -> Routing:
    return Routing(order, inverse, offs, None, tokens)


def _save_inputs(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


# ---- route


def _route(expert_idx: Any, num_experts: int) -> tuple[Any, Any, Any, Any]:
    return routing.fields(routing.route(expert_idx, num_experts), "routing")


def _fake_route(expert_idx: Any, num_experts: Any) -> tuple[Any, ...]:
    _checks.rank("expert_idx", seen(expert_idx), 2, "(tokens, slots)")
    length = expert_idx.shape[0] * expert_idx.shape[1]
    extents = (length, length, num_experts, num_experts)
    return tuple(expert_idx.new_empty((extent,), dtype=torch.int32) for extent in extents)


ROUTE = define(
    "route(Tensor expert_idx, SymInt num_experts) -> (Tensor order, Tensor inverse, Tensor offs, Tensor counts)",
    _route, _fake_route,
)  # fmt: skip


# ---- permute


def _permute(x: Any, order: Any, inverse: Any, offs: Any, tokens: int | None) -> Any:
    return routing.permute(x, _routing(order, inverse, offs, tokens))


def _fake_permute(x: Any, order: Any, inverse: Any, offs: Any, tokens: Any) -> Any:
    _checks.rows("x", seen(x), "(tokens, h)")
    return x.new_empty((order.shape[0], x.shape[1]))


def _save_permute(ctx: Any, inputs: Any, output: Any) -> None:
    x, order, inverse, offs, _ = inputs
    ctx.save_for_backward(order, inverse, offs)
    ctx.tokens = x.shape[0]


def _permute_gradients(ctx: Any, dy: Any) -> tuple[Any, ...]:
    return PERMUTE_BACKWARD(dy, *ctx.saved_tensors, ctx.tokens), None, None, None, None


def _permute_backward(dy: Any, order: Any, inverse: Any, offs: Any, tokens: int) -> Any:
    return routing.permute_backward(dy, _routing(order, inverse, offs, tokens))


def _fake_permute_backward(dy: Any, order: Any, inverse: Any, offs: Any, tokens: Any) -> Any:
    _checks.rows("dy", seen(dy), "(tokens * slots, h)")
    return dy.new_empty((tokens, dy.shape[1]))


def _save_permute_backward(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[1:4])
    ctx.tokens = inputs[4]


def _permute_backward_gradients(ctx: Any, ddx: Any) -> tuple[Any, ...]:
    return PERMUTE(ddx, *ctx.saved_tensors, ctx.tokens), None, None, None, None


PERMUTE = define(
    "permute(Tensor x, Tensor order, Tensor inverse, Tensor offs, SymInt? tokens) -> Tensor",
    _permute, _fake_permute, _permute_gradients, _save_permute,
)  # fmt: skip
PERMUTE_BACKWARD = define(
    "permute_backward(Tensor dy, Tensor order, Tensor inverse, Tensor offs, SymInt tokens) -> Tensor",
    _permute_backward, _fake_permute_backward, _permute_backward_gradients, _save_permute_backward,
)  # fmt: skip


# ---- combine


def _combine(y: Any, order: Any, inverse: Any, offs: Any, weights: Any, tokens: int | None) -> Any:
    return routing.combine(y, _routing(order, inverse, offs, tokens), weights)


def _fake_combine(y: Any, order: Any, inverse: Any, offs: Any, weights: Any, tokens: Any) -> Any:
    _checks.rows("y", seen(y), "(tokens * slots, h)")
    _checks.rank("weights", seen(weights), 2, "(tokens, slots)")
    return y.new_empty((weights.shape[0], y.shape[1]))


def _save_combine(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:5])


def _combine_gradients(ctx: Any, dy: Any) -> tuple[Any, ...]:
    y, order, inverse, offs, weights = ctx.saved_tensors
    d_y, d_weights = COMBINE_BACKWARD(dy, y, order, inverse, offs, weights)
    return d_y, None, None, None, d_weights.to(weights.dtype), None


def _combine_backward(dy: Any, y: Any, order: Any, inverse: Any, offs: Any, weights: Any) -> tuple[Any, Any]:
    return routing.combine_backward(dy, y, _routing(order, inverse, offs, None), weights)


def _fake_combine_backward(dy: Any, y: Any, order: Any, inverse: Any, offs: Any, weights: Any) -> tuple[Any, Any]:
    return y.new_empty(y.shape), weights.new_empty(weights.shape, dtype=torch.float32)


def _combine_backward_gradients(ctx: Any, a: Any, b: Any) -> tuple[Any, ...]:
    """Both results are products of two inputs, so the derivatives are these operators with one input exchanged."""
    dy, y, order, inverse, offs, weights = ctx.saved_tensors
    routes = order, inverse, offs
    d_dy = COMBINE(a, *routes, weights, None) + COMBINE(y, *routes, b, None)
    d_y, _ = COMBINE_BACKWARD(dy, y, *routes, b)
    _, d_weights = COMBINE_BACKWARD(dy, a, *routes, weights)
    return d_dy, d_y, None, None, None, d_weights.to(weights.dtype)


COMBINE = define(
    "combine(Tensor y, Tensor order, Tensor inverse, Tensor offs, Tensor weights, SymInt? tokens) -> Tensor",
    _combine, _fake_combine, _combine_gradients, _save_combine,
)  # fmt: skip
COMBINE_BACKWARD = define(
    "combine_backward(Tensor dy, Tensor y, Tensor order, Tensor inverse, Tensor offs, Tensor weights) "
    "-> (Tensor d_y, Tensor d_weights)",
    _combine_backward, _fake_combine_backward, _combine_backward_gradients, _save_inputs,
)  # fmt: skip


# ---- silu_mul


def _silu_mul(gate_up: Any) -> Any:
    return moe.silu_mul(gate_up)


def _fake_silu_mul(gate_up: Any) -> Any:
    return gate_up.new_empty(_row_checks.gate_up_extents(seen(gate_up)))


def _silu_mul_gradients(ctx: Any, dh: Any) -> Any:
    return SILU_MUL_BACKWARD(*ctx.saved_tensors, dh)


def _silu_mul_backward(gate_up: Any, dh: Any) -> Any:
    return moe.silu_mul_backward(gate_up, dh)


def _fake_silu_mul_backward(gate_up: Any, dh: Any) -> Any:
    return gate_up.new_empty(gate_up.shape)


def _silu_mul_backward_gradients(ctx: Any, a: Any) -> tuple[Any, Any]:
    """In float32, of PyTorch's own operators: a second derivative is rarely asked for."""
    gate_up, dh = ctx.saved_tensors
    gate, up = gate_up.float().chunk(2, -1)
    a_gate, a_up = a.float().chunk(2, -1)
    h, s = dh.float(), torch.sigmoid(gate)
    first = s * (1 + gate * (1 - s))  # derivatives of silu
    second = s * (1 - s) * (2 + gate * (1 - 2 * s))
    d_gate = h * (a_gate * up * second + a_up * first)
    d_dh = a_gate * up * first + a_up * gate * s
    return torch.cat((d_gate, a_gate * h * first), -1).to(gate_up.dtype), d_dh.to(dh.dtype)


SILU_MUL = define("silu_mul(Tensor gate_up) -> Tensor", _silu_mul, _fake_silu_mul, _silu_mul_gradients, _save_inputs)
SILU_MUL_BACKWARD = define(
    "silu_mul_backward(Tensor gate_up, Tensor dh) -> Tensor",
    _silu_mul_backward, _fake_silu_mul_backward, _silu_mul_backward_gradients, _save_inputs,
)  # fmt: skip
