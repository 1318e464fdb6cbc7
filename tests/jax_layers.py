"""Inputs of an expert layer, and its gradients inside JAX and on the NumPy path: for the tests of `cupy_gmm.jax`."""

from collections.abc import Callable
from typing import Any

import numpy as np

import cupy_gmm
from tests import oracle, routes
from tests.backends import DTYPES

TOKENS, SLOTS, EXPERTS, H, INNER = 29, 3, 5, 24, 16

Inputs = tuple[Any, ...]  # x, w_gate_up, w_down, expert_idx, expert_weight, dy


def layer(
    rng: np.random.Generator, dtype: str = "bfloat16", weight_dtype: str = "float32", tokens: int = TOKENS,
    slots: int = SLOTS, experts: int = EXPERTS, h: int = H, inner: int = INNER,
) -> Inputs:  # fmt: skip
    """Some ids are out of range, and one expert has no tokens."""
    ids = routes.ids_of(rng, tokens, slots, experts)
    ids[ids == 2] = 3
    shapes = (tokens, h), (experts, h, 2 * inner), (experts, inner, h), (tokens, h)
    x, up, down, dy = (routes.normal(rng, shape, dtype) for shape in shapes)
    up /= np.array(4, dtype)
    return x, up, down, ids, rng.random((tokens, slots), np.float32).astype(DTYPES[weight_dtype]), dy


def exact(rng: np.random.Generator, dtype: str = "bfloat16", **extents: int) -> Inputs:
    """Gates so large that the activation is exact: +-256, and a little from the other columns."""
    x, up, down, ids, weights, dy = layer(rng, dtype, **extents)
    x, up, down, dy = (np.sign(each) for each in (x, up, down, dy))
    x[:, 0] = 64
    up[:, 0] = rng.choice([-4, 4], up[:, 0].shape)
    return x, up, down, ids, rng.choice([0.5, 1, 2], weights.shape).astype(np.float32), dy


def gradients(function: Callable[..., Any], *inputs: Any) -> tuple[Any, ...]:
    """y, and the gradients of x, both weights and the weights of the experts."""
    import jax

    x, up, down, ids, weights, dy = inputs
    y, pull = jax.vjp(lambda x, up, down, weights: function(x, up, down, ids, weights), x, up, down, weights)
    return y, *pull(dy)


def plain(*inputs: Any) -> tuple[Any, ...]:
    """The same from the functions that no framework differentiates."""
    *given, dy = inputs
    y, saved = cupy_gmm.expert_ffn(*given, save=True)
    *grads, d_weights = cupy_gmm.expert_ffn_backward(dy, saved)
    return y, *grads, d_weights.astype(given[-1].dtype)


def same(got: Any, want: Any) -> None:
    oracle.assert_same_bits(np.asarray(got), np.asarray(want))


def same_routing(got: Any, want: Any) -> None:
    assert got.tokens == want.tokens
    for name in ("order", "inverse", "offs", "counts"):
        same(getattr(got, name), getattr(want, name))
