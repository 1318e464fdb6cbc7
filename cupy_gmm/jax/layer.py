"""Routing, activation and the expert layer inside JAX, with gradients: the functions of these names in `cupy_gmm`.

A Routing is a pytree here: it goes in and out of jitted functions, and through `scan` and `checkpoint`.
"""

from typing import Any

import jax
import jax.numpy as jnp

from .. import _checks, _problem, _row_checks, moe
from .. import routing as _plain
from ..routing import Routing
from . import _arguments, _products, _rows
from ._row_wire import RowsCall

jax.tree_util.register_dataclass(Routing, ["order", "inverse", "offs", "counts"], ["tokens"])


def route(expert_idx: Any, num_experts: int) -> Routing:
    """Sort assignments by expert, stably: `cupy_gmm.route` as JAX traces it.

    Args:
        expert_idx: (tokens, slots) int32 or int64. Ids outside [0, num_experts) are dropped; the same expert twice in
            one token is fine.
        num_experts: 0 to 8192.

    Returns:
        Routing of int32 arrays; a pytree. Its `offs` are those of `grouped_mm`, its `counts` the sizes of `ragged_dot`.

    Raises:
        ArgumentError: Shape, number of experts, or 2^31 assignments and more.
        DtypeError: `expert_idx` is not int32 or int64.
        UnsupportedError: `jax.vmap`.

    Numerics:
        Integers only: the same ids give the same Routing on every platform. Nothing to differentiate: a gradient
        passes by.

    Cost:
        On CUDA one launch for up to 4096 assignments, else three; elsewhere a stable sort of XLA. New ids trace nothing
        anew.

    Source:
        `cupy_gmm.route`, kernels/route.cuh.
    """
    ids = _arguments.array("expert_idx", expert_idx)
    experts = _row_checks.expert_ids(_arguments.view(ids), num_experts)
    tokens, slots = ids.shape
    if 0 in (tokens, slots, experts):  # XLA has no address for nothing; and without experts all are dropped
        number = jnp.arange(tokens * slots, dtype="int32")
        none = jnp.zeros(experts, "int32")
        return Routing(number, jnp.full_like(number, -1), none, none, tokens)
    return Routing(*_rows.route(ids, RowsCall("route", tokens, slots, experts, 0, ids.dtype.name)), tokens)


def permute(x: Any, routing: Routing) -> Any:
    """Copy each token's row to the positions of its assignments: `y[p] = x[order[p] // slots]`.

    Differentiable once in `x`.

    Args:
        x: (tokens, h) bfloat16, float16 or float32.
        routing: Routing of these tokens. Its arrays may hold anything: what does not agree counts as dropped.

    Returns:
        (tokens * slots, h), dtype of `x`. Rows at and past `offs[-1]` are exact zeros.

    Raises:
        ArgumentError, DtypeError: Shapes that do not belong together, a dtype that is not offered.
        UnsupportedError: `jax.vmap`, or a second derivative.

    Numerics:
        Copies bits. The gradient is `cupy_gmm.permute_backward`: a float32 sum in slot order, one rounding.

    Cost:
        On CUDA one launch in each direction; keeps the routing alone.

    Source:
        `cupy_gmm.permute`, `permute_rows` and `combine_rows` in kernels/routing.cu.
    """
    x = _arguments.array("x", x)
    _checks.rows("x", _arguments.view(x), "(tokens, h)")
    _row_checks.row_dtype("x", _arguments.view(x))
    routes = _routes(routing)
    length = routes[0].shape[0]
    tokens = _row_checks.tokens_of(length, routing.tokens, x.shape[0], "x")
    if 0 in (length, routes[2].size, x.size):
        return jnp.zeros((length, x.shape[1]), x.dtype)
    call = RowsCall("permute", tokens, length // tokens, routes[2].size, x.shape[1], x.dtype.name)
    return _rows.permute(x, routes, call)


def combine(y: Any, routing: Routing, weights: Any) -> Any:
    """Weighted sum of each token's rows: `out[t] = sum_j weights[t, j] * y[inverse[t * slots + j]]`.

    Differentiable once in `y` and `weights`.

    Args:
        y: (tokens * slots, h) bfloat16, float16 or float32. Rows of dropped assignments are not used.
        routing: Routing of these assignments.
        weights: (tokens, slots) float32, bfloat16 or float16. Weights of dropped assignments are not used.

    Returns:
        (tokens, h), dtype of `y`; zeros for a token without live assignments.

    Raises:
        ArgumentError, DtypeError: Shapes that do not belong together, a dtype that is not offered.
        UnsupportedError: `jax.vmap`, or a second derivative.

    Numerics:
        Product and sum in float32 in slot order 0, 1, ..., one rounding at the end; no atomics: the same bits in every
        run. Gradients are those of `cupy_gmm.combine_backward`, that of `weights` rounded to their dtype.

    Cost:
        On CUDA one launch in each direction; keeps `y`, the weights and the routing.

    Source:
        `cupy_gmm.combine`, `combine_rows` and `combine_rows_backward` in kernels/routing.cu.
    """
    y, weights = (_arguments.array(name, value) for name, value in (("y", y), ("weights", weights)))
    routes = _routes(routing)
    length = routes[0].shape[0]
    _row_checks.assignment_rows("y", _arguments.view(y), length)
    tokens = _row_checks.weights_of(_arguments.view(weights), length, routing.tokens)
    if 0 in (length, routes[2].size, y.size):
        return jnp.zeros((tokens, y.shape[1]), y.dtype)
    facts = tokens, length // tokens, routes[2].size, y.shape[1], y.dtype.name, weights.dtype.name
    return _rows.combine(y, routes, weights, RowsCall("combine", *facts))


def silu_mul(gate_up: Any) -> Any:
    """The gated activation `h = silu(gate) * up` of rows [gate | up], with `silu(g) = g / (1 + exp(-g))`.

    Differentiable once.

    Args:
        gate_up: (rows, 2 * inner) bfloat16, float16 or float32; the left half is the gate.

    Returns:
        (rows, inner), dtype of `gate_up`.

    Raises:
        ArgumentError, DtypeError: No two halves, a dtype that is not offered.
        UnsupportedError: `jax.vmap`, or a second derivative.

    Numerics:
        float32 to a few units in the last place, one rounding, as in `cupy_gmm.silu_mul` and
        `cupy_gmm.silu_mul_backward`. Any finite gate is safe.

    Cost:
        On CUDA one launch in each direction; keeps `gate_up`.

    Source:
        `cupy_gmm.silu_mul`, kernels/activation.cu.
    """
    gate_up = _arguments.array("gate_up", gate_up)
    rows, inner = _row_checks.gate_up_rows(_arguments.view(gate_up))
    if 0 in (rows, inner):
        return jnp.zeros((rows, inner), gate_up.dtype)
    return _rows.silu_mul(gate_up, RowsCall("silu_mul", rows, 1, 0, inner, gate_up.dtype.name))


def expert_ffn(x: Any, w_gate_up: Any, w_down: Any, expert_idx: Any, expert_weight: Any) -> Any:
    """Each token through its chosen experts, weighted and added: `cupy_gmm.expert_ffn` as JAX traces it.

        y[t] = sum_j expert_weight[t, j] * (silu(x[t] @ gate_e) * (x[t] @ up_e)) @ w_down[e]

    with e = expert_idx[t, j] and w_gate_up[e] = [gate_e | up_e]. Differentiable once in `x`, both weights and
    `expert_weight`. Where arrays are sharded call it inside `jax.shard_map`, which gives each device its own tokens;
    for experts on several devices put the parts of this module together, with `group_offset` of `grouped_mm`.

    Args:
        x: (T, h) bfloat16 or float16.
        w_gate_up: (G, h, 2 * inner), [gate | up] along the last axis, dtype of `x`.
        w_down: (G, inner, h), dtype of `x`.
        expert_idx: (T, k) int32 or int64; ids outside [0, G) are dropped.
        expert_weight: (T, k) float32, bfloat16 or float16.

    Returns:
        y (T, h), dtype of `x`.

    Raises:
        ArgumentError, DtypeError: A shape that does not fit the others, a dtype that is not offered.
        UnsupportedError: `jax.vmap`, or a second derivative; the call is larger than the kernels count.

    Numerics:
        float32 inside each step; rounded to the dtype of `x` after gate and up, the activation, down, and the
        combination, which adds in slot order. On CUDA the bits of `cupy_gmm.expert_ffn` and
        `cupy_gmm.expert_ffn_backward`; the gradient of `expert_weight` is rounded to its dtype. Elsewhere as
        `ragged_dot` and `silu_mul`.

    Cost:
        On CUDA four launches, six for more than 4096 assignments, beside one schedule and two products; backward three
        launches beside four products of the same schedule. Nothing is allocated, compiled or waited for in the call.
        Backward needs the routing and the rows before and after each product; `jax.checkpoint` computes them again
        instead of keeping them.

    Source:
        `route`, `permute`, `grouped_mm`, `silu_mul`, `combine` of this module.
    """
    named = {
        "x": x, "w_gate_up": w_gate_up, "w_down": w_down, "expert_idx": expert_idx, "expert_weight": expert_weight
    }  # fmt: skip
    x, w_gate_up, w_down, expert_idx, expert_weight = (_arguments.array(name, each) for name, each in named.items())
    moe.check_layer(*map(_arguments.view, (x, w_gate_up, w_down, expert_idx, expert_weight)))
    if 0 in (expert_idx.size, x.size, w_gate_up.shape[0]):
        return jnp.zeros_like(x)
    routes = route(expert_idx, w_gate_up.shape[0])
    xs = permute(x, routes)
    table = _products.table(routes.offs, False, xs.shape[0], 0, None)
    hidden = silu_mul(_product(xs, w_gate_up, table))
    return combine(_product(hidden, w_down, table), routes, expert_weight)


def _product(x: Any, w: Any, table: Any) -> Any:
    problem = _problem.forward(_arguments.view(x), _arguments.view(w), None, None)
    return _products.forward(x, w, lambda: table, _products.call_of(problem, problem.groups, None))


def _routes(routing: Any) -> tuple[Any, Any, Any]:
    """order, inverse and offs of a Routing, checked."""
    order, inverse, offs, _ = _plain.fields(routing, "routing")
    named = ("routing.order", order), ("routing.inverse", inverse), ("routing.offs", offs)
    order, inverse, offs = (_arguments.array(name, value) for name, value in named)
    _row_checks.routes(*map(_arguments.view, (order, inverse, offs)))
    return order, inverse, offs
