"""Routing and activation as JAX traces them, and their gradients: calls of ours on CUDA, `jax.numpy` elsewhere.

`layer` calls these with arguments that are checked and hold something. Each gradient is a call again. As for the
products, the platform is chosen when a program is lowered, from shapes alone, and what JAX could transform without
meaning is refused with a sentence.
"""

import functools
from dataclasses import replace
from typing import Any

import jax
from jax import lax

from ..errors import UnsupportedError
from . import _axes, _lowering, _row_fallback, _row_wire
from ._row_wire import RowsCall


def route(ids: Any, call: RowsCall) -> tuple[Any, Any, Any, Any]:
    """order, inverse, offs and counts. Integers of integers: a gradient passes by."""
    return _route(lax.stop_gradient(ids), call=call)  # type: ignore[no-any-return]


@functools.partial(jax.jit, static_argnames="call", inline=True)
def _route(ids: Any, call: RowsCall) -> Any:
    return _by_platform(call, ids)


@functools.partial(jax.jit, static_argnames="call", inline=True)
def _first_order(*operands: Any, call: RowsCall) -> Any:
    """Results of a call. Not differentiable: the rules are below."""

    @jax.custom_jvp
    def first_order(*operands: Any) -> Any:
        return _by_platform(call, *operands)

    @first_order.defjvp
    def refuse(*_: Any) -> Any:
        name = call.op.removesuffix("_backward")
        raise UnsupportedError(
            f"{call.op} was differentiated where it has no derivative, as in a second derivative: expected `jax.grad` "
            f"or `jax.vjp` of `{name}` or `expert_ffn`, taken once; write the layer in `jax.numpy` for more."
        )

    return first_order(*operands)


def _by_platform(call: RowsCall, *operands: Any) -> Any:
    def elsewhere(*operands: Any) -> Any:
        return _row_fallback.run(call, *operands)

    def cuda(*operands: Any) -> Any:
        results = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in call.results]
        found = _lowering.foreign(_row_wire.TARGET[call.op], results, operands, call)
        return tuple(found[:4])  # the fifth is scratch

    advice = (
        "expected the tokens of all examples as one axis; reshape instead of `vmap`, or use `jax.lax.map` over the "
        "examples."
    )
    return _lowering.by_platform(call.op, advice, cuda, elsewhere, *operands)


# ---- permute


def permute(x: Any, routes: tuple[Any, ...], call: RowsCall) -> Any:
    """Rows of tokens to the positions of their assignments."""
    return _permute(*_axes.alike(x, *routes), call)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _permute(x: Any, order: Any, inverse: Any, offs: Any, call: RowsCall) -> Any:
    return _first_order(x, order, inverse, offs, call=call)[0]


def _permute_forward(x: Any, order: Any, inverse: Any, offs: Any, call: RowsCall) -> Any:
    return _first_order(x, order, inverse, offs, call=call)[0], (order, inverse, offs)


def _permute_backward(call: RowsCall, routes: Any, dy: Any) -> Any:
    return _first_order(dy, *routes, call=replace(call, op="permute_backward"))[0], None, None, None


_permute.defvjp(_permute_forward, _permute_backward)


# ---- combine


def combine(y: Any, routes: tuple[Any, ...], weights: Any, call: RowsCall) -> Any:
    """Weighted sums of the rows of each token's assignments."""
    return _combine(*_axes.alike(y, *routes, weights), call)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _combine(y: Any, order: Any, inverse: Any, offs: Any, weights: Any, call: RowsCall) -> Any:
    return _first_order(y, order, inverse, offs, weights, call=call)[0]


def _combine_forward(y: Any, order: Any, inverse: Any, offs: Any, weights: Any, call: RowsCall) -> Any:
    saved = y, order, inverse, offs, weights
    return _first_order(*saved, call=call)[0], saved


def _combine_backward(call: RowsCall, saved: Any, dy: Any) -> Any:
    d_y, d_weights = _first_order(dy, *saved, call=replace(call, op="combine_backward"))
    return d_y, None, None, None, d_weights.astype(saved[4].dtype)


_combine.defvjp(_combine_forward, _combine_backward)


# ---- silu_mul


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def silu_mul(gate_up: Any, call: RowsCall) -> Any:
    """The gated activation."""
    return _first_order(gate_up, call=call)[0]


def _silu_mul_forward(gate_up: Any, call: RowsCall) -> Any:
    return _first_order(gate_up, call=call)[0], gate_up


def _silu_mul_backward(call: RowsCall, gate_up: Any, dh: Any) -> Any:
    return (_first_order(gate_up, dh, call=replace(call, op="silu_mul_backward"))[0],)


silu_mul.defvjp(_silu_mul_forward, _silu_mul_backward)
