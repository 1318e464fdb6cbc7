"""The rules by which JAX differentiates the forward product: both gradients are products of the same schedule.

    dx = dy @ w[g].T        the weights read transposed where they lie
    dw[g] = x.T @ dy

Used by the public functions; must not know platforms.
"""

import functools
from dataclasses import replace
from typing import Any

import jax

from .._config import WGRAD
from . import _axes, _lowering
from ._wire import NONE, ProductCall


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _differentiable(x: Any, w: Any, table: Any, call: ProductCall) -> Any:
    return _lowering.product(x, w, table, call=call)


def _forward(x: Any, w: Any, table: Any, call: ProductCall) -> Any:
    return _lowering.product(x, w, table, call=call), (x, w, table)


def _backward(call: ProductCall, saved: Any, dy: Any) -> Any:
    x, w, table = saved
    dy = dy.astype(x.dtype)
    common = replace(call, out_dtype=call.dtype, config=NONE)
    dx = _lowering.product(dy, w, table, call=replace(common, k=call.n, n=call.k, transposed=not call.transposed))
    dw = _lowering.product(x, dy, table, call=replace(common, op=WGRAD, transposed=False))
    return dx, dw, None


_differentiable.defvjp(_forward, _backward)


def grouped_mm(x: Any, w: Any, table: Any, call: ProductCall) -> Any:
    """The forward product, with its gradients."""
    return _differentiable(*_axes.alike(x, w, table), call)
