"""Token routing on the device: the stable order of assignments by expert, rows into it, and rows back.

An assignment is one chosen expert of one token, number `token * slots + slot`. `route` sorts assignments by
expert, `permute` copies each token's row to its assignments' positions, the products work on that array, and
`combine` adds the results back. Nothing waits for the device; no bit depends on how threads are timed.
"""

from dataclasses import dataclass
from typing import Any

from . import _arrays, _checks, _routing_host, _row_checks, _rowwise
from ._arrays import Site, View
from .errors import ArgumentError

__all__ = ["Routing", "combine", "combine_backward", "permute", "permute_backward", "route"]

_WRITABLE = frozenset(("out", "out[0]", "out[1]"))


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """Where each assignment goes. All arrays int32, contiguous, on one device.

    The arrays may be the caller's own and may hold anything: an assignment is *live* when its position in
    `inverse` lies below `offs[-1]` and `order` names it again there; every other one counts as dropped.

    Attributes:
        order: (tokens * slots,) assignments sorted by expert, stably; dropped ones last, stably.
        inverse: (tokens * slots,) position of each assignment, -1 if dropped.
        offs: (experts,) end position of each expert, as `grouped_mm` wants it; the last ends the live rows.
        counts: (experts,) assignments of each expert.
        tokens: Number of tokens; None lets calls that see the tokens derive it.
    """

    order: Any
    inverse: Any
    offs: Any
    counts: Any
    tokens: int | None = None


def route(expert_idx: Any, num_experts: int, *, out: Routing | None = None) -> Routing:
    """Sort assignments by expert, stably: equal experts keep token order.

    Args:
        expert_idx: (tokens, slots) int32 or int64, any strides. Ids outside [0, num_experts) are dropped; the
            same expert twice in one token is fine. The host does not read them.
        num_experts: 0 to 8192.
        out: Routing of an earlier call with the same shape, to be refilled; a CUDA graph with CuPy needs it.

    Returns:
        Routing, arrays in the family of `expert_idx`.

    Raises:
        ArgumentError: Shape, number of experts, or 2^31 assignments and more.
        DtypeError: `expert_idx` is not int32 or int64.

    Numerics:
        Integers only: the same ids give the same Routing, equal to `numpy.argsort(kind="stable")`.

    Cost:
        One launch for up to 4096 assignments, else three. Never waits; the first call compiles.

    Source:
        `kernels/route.cuh`.
    """
    _checks.required(("expert_idx", expert_idx))
    given = fields(out, "out") if out is not None else (None,) * 4
    names = ("out.order", "out.inverse", "out.offs", "out.counts")
    site, (ids, *outs) = _arrays.locate(
        ("expert_idx", expert_idx), *zip(names, given, strict=True), writable=frozenset(names)
    )
    experts = _row_checks.expert_ids(ids, num_experts)
    tokens, slots = ids.shape
    length = tokens * slots
    with site.guard():
        made = [
            _row_checks.result(site, "route", name, (extent,), "int32", array, view)
            for name, extent, array, view in zip(names, (length, length, experts, experts), given, outs, strict=True)
        ]
        targets = [view for _, view in made]
        for name, view in zip(names, targets, strict=True):
            _row_checks.contiguous(name, view)
        if site.is_cpu:
            _routing_host.route(_arrays.host(ids), experts, *map(_arrays.host, targets))
        else:
            _rowwise.run_route(site, ids, targets)
    if out is not None:
        return out
    order, inverse, offs, counts = (site.finish(array) for array, _ in made)
    return Routing(order, inverse, offs, counts, tokens)


def permute(x: Any, routing: Routing, *, out: Any = None) -> Any:
    """Copy each token's row to the positions of its assignments: `y[p] = x[order[p] // slots]`.

    Args:
        x: (tokens, h) bf16, fp16 or fp32, any strides.
        routing: Routing of these tokens.
        out: (tokens * slots, h) like the result, not overlapping `x`.

    Returns:
        (tokens * slots, h), dtype and family of `x`. Rows at and past `offs[-1]` are exact zeros.

    Raises:
        ArgumentError, DtypeError: Shapes that do not belong together, a dtype that is not offered.

    Numerics:
        Copies bits.

    Cost:
        One launch, never waits; 16-byte accesses where h, pitches and addresses allow it.

    Source:
        `permute_rows` in `kernels/routing.cu`.
    """
    site, (x_view, out_view), routes = _locate(routing, ("x", x), ("out", out))
    _checks.rows("x", x_view, "(tokens, h)")
    _row_checks.row_dtype("x", x_view)
    length = routes[0].shape[0]
    _row_checks.tokens_of(length, routing.tokens, x_view.shape[0], "x")
    with site.guard():
        shape = (length, x_view.shape[1])
        result, target = _row_checks.result(site, "permute", "out", shape, x_view.dtype, out, out_view, x_view)
        if site.is_cpu:
            _routing_host.permute(_arrays.host(x_view), _live(routes), _arrays.host(target))
        else:
            _rowwise.run(site, _rowwise.permute(routes, x_view, target))
    return result if out is not None else site.finish(result)


def permute_backward(dy: Any, routing: Routing, *, out: Any = None) -> Any:
    """Gradient of `permute`, a sum over each token's live slots: `dx[t] = sum_j dy[inverse[t * slots + j]]`.

    Args:
        dy: (tokens * slots, h) bf16, fp16 or fp32, any strides. Rows of dropped assignments are not read.
        routing: Routing given to `permute`.
        out: (tokens, h) like the result, not overlapping `dy`.

    Returns:
        (tokens, h), dtype and family of `dy`.

    Raises:
        ArgumentError, DtypeError: As `permute`; also when `routing.tokens` is None.

    Numerics:
        float32 sum in slot order, one rounding; the same bits in every run.

    Cost:
        One launch, never waits.

    Source:
        `combine_rows` in `kernels/routing.cu`.
    """
    site, (dy_view, out_view), routes = _locate(routing, ("dy", dy), ("out", out))
    _row_checks.assignment_rows("dy", dy_view, routes[0].shape[0])
    tokens = _row_checks.tokens_of(routes[0].shape[0], routing.tokens, None, "routing")
    return _combined(site, "permute_backward", routes, dy_view, None, tokens, out, out_view)


def combine(y: Any, routing: Routing, weights: Any, *, out: Any = None) -> Any:
    """Weighted sum of each token's rows: `out[t] = sum_j weights[t, j] * y[inverse[t * slots + j]]`.

    Args:
        y: (tokens * slots, h) bf16, fp16 or fp32, any strides. Rows of dropped assignments are not read.
        routing: Routing of these assignments.
        weights: (tokens, slots) fp32, bf16 or fp16, any strides. Weights of dropped assignments are not used.
        out: (tokens, h) like the result, not overlapping `y`.

    Returns:
        (tokens, h), dtype and family of `y`; zeros for a token without live assignments.

    Raises:
        ArgumentError, DtypeError: Shapes that do not belong together, a dtype that is not offered.

    Numerics:
        Product and sum in float32 in slot order 0, 1, ..., one rounding at the end; no atomics: the same bits
        in every run, and on the CPU.

    Cost:
        One launch, never waits.

    Source:
        `combine_rows` in `kernels/routing.cu`.
    """
    site, (y_view, w_view, out_view), routes = _locate(routing, ("y", y), ("weights", weights), ("out", out))
    _row_checks.assignment_rows("y", y_view, routes[0].shape[0])
    tokens = _row_checks.weights_of(w_view, routes[0].shape[0], routing.tokens)
    return _combined(site, "combine", routes, y_view, w_view, tokens, out, out_view)


def combine_backward(
    dy: Any, y: Any, routing: Routing, weights: Any, *, out: tuple[Any, Any] | None = None
) -> tuple[Any, Any]:
    """Gradients of `combine` for its rows and its weights.

    Assignment i of token t at p = inverse[i]: `d_y[p] = weights[i] dy[t]`, `d_weights[i] = <dy[t], y[p]>`.

    Args:
        dy: (tokens, h), dtype of `y`, any strides.
        y: (tokens * slots, h) given to `combine`. Rows of dropped assignments are not read.
        routing: Routing given to `combine`.
        weights: (tokens, slots) given to `combine`.
        out: Pair of arrays like the result; the second one contiguous.

    Returns:
        d_y (tokens * slots, h), dtype and family of `dy`, exact zeros at and past `offs[-1]`; and d_weights
        (tokens, slots) fp32, 0 for dropped assignments.

    Raises:
        ArgumentError, DtypeError: Shapes that do not belong together, a dtype that is not offered.

    Numerics:
        d_y: one float32 product, one rounding. d_weights: float32 sum in an order that h and the alignment of
        the arrays fix; the same bits in every run.

    Cost:
        One launch, never waits.

    Source:
        `combine_rows_backward` in `kernels/routing.cu`.
    """
    grad_out, weight_out = out if out is not None else (None, None)
    site, (dy_view, y_view, w_view, *outs), routes = _locate(
        routing, ("dy", dy), ("y", y), ("weights", weights), ("out[0]", grad_out), ("out[1]", weight_out)
    )
    length = routes[0].shape[0]
    _row_checks.assignment_rows("y", y_view, length)
    _checks.same_dtype("dy", dy_view, "y", y_view)
    tokens = _row_checks.weights_of(w_view, length, routing.tokens)
    why = f"as `y` has shape {y_view.shape} and `weights` has shape {w_view.shape}"
    _row_checks.of_shape("dy", dy_view, (tokens, y_view.shape[1]), why)
    call = "combine_backward"
    with site.guard():
        d_y, grad = _row_checks.result(
            site, call, "out[0]", y_view.shape, dy_view.dtype, grad_out, outs[0], dy_view, y_view
        )
        d_weights, rates = _row_checks.result(
            site, call, "out[1]", w_view.shape, "float32", weight_out, outs[1], w_view
        )
        if weight_out is not None:
            _row_checks.contiguous("out[1]", rates)
        if site.is_cpu:
            grads = _arrays.host(dy_view), _arrays.host(y_view), _live(routes)
            _routing_host.combine_backward(*grads, *map(_arrays.host, (w_view, grad, rates)))
        else:
            _rowwise.run(site, _rowwise.combine_backward(routes, dy_view, y_view, w_view, grad, rates))
    return (d_y, d_weights) if out is not None else (site.finish(d_y), site.finish(d_weights))


def _combined(
    site: Site,
    call: str,
    routes: list[View],
    y: View,
    weights: View | None,
    tokens: int,
    out: Any,
    out_view: View | None,
) -> Any:
    """What `combine` and `permute_backward` share."""
    with site.guard():
        result, target = _row_checks.result(site, call, "out", (tokens, y.shape[1]), y.dtype, out, out_view, y)
        if site.is_cpu:
            given = None if weights is None else _arrays.host(weights)
            _routing_host.combine(_arrays.host(y), _live(routes), given, _arrays.host(target))
        else:
            _rowwise.run(site, _rowwise.combine(routes, y, weights, target))
    return result if out is not None else site.finish(result)


def _locate(routing: Routing, *named: tuple[str, Any]) -> tuple[Site, list[View], list[View]]:
    """Site, views of the named arrays (the result takes the first one's family), views of the routing."""
    order, inverse, offs, _ = fields(routing, "routing")
    named = (*named, ("routing.order", order), ("routing.inverse", inverse), ("routing.offs", offs))
    _checks.required(*(each for each in named if each[0] not in _WRITABLE))
    site, views = _arrays.locate(*named, writable=_WRITABLE)
    routes = views[-3:]
    _row_checks.routes(*routes)
    return site, views[:-3], routes


def fields(routing: Any, name: str) -> tuple[Any, Any, Any, Any]:
    """The four arrays of a Routing."""
    if not isinstance(routing, Routing):
        raise ArgumentError(
            f"`{name}` is a {type(routing).__name__}: expected the Routing that `route` returned; pass that."
        )
    return routing.order, routing.inverse, routing.offs, routing.counts


def _live(routes: list[View]) -> Any:
    return _routing_host.live_rows(*map(_arrays.host, routes))
