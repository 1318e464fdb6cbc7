"""The demo's judge: an expert layer as a plain loop over experts, in float64, with a bound on every error.

Called by the demo. Shares nothing with the library on purpose: no module of it is imported, only the
meaning of `expert_ffn` is known, with the points at which it rounds. Runs on NumPy or CuPy arrays alike
(`xp`).

Each quantity is a pair (value, slack): what float64 gives with the same roundings, and how far float32 sums
may lie from it, element by element. A sum of K products may be off by 4 sqrt(K) 2^-23 (|A||B|); a value
near a rounding boundary may land on either side of it, and the slack then says how far apart the sides are.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

# What one float32 operation may add, relative to its result; sigmoid is allowed some more, for fast
# exponentials.
_FP32, _SIGMOID = 2.0**-23, 2.0**-20
_BITS = {"bfloat16": 8, "float16": 11}


@dataclasses.dataclass(frozen=True, slots=True)
class Layer:
    """All inputs of one step, forward and backward, as arrays of one module (`xp`)."""

    xp: Any
    x: Any
    w_gate_up: Any
    w_down: Any
    expert_idx: Any
    expert_weight: Any
    dy: Any


@dataclasses.dataclass(slots=True)
class Pair:
    """A value and how far a right answer may lie from it, element by element."""

    value: Any
    slack: Any


def judge(layer: Layer, got: dict[str, Any], advance: Callable[[str], None]) -> dict[str, float]:
    """Compute the layer, forward and backward, one expert after the other, and compare.

    Args:
        layer: the inputs.
        got: y, dx, dw_gate_up, dw_down and dexpert_weight, of the right shapes.
        advance: called with a word after each expert.

    Returns:
        For each of these, the largest error over its bound: 1 or less is right.
    """
    xp = layer.xp
    top_k, like = layer.expert_idx.shape[1], layer.x.dtype.name
    x, dy = layer.x.astype("float64"), layer.dy.astype("float64")
    y, dx, dexpert_weight = (
        Pair(xp.zeros(shape), xp.zeros(shape)) for shape in (x.shape, x.shape, layer.expert_idx.shape)
    )
    worst_dw = {"dw_gate_up": 0.0, "dw_down": 0.0}
    for expert in range(layer.w_down.shape[0]):
        token, slot = xp.nonzero(layer.expert_idx == expert)
        if token.size:
            weight = layer.expert_weight[token, slot].astype("float64")[:, None]
            weights = (_exact(layer.w_gate_up[expert]), _exact(layer.w_down[expert]))
            part = _expert(xp, like, _exact(x[token]), weights, weight, _exact(dy[token]))
            _add(y, token, slot, part["y"], top_k)
            _add(dx, token, slot, part["dx"], top_k)
            dexpert_weight.value[token, slot] = part["dexpert_weight"].value
            dexpert_weight.slack[token, slot] = part["dexpert_weight"].slack
            for name in worst_dw:
                worst_dw[name] = max(worst_dw[name], worst(xp, got[name][expert], part[name]))
        advance(f"expert {expert}")
    whole = {"y": y, "dx": dx, "dexpert_weight": dexpert_weight}
    return {name: worst(xp, got[name], want) for name, want in whole.items()} | worst_dw


def worst(xp: Any, got: Any, want: Pair) -> float:
    """Largest error over its bound: 1 or less is right. NaN counts as infinitely wrong.

    The bound is the slack, plus half a step of the type that `got` is stored in.
    """
    rounding = 2.0 ** -_BITS.get(got.dtype.name, 24)
    error = xp.abs(got.astype("float64") - want.value)
    bound = want.slack * (1 + rounding) + rounding * xp.abs(want.value) + 2.0**-130
    ratio = float((error / bound).max()) if error.size else 0.0
    return ratio if math.isfinite(ratio) else math.inf


def _expert(xp: Any, like: str, x: Pair, weights: tuple[Pair, Pair], weight: Any, dy: Pair) -> dict[str, Pair]:
    """One expert on its own tokens: what it adds to y and dx, and its gradients."""
    w_gate_up, w_down = weights
    inner = w_down.value.shape[0]
    gate_up = _round(xp, _product(xp, x, w_gate_up), like)
    gate, up = _columns(gate_up, slice(inner)), _columns(gate_up, slice(inner, None))
    sigmoid = 1 / (1 + xp.exp(-gate.value))
    silu, slope = gate.value * sigmoid, sigmoid * (1 + gate.value * (1 - sigmoid))
    # The slope of silu is itself steep by 1/2 at most, and the sigmoid of a device is not exact.
    of_silu = (xp.abs(slope) + 0.5 * gate.slack) * gate.slack + _SIGMOID * xp.abs(silu)
    of_slope = 0.5 * gate.slack + _SIGMOID * (1 + xp.abs(gate.value))
    h = _round(xp, _times(xp, Pair(silu, of_silu), up), like)
    y = _round(xp, _product(xp, h, w_down), like)

    weighted = weight * dy.value
    dy_expert = _round(xp, Pair(weighted, _FP32 * xp.abs(weighted)), like)
    dh = _round(xp, _product(xp, dy_expert, _turn(w_down)), like)
    dgate = _times(xp, _times(xp, dh, up), Pair(slope, of_slope))
    dgate_up = _round(xp, _beside(xp, dgate, _times(xp, dh, Pair(silu, of_silu))), like)
    summed = 4 * math.sqrt(dy.value.shape[1]) * _FP32 * xp.abs(y.value) + y.slack
    return {
        "y": Pair(weight * y.value, weight * y.slack),
        "dx": _round(xp, _product(xp, dgate_up, _turn(w_gate_up)), like),
        "dw_gate_up": _product(xp, _turn(x), dgate_up),
        "dw_down": _product(xp, _turn(h), dy_expert),
        "dexpert_weight": Pair((dy.value * y.value).sum(1), (xp.abs(dy.value) * summed).sum(1)),
    }


def _exact(array: Any) -> Pair:
    return Pair(array.astype("float64"), None)


def _product(xp: Any, a: Pair, b: Pair) -> Pair:
    """a @ b: each operand's slack goes through the other's size, and the float32 sum adds its own."""
    size_a, size_b = xp.abs(a.value).astype("float32"), xp.abs(b.value).astype("float32")
    from_a = 4 * math.sqrt(a.value.shape[1]) * _FP32 * size_a
    if a.slack is not None:
        from_a = from_a + a.slack
    slack = from_a @ size_b
    if b.slack is not None:
        slack = slack + (size_a if a.slack is None else size_a + a.slack) @ b.slack
    return Pair(a.value @ b.value, slack * 1.001)


def _times(xp: Any, a: Pair, b: Pair) -> Pair:
    value = a.value * b.value
    return Pair(value, xp.abs(a.value) * b.slack + a.slack * (xp.abs(b.value) + b.slack) + _FP32 * xp.abs(value))


def _round(xp: Any, a: Pair, like: str) -> Pair:
    value = _nearest(a.value, like)
    low, high = _nearest(a.value - a.slack, like), _nearest(a.value + a.slack, like)
    return Pair(value, xp.maximum(high - value, value - low).astype("float32"))


def _nearest(value: Any, like: str) -> Any:
    """Round float64 to the significand of the type (Veltkamp's split): a multiply and two subtractions."""
    scaled = value * (2.0 ** (53 - _BITS[like]) + 1)
    return scaled - (scaled - value)


def _columns(a: Pair, part: slice) -> Pair:
    return Pair(a.value[:, part], a.slack[:, part])


def _beside(xp: Any, a: Pair, b: Pair) -> Pair:
    return Pair(xp.concatenate([a.value, b.value], 1), xp.concatenate([a.slack, b.slack], 1))


def _turn(a: Pair) -> Pair:
    return Pair(a.value.T, None if a.slack is None else a.slack.T)


def _add(total: Pair, token: Any, slot: Any, part: Pair, top_k: int) -> None:
    # Slot by slot: within one slot no token comes twice, whatever the routing.
    for each in range(top_k):
        here = slot == each
        total.value[token[here]] += part.value[here]
        # The sum over the slots is one of float32, too.
        total.slack[token[here]] += part.slack[here] + (top_k + 1) * _FP32 * abs(part.value[here])
