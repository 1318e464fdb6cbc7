"""Routing, activation and the expert layer for PyTorch, with gradients, inside and outside of `torch.compile`.

Says which way a call goes, as `products` does.
"""

from typing import Any

from .. import _arrays, moe, ops
from .. import routing as _plain
from ..routing import Routing
from . import _library, _rows
from .products import grouped_mm


def route(expert_idx: Any, num_experts: int) -> Routing:
    """Sort assignments by expert, stably: `cupy_gmm.route`.

    Args:
        expert_idx: (tokens, slots) int32 or int64, any strides; ids outside [0, num_experts) are dropped.
        num_experts: 0 to 8192.

    Returns:
        Routing of int32 tensors.

    Raises:
        ArgumentError, DtypeError: As `cupy_gmm.route`.

    Cost:
        That of `cupy_gmm.route`.

    Source:
        `cupy_gmm.route`.
    """
    _library.tensors(expert_idx=expert_idx)
    if _library.untraced(expert_idx):
        return _plain.route(expert_idx, num_experts)
    order, inverse, offs, counts = _rows.ROUTE(expert_idx, num_experts)
    return Routing(order, inverse, offs, counts, expert_idx.shape[0])


def permute(x: Any, routing: Routing) -> Any:
    """Copy each token's row to the positions of its assignments: `y[p] = x[order[p] // slots]`.

    Args:
        x: (tokens, h) bf16, fp16 or fp32, any strides.
        routing: Routing of these tokens.

    Returns:
        (tokens * slots, h), dtype of `x`. Rows at and past `offs[-1]` are exact zeros.

    Raises:
        ArgumentError, DtypeError: As `cupy_gmm.permute`.
        UnsupportedError: Tangents of forward mode, or vmap.

    Numerics:
        Copies bits. The gradient is `cupy_gmm.permute_backward`.

    Cost:
        One launch in each direction; keeps the routing alone.

    Source:
        `cupy_gmm.permute`, `cupy_gmm.permute_backward`.
    """
    _library.tensors(x=x)
    if _library.direct(x):
        return _plain.permute(x, routing)
    order, inverse, offs, _ = _plain.fields(routing, "routing")
    return _rows.PERMUTE(x, order, inverse, offs, routing.tokens)


def combine(y: Any, routing: Routing, weights: Any) -> Any:
    """Weighted sum of each token's rows: `out[t] = sum_j weights[t, j] * y[inverse[t * slots + j]]`.

    Args:
        y: (tokens * slots, h) bf16, fp16 or fp32, any strides.
        routing: Routing of these assignments.
        weights: (tokens, slots) fp32, bf16 or fp16, any strides.

    Returns:
        (tokens, h), dtype of `y`; zeros for a token without live assignments.

    Raises:
        ArgumentError, DtypeError: As `cupy_gmm.combine`.
        UnsupportedError: Tangents of forward mode, or vmap.

    Numerics:
        As `cupy_gmm.combine`. Gradients are those of `cupy_gmm.combine_backward`, that of `weights` rounded to their
        dtype.

    Cost:
        One launch in each direction; keeps `y`, the weights and the routing.

    Source:
        `cupy_gmm.combine`, `cupy_gmm.combine_backward`.
    """
    _library.tensors(y=y, weights=weights)
    if _library.direct(y, weights):
        return _plain.combine(y, routing, weights)
    order, inverse, offs, _ = _plain.fields(routing, "routing")
    return _rows.COMBINE(y, order, inverse, offs, weights, routing.tokens)


def silu_mul(gate_up: Any) -> Any:
    """The gated activation `h = silu(gate) * up` of rows [gate | up], with `silu(g) = g / (1 + exp(-g))`.

    Args:
        gate_up: (rows, 2 * inner) bf16, fp16 or fp32, any strides; the left half is the gate.

    Returns:
        (rows, inner), dtype of `gate_up`.

    Raises:
        ArgumentError, DtypeError: As `cupy_gmm.silu_mul`.
        UnsupportedError: Tangents of forward mode, or vmap.

    Numerics:
        As `cupy_gmm.silu_mul` and `cupy_gmm.silu_mul_backward`; a second derivative is computed by PyTorch in float32.

    Cost:
        One launch in each direction; keeps `gate_up`.

    Source:
        `cupy_gmm.silu_mul`, `cupy_gmm.silu_mul_backward`.
    """
    _library.tensors(gate_up=gate_up)
    if _library.direct(gate_up):
        return moe.silu_mul(gate_up)
    return _rows.SILU_MUL(gate_up)


def expert_ffn(x: Any, w_gate_up: Any, w_down: Any, expert_idx: Any, expert_weight: Any) -> Any:
    """Each token through its chosen experts, weighted and added: `cupy_gmm.expert_ffn`.

        y[t] = sum_j expert_weight[t, j] * (silu(x[t] @ gate_e) * (x[t] @ up_e)) @ w_down[e]

    with e = expert_idx[t, j] and w_gate_up[e] = [gate_e | up_e].

    Args:
        x: (T, h) bf16 or fp16, any strides.
        w_gate_up: (G, h, 2 * inner), [gate | up] along the last axis, dtype of `x`; `.mT` of a stored
            (G, 2 * inner, h) is as fast, and so is its gradient.
        w_down: (G, inner, h), dtype of `x`.
        expert_idx: (T, k) int32 or int64; ids outside [0, G) are dropped.
        expert_weight: (T, k) fp32, bf16 or fp16.

    Returns:
        y (T, h), dtype of `x`.

    Raises:
        ArgumentError, DtypeError: As `cupy_gmm.expert_ffn`.
        UnsupportedError: Tangents of forward mode, or vmap.

    Numerics:
        The bits of `cupy_gmm.expert_ffn` and `cupy_gmm.expert_ffn_backward`; the gradient of `expert_weight` is rounded
        to its dtype.

    Cost:
        That of `cupy_gmm.expert_ffn` and, backward, of `cupy_gmm.expert_ffn_backward`: one schedule for all products;
        in torch.compile each product builds its own.

    Source:
        `route`, `permute`, `grouped_mm`, `silu_mul`, `combine` of this module.
    """
    named = {
        "x": x, "w_gate_up": w_gate_up, "w_down": w_down, "expert_idx": expert_idx, "expert_weight": expert_weight
    }  # fmt: skip
    _library.tensors(**named)
    untraced = _library.untraced(*named.values())
    if untraced and not _library.recorded(*named.values()):
        return moe.expert_ffn(**named)
    if untraced:
        moe.check_layer(*_arrays.locate(*named.items())[1])
    routes = route(expert_idx, w_gate_up.shape[0])
    xs = permute(x, routes)
    offs = ops.make_schedule(routes.offs, xs.shape[0]) if untraced else routes.offs
    hidden = silu_mul(grouped_mm(xs, w_gate_up, offs))
    return combine(grouped_mm(hidden, w_down, offs), routes, expert_weight)
