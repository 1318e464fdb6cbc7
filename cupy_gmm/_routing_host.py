"""Routing and activation in NumPy: CPU path of `routing` and `moe`, and the oracle of their kernels.

Twins of `kernels/routing.cu` and `kernels/activation.cu`: the same rules for dropped assignments, the same
points of rounding, the same order of sums. Rows are bf16 (`ml_dtypes`), fp16 or fp32 arrays of any strides.
Nothing here checks its arguments: `routing` and `moe` do that.
"""

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "combine", "combine_backward", "live_rows", "permute", "route", "silu_mul", "silu_mul_backward",
]  # fmt: skip

Array = NDArray
Float32 = NDArray[np.float32]


def route(expert_idx: Array, experts: int, order: Array, inverse: Array, offs: Array, counts: Array) -> None:
    """Stable counting sort of assignments by expert; ids outside [0, experts) last, in order.

    Args:
        expert_idx: (tokens, slots) int32 or int64.
        experts: number of experts.
        order: (tokens * slots,) int32, overwritten: assignment at each position.
        inverse: (tokens * slots,) int32, overwritten: position of each assignment, -1 if dropped.
        offs: (experts,) int32, overwritten: end position of each expert.
        counts: (experts,) int32, overwritten.
    """
    ids = expert_idx.astype(np.int64).reshape(-1)
    bucket = np.where((ids >= 0) & (ids < experts), ids, experts)
    order[...] = np.argsort(bucket, kind="stable")
    counts[...] = np.bincount(bucket, minlength=experts + 1)[:experts]
    offs[...] = np.cumsum(counts)
    inverse[order] = np.arange(ids.size)
    inverse[bucket == experts] = -1


def live_rows(order: Array, inverse: Array, offs: Array) -> NDArray[np.int64]:
    """Position of each assignment, -1 where it is dropped; safe for arrays that hold anything.

    An assignment is live when its position lies below the last offset and `order` and `inverse` agree on it.

    Args:
        order: (assignments,) int32.
        inverse: (assignments,) int32.
        offs: (experts,) int32.

    Returns:
        (assignments,) int64; no position occurs twice.
    """
    used = min(max(int(offs[-1]), 0), order.size) if offs.size else 0
    rows = inverse.astype(np.int64)
    live = np.flatnonzero((rows >= 0) & (rows < used))
    live = live[order[rows[live]] == live]
    result = np.full(rows.size, -1, np.int64)
    result[live] = rows[live]
    return result


def permute(x: Array, rows: NDArray[np.int64], out: Array) -> None:
    """`out[rows[t * slots + j]] = x[t]`, zeros in all other rows.

    Args:
        x: (tokens, H).
        rows: (tokens * slots,) from `live_rows`.
        out: (tokens * slots, H), overwritten.
    """
    out[...] = 0
    live = np.flatnonzero(rows >= 0)
    if live.size:
        out[rows[live]] = x[live // (rows.size // len(x))]


def combine(y: Array, rows: NDArray[np.int64], weights: Array | None, out: Array) -> None:
    """`out[t] = sum over live slots j of weights[t, j] * y[rows[t * slots + j]]`, in slot order.

    Args:
        y: (tokens * slots, H).
        rows: (tokens * slots,) from `live_rows`.
        weights: (tokens, slots), or None for ones.
        out: (tokens, H), overwritten.

    Numerics:
        Product and sum in float32, each rounded; one rounding to the type of `out`.
    """
    total = np.zeros(out.shape, np.float32)
    for slot, at in enumerate(_by_slot(rows, len(out))):
        live = np.flatnonzero(at >= 0)
        part = y[at[live]].astype(np.float32)
        with np.errstate(all="ignore"):
            if weights is not None:
                part *= weights[live, slot].astype(np.float32)[:, None]
            total[live] += part
    _round_into(out, total)


def combine_backward(
    dy: Array, y: Array, rows: NDArray[np.int64], weights: Array, d_y: Array, d_weights: Float32
) -> None:
    """Gradients of `combine`: `d_y[row] = weight * dy[t]`, `d_weights[t, j] = <dy[t], y[row]>`, else zeros.

    Args:
        dy: (tokens, H).
        y: (tokens * slots, H).
        rows: (tokens * slots,) from `live_rows`.
        weights: (tokens, slots).
        d_y: (tokens * slots, H), overwritten.
        d_weights: (tokens, slots) float32, overwritten.
    """
    d_y[...] = 0
    d_weights[...] = 0
    for slot, at in enumerate(_by_slot(rows, len(dy))):
        live = np.flatnonzero(at >= 0)
        grad = dy[live].astype(np.float32)
        with np.errstate(all="ignore"):
            d_weights[live, slot] = np.sum(grad * y[at[live]].astype(np.float32), axis=1, dtype=np.float32)
            grad *= weights[live, slot].astype(np.float32)[:, None]
            d_y[at[live]] = grad.astype(d_y.dtype)


def silu_mul(gate_up: Array, out: Array) -> None:
    """`out = silu(gate) * up` for rows of [gate | up], in float32, rounded once.

    Args:
        gate_up: (rows, 2 * inner).
        out: (rows, inner), overwritten.
    """
    gate, up = _halves(gate_up)
    with np.errstate(all="ignore"):
        _round_into(out, gate * _sigmoid(gate) * up)


def silu_mul_backward(gate_up: Array, dh: Array, out: Array) -> None:
    """Gradient of `silu_mul`: rows of [d_gate | d_up], in float32, rounded once.

    Args:
        gate_up: (rows, 2 * inner).
        dh: (rows, inner).
        out: (rows, 2 * inner), overwritten.
    """
    gate, up = _halves(gate_up)
    grad = dh.astype(np.float32)
    one = np.float32(1)
    with np.errstate(all="ignore"):
        sigmoid = _sigmoid(gate)
        slope = sigmoid * (one + gate * (one - sigmoid))
        inner = gate.shape[1]
        _round_into(out[:, :inner], slope * grad * up)
        _round_into(out[:, inner:], gate * sigmoid * grad)


def _by_slot(rows: NDArray[np.int64], tokens: int) -> NDArray[np.int64]:
    """(slots, tokens); no slots where there are no tokens."""
    return rows.reshape(tokens, -1).T if rows.size else rows.reshape(0, tokens)


def _halves(gate_up: Array) -> tuple[Float32, Float32]:
    inner = gate_up.shape[1] // 2
    return gate_up[:, :inner].astype(np.float32), gate_up[:, inner:].astype(np.float32)


def _sigmoid(gate: Float32) -> Float32:
    """Without overflow for any finite gate: exp(-gate) = inf gives 0."""
    one = np.float32(1)
    sigmoid: Float32 = one / (one + np.exp(-gate))
    return sigmoid


def _round_into(out: Array, values: Array) -> None:
    with np.errstate(all="ignore"):
        out[...] = values.astype(out.dtype)
