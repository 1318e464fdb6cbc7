"""Routing and activation in `jax.numpy`: on every platform but CUDA. `_rows` calls it.

The same rules for dropped assignments, the same points of rounding and the same order of sums as the kernels, whatever
the arrays of a Routing hold. No scatter meets a position twice, so nothing depends on an order that XLA chooses.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax

from . import _axes
from ._row_wire import RowsCall


def run(call: RowsCall, *operands: Any) -> tuple[Any, ...]:
    """Results of a call, without scratch."""
    functions: dict[str, Callable[..., tuple[Any, ...]]] = {
        "route": _route,
        "permute": _permute,
        "permute_backward": _combine,
        "combine": _combine,
        "combine_backward": _combine_backward,
        "silu_mul": _silu_mul,
        "silu_mul_backward": _silu_mul_backward,
    }
    return functions[call.op](call, *operands)


def _route(call: RowsCall, ids: Any) -> tuple[Any, ...]:
    """Stable counting sort by expert; ids out of range last, in order."""
    flat, experts = ids.reshape(-1), call.experts
    number = jnp.arange(flat.size, dtype="int32")
    bucket = jnp.where((flat >= 0) & (flat < experts), flat, experts).astype("int32")
    _, order = lax.sort((bucket, number), is_stable=True, num_keys=1)
    # Where each expert ends among the sorted buckets; the last bucket is that of dropped assignments.
    offs = jnp.searchsorted(bucket[order], jnp.arange(experts, dtype="int32"), side="right").astype("int32")
    counts = jnp.diff(offs, prepend=0).astype("int32")
    position = jnp.zeros_like(number).at[order].set(number, unique_indices=True)
    return order, jnp.where(bucket == experts, -1, position), offs, counts


def _live(order: Any, inverse: Any, offs: Any) -> tuple[Any, Any]:
    """Row of each assignment and assignment of each row, -1 where there is none.

    An assignment is live when its position lies below the last offset and `order` and `inverse` agree on it.
    """
    used = jnp.clip(offs[-1], 0, order.size)
    number = jnp.arange(order.size, dtype="int32")
    rows = jnp.where((inverse >= 0) & (inverse < used), inverse, -1)
    rows = jnp.where((rows >= 0) & (order[jnp.maximum(rows, 0)] == number), rows, -1)
    known = (number < used) & (order >= 0) & (order < order.size)
    assignments = jnp.where(known & (inverse[jnp.where(known, order, 0)] == number), order, -1)
    return rows, assignments


def _permute(call: RowsCall, x: Any, order: Any, inverse: Any, offs: Any) -> tuple[Any, ...]:
    _, assignments = _live(order, inverse, offs)
    taken = x[jnp.maximum(assignments, 0) // call.slots]
    return (jnp.where((assignments >= 0)[:, None], taken, jnp.zeros((), x.dtype)),)


def _combine(call: RowsCall, y: Any, order: Any, inverse: Any, offs: Any, weights: Any = None) -> tuple[Any, ...]:
    """Product and sum are rounded one by one, slot after slot: the bits of the kernel.

    Hence the loop: compilers for the CPU make one operation of a product and a sum that they see together.
    """
    rows, _ = _live(order, inverse, offs)
    parts = y[jnp.maximum(rows, 0)].astype("float32")
    if weights is not None:
        parts = parts * weights.astype("float32").reshape(-1, 1)
    parts = jnp.where((rows >= 0)[:, None], parts, 0.0).reshape(call.tokens, call.slots, call.width)

    def add(slot: Any, total: Any) -> Any:
        return total + lax.dynamic_index_in_dim(parts, slot, axis=1, keepdims=False)

    start = _axes.varying(jnp.zeros((call.tokens, call.width), "float32"), _axes.of(parts))
    return (lax.fori_loop(0, call.slots, add, start).astype(y.dtype),)


def _combine_backward(
    call: RowsCall, dy: Any, y: Any, order: Any, inverse: Any, offs: Any, weights: Any
) -> tuple[Any, ...]:
    rows, assignments = _live(order, inverse, offs)
    known = jnp.maximum(assignments, 0)
    grads = dy[known // call.slots].astype("float32") * weights.astype("float32").reshape(-1)[known][:, None]
    d_y = jnp.where((assignments >= 0)[:, None], grads, 0.0).astype(dy.dtype)
    taken = y[jnp.maximum(rows, 0)].astype("float32").reshape(call.tokens, call.slots, call.width)
    products = jnp.sum(taken * dy.astype("float32")[:, None, :], axis=2)
    return d_y, jnp.where(rows.reshape(products.shape) >= 0, products, 0.0)


def _silu_mul(call: RowsCall, gate_up: Any) -> tuple[Any, ...]:
    gate, up = _halves(gate_up)
    return ((gate * _sigmoid(gate) * up).astype(gate_up.dtype),)


def _silu_mul_backward(call: RowsCall, gate_up: Any, dh: Any) -> tuple[Any, ...]:
    """The slope comes first in each product: where it is 0, large values do not make inf * 0."""
    gate, up = _halves(gate_up)
    grad, sigmoid = dh.astype("float32"), _sigmoid(gate)
    slope = sigmoid * (1 + gate * (1 - sigmoid))
    both = jnp.concatenate([slope * grad * up, gate * sigmoid * grad], axis=1)
    return (both.astype(gate_up.dtype),)


def _halves(gate_up: Any) -> list[Any]:
    return jnp.split(gate_up.astype("float32"), 2, axis=1)


def _sigmoid(gate: Any) -> Any:
    """Without overflow for any finite gate: exp(-gate) = inf gives 0."""
    return 1 / (1 + jnp.exp(-gate))
