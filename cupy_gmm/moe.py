"""The expert layer of a mixture-of-experts model, forward and backward, from the ops below it.

`expert_ffn` routes, gathers, multiplies, activates, multiplies and combines; each step is public, so layers
of another shape are put together the same way. Arrays of any framework, on the GPU and on the CPU.
"""

from dataclasses import dataclass
from typing import Any

from . import _arrays, _checks, _routing_host, _row_checks, _rowwise, ops
from ._arrays import View
from .errors import ArgumentError
from .routing import Routing, combine, combine_backward, permute, permute_backward, route

__all__ = ["Saved", "expert_ffn", "expert_ffn_backward", "silu_mul", "silu_mul_backward"]

_PRODUCT_DTYPES = ("bfloat16", "float16")
_OUT = frozenset({"out"})


def silu_mul(gate_up: Any, *, out: Any = None) -> Any:
    """The gated activation `h = silu(gate) * up` of rows [gate | up], with `silu(g) = g / (1 + exp(-g))`.

    Args:
        gate_up: (rows, 2 * inner) bf16, fp16 or fp32, any strides; the left half is the gate.
        out: (rows, inner) like the result, not overlapping `gate_up`.

    Returns:
        (rows, inner), dtype and family of `gate_up`. Rows of zeros give zeros.

    Raises:
        ArgumentError, DtypeError: No two halves, a shape that does not fit, a dtype that is not offered.

    Numerics:
        float32 to a few units in the last place, one rounding. Any finite gate is safe: exp(-gate) = inf
        gives 0.

    Cost:
        One launch, never waits; 16-byte accesses where inner, pitches and addresses allow it.

    Source:
        `silu_mul` in `kernels/activation.cu`.
    """
    _checks.required(("gate_up", gate_up))
    site, (gate_up_view, out_view) = _arrays.locate(("gate_up", gate_up), ("out", out), writable=_OUT)
    shape = _row_checks.gate_up_rows(gate_up_view)
    with site.guard():
        result, target = _row_checks.result(
            site, "silu_mul", "out", shape, gate_up_view.dtype, out, out_view, gate_up_view
        )
        if site.is_cpu:
            _routing_host.silu_mul(_arrays.host(gate_up_view), _arrays.host(target))
        else:
            _rowwise.run(site, _rowwise.silu_mul(gate_up_view, target))
    return result if out is not None else site.finish(result)


def silu_mul_backward(gate_up: Any, dh: Any, *, out: Any = None) -> Any:
    """Gradient of `silu_mul`: rows [d_gate | d_up].

    With s = sigmoid(gate): `d_gate = dh * up * s * (1 + gate * (1 - s))` and `d_up = dh * gate * s`.

    Args:
        gate_up: (rows, 2 * inner) given to `silu_mul`.
        dh: (rows, inner), dtype of `gate_up`, any strides.
        out: (rows, 2 * inner) like the result, overlapping neither input.

    Returns:
        (rows, 2 * inner), dtype and family of `gate_up`.

    Raises:
        ArgumentError, DtypeError: As `silu_mul`, and `dh` that does not fit `gate_up`.

    Numerics:
        float32 to a few units in the last place, one rounding. Any finite gate is safe.

    Cost:
        One launch, never waits.

    Source:
        `silu_mul_backward` in `kernels/activation.cu`.
    """
    _checks.required(("gate_up", gate_up), ("dh", dh))
    site, views = _arrays.locate(("gate_up", gate_up), ("dh", dh), ("out", out), writable=_OUT)
    gate_up_view, dh_view, out_view = views
    shape = _row_checks.gate_up_rows(gate_up_view)
    _checks.same_dtype("dh", dh_view, "gate_up", gate_up_view)
    _row_checks.of_shape("dh", dh_view, shape, f"as `gate_up` has shape {gate_up_view.shape}")
    with site.guard():
        result, target = _row_checks.result(
            site, "silu_mul_backward", "out", gate_up_view.shape, gate_up_view.dtype, out, out_view,
            gate_up_view, dh_view,
        )  # fmt: skip
        if site.is_cpu:
            _routing_host.silu_mul_backward(*map(_arrays.host, (gate_up_view, dh_view, target)))
        else:
            _rowwise.run(site, _rowwise.silu_mul_backward(gate_up_view, dh_view, target))
    return result if out is not None else site.finish(result)


@dataclass(frozen=True, slots=True, eq=False)
class Saved:
    """What `expert_ffn` keeps for `expert_ffn_backward`: the arrays themselves: do not write to them between.

    Attributes:
        routing: Where each assignment went.
        schedule: Schedule of all six products.
        xs: (tokens * slots, h) gathered rows.
        gate_up: (tokens * slots, 2 * inner) before the activation.
        hidden: (tokens * slots, inner) after it.
        ys: (tokens * slots, h) before combining.
        w_gate_up: The caller's weights.
        w_down: The caller's weights.
        expert_weight: The caller's weights of the assignments.
    """

    routing: Routing
    schedule: Any
    xs: Any
    gate_up: Any
    hidden: Any
    ys: Any
    w_gate_up: Any
    w_down: Any
    expert_weight: Any


def expert_ffn(x: Any, w_gate_up: Any, w_down: Any, expert_idx: Any, expert_weight: Any, *, save: bool = False) -> Any:
    """Each token through its chosen experts, weighted and added.

        y[t] = sum_j expert_weight[t, j] * (silu(x[t] @ gate_e) * (x[t] @ up_e)) @ w_down[e]

    with e = expert_idx[t, j] and w_gate_up[e] = [gate_e | up_e].

    Args:
        x: (T, h) bf16 or fp16, any strides.
        w_gate_up: (G, h, 2 * inner), [gate | up] along the last axis, dtype of `x`; `.mT` of a stored
            (G, 2 * inner, h) is as fast.
        w_down: (G, inner, h), dtype of `x`.
        expert_idx: (T, k) int32 or int64 on the device; ids outside [0, G) are dropped. Not read by the host.
        expert_weight: (T, k) fp32, bf16 or fp16.
        save: Also return what `expert_ffn_backward` needs.

    Returns:
        y (T, h), dtype and family of `x`; with `save` the pair (y, Saved).

    Raises:
        ArgumentError, DtypeError: A shape that does not fit the others, a dtype that is not offered. Inside a
            CUDA graph capture with CuPy arrays as well, as CuPy's pool has no memory that belongs to a graph:
            capture PyTorch tensors, or call the steps one by one with `out=`.

    Numerics:
        float32 inside each step; rounded to the dtype of `x` after gate and up, the activation, down, and the
        combination, which adds in slot order. The same bits in every run.

    Cost:
        Four launches beside the schedule and two products, six for more than 4096 assignments; never waits.

    Source:
        `route`, `permute`, `grouped_mm`, `silu_mul`, `combine`.
    """
    named = (
        ("x", x), ("w_gate_up", w_gate_up), ("w_down", w_down),
        ("expert_idx", expert_idx), ("expert_weight", expert_weight),
    )  # fmt: skip
    _checks.required(*named)
    site, views = _arrays.locate(*named)
    check_layer(*views)
    if site.capturing():
        raise ArgumentError(
            f"`x` is an array of {site.family} inside a CUDA graph capture: expected PyTorch tensors, as "
            "CuPy's pool has no memory that belongs to a graph; or call `route`, `permute`, `make_schedule`, "
            "`grouped_mm`, `silu_mul` and `combine` one by one with `out=`."
        )
    routing = route(expert_idx, views[1].shape[0])
    xs = permute(x, routing)
    schedule = ops.make_schedule(routing.offs, xs.shape[0])
    gate_up = ops.grouped_mm(xs, w_gate_up, schedule)
    hidden = silu_mul(gate_up)
    ys = ops.grouped_mm(hidden, w_down, schedule)
    y = combine(ys, routing, expert_weight)
    if not save:
        return y
    return y, Saved(routing, schedule, xs, gate_up, hidden, ys, w_gate_up, w_down, expert_weight)


def expert_ffn_backward(dy: Any, saved: Saved) -> tuple[Any, Any, Any, Any]:
    """Gradients of `expert_ffn` for its rows and all its weights.

    Args:
        dy: (T, h), dtype of `x`.
        saved: What `expert_ffn(..., save=True)` returned.

    Returns:
        dx (T, h), dw_gate_up (G, h, 2 * inner), dw_down (G, inner, h), contiguous and of the dtype of `x`,
        and dexpert_weight (T, k) fp32. Exact zeros for experts without tokens and for dropped assignments.

    Raises:
        ArgumentError, DtypeError: `dy` does not fit, or `saved` is something else.

    Numerics:
        As `expert_ffn`: float32 inside each step, one rounding after it, the same bits in every run.

    Cost:
        Three launches beside four products, which share the schedule of the forward pass; never waits.

    Source:
        `combine_backward`, `grouped_mm`, `grouped_mm_wgrad`, `silu_mul_backward`, `permute_backward`.
    """
    if not isinstance(saved, Saved):
        raise ArgumentError(
            f"`saved` is a {type(saved).__name__}: expected the second result of "
            "`expert_ffn(..., save=True)`; pass that."
        )
    s = saved
    shape = (s.routing.tokens, s.ys.shape[1])
    if tuple(getattr(dy, "shape", shape)) != shape:
        raise ArgumentError(
            f"`dy` has shape {tuple(dy.shape)}: expected {shape}, the shape of what `expert_ffn` returned; pass its "
            "gradient."
        )
    d_ys, d_weight = combine_backward(dy, s.ys, s.routing, s.expert_weight)
    d_hidden = ops.grouped_mm(d_ys, _transposed(s.w_down), s.schedule)
    dw_down = ops.grouped_mm_wgrad(s.hidden, d_ys, s.schedule)
    d_gate_up = silu_mul_backward(s.gate_up, d_hidden)
    d_xs = ops.grouped_mm(d_gate_up, _transposed(s.w_gate_up), s.schedule)
    dw_gate_up = ops.grouped_mm_wgrad(s.xs, d_gate_up, s.schedule)
    return permute_backward(d_xs, s.routing), dw_gate_up, dw_down, d_weight


def _transposed(weights: Any) -> Any:
    """The last two axes swapped: a view, but for JAX, which has none."""
    return weights.mT if hasattr(weights, "mT") else weights.swapaxes(-1, -2)


def check_layer(x: View, w_gate_up: View, w_down: View, expert_idx: View, expert_weight: View) -> None:
    """Shapes and dtypes of a whole layer, named as the caller knows them."""
    _checks.rows("x", x, "(tokens, h)")
    _checks.rank("w_gate_up", w_gate_up, 3, "(experts, h, 2 * inner)")
    _checks.rank("w_down", w_down, 3, "(experts, inner, h)")
    _row_checks.row_dtype("x", x, _PRODUCT_DTYPES)
    _checks.same_dtype("w_gate_up", w_gate_up, "x", x)
    _checks.same_dtype("w_down", w_down, "x", x)
    (tokens, h), (experts, w_h, width) = x.shape, w_gate_up.shape
    if w_h != h or width % 2:
        hint = "; pass `w_gate_up.mT`" if width == h else "; pass [gate | up] along the last axis"
        raise ArgumentError(
            f"`w_gate_up` has shape {w_gate_up.shape}: expected (experts, {h}, 2 * inner), as `x` has shape "
            f"{x.shape}{hint}."
        )
    if w_down.shape != (experts, width // 2, h):
        hint = "; pass `w_down.mT`" if w_down.shape == (experts, h, width // 2) else ""
        raise ArgumentError(
            f"`w_down` has shape {w_down.shape}: expected {(experts, width // 2, h)}, as `w_gate_up` has "
            f"shape {w_gate_up.shape}{hint}."
        )
    _row_checks.expert_ids(expert_idx, experts)
    if expert_idx.shape[0] != tokens:
        raise ArgumentError(
            f"`expert_idx` has shape {expert_idx.shape}: expected ({tokens}, slots), as `x` has shape "
            f"{x.shape}; pass a row for each token."
        )
    _row_checks.row_dtype("expert_weight", expert_weight, ("float32", "bfloat16", "float16"))
    why = "as `expert_idx` has; pass a weight for each assignment"
    _row_checks.of_shape("expert_weight", expert_weight, expert_idx.shape, why)
