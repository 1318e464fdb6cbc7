"""`permute`, `combine` and their gradients: every bit against plain loops, poisoned memory, guard bands."""

import itertools
from collections.abc import Callable
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

import cupy_gmm
from cupy_gmm import _rowwise
from tests import layouts, oracle, routes
from tests.backends import DTYPES, Backend
from tests.layouts import Layout
from tests.routes import Plain

# One element, less and more than one 16-byte access, multiples of it, more than a warp's and a block's share.
WIDTHS = (1, 7, 8, 24, 36, 264, 2056)
SHAPES = ((1, 1), (1, 5), (7, 2), (67, 8))
TOLERANCE = 8 * 2.0**-24  # of a float32 sum in any order, per root of its length


def plain_route(rng: np.random.Generator, tokens: int, slots: int, experts: int = 9) -> Plain:
    return routes.route(routes.ids_of(rng, tokens, slots, experts), experts)


def check(
    backend: Backend,
    call: Callable[..., Any],
    inputs: list[Any],
    expected: np.ndarray,
    out_layout: Layout,
    what: str,
) -> None:
    """Without and with `out=`."""
    backend.poison_allocator(expected.shape, expected.dtype.name)
    oracle.assert_same_bits(backend.get(call()), expected, what)
    out = backend.output(expected.shape, expected.dtype.name, out_layout)
    assert call(out=out.array) is out.array
    oracle.assert_same_bits(out.read(), expected, f"{what}, out=")
    out.check_guards()
    for placed in inputs:
        placed.check_untouched()


def check_permute(
    backend: Backend, rng: np.random.Generator, plain: Plain, width: int, dtype: str,
    layout: Layout = layouts.contiguous, out_layout: Layout = layouts.contiguous,
) -> None:  # fmt: skip
    x = backend.place(routes.normal(rng, (plain.tokens, width), dtype), layout)
    routing = plain.on(backend)
    expected = routes.permute(x.values, plain)
    check(
        backend, lambda **out: cupy_gmm.permute(x.array, routing, **out), [x], expected, out_layout,
        f"permute {x.values.shape} {dtype}",
    )  # fmt: skip


def check_combine(
    backend: Backend, rng: np.random.Generator, plain: Plain, width: int, dtype: str,
    layout: Layout = layouts.contiguous, out_layout: Layout = layouts.contiguous,
    weight_dtype: str = "float32", weight_layout: Layout = layouts.contiguous,
) -> None:  # fmt: skip
    """And the gradient of permute, which is the same sum without weights."""
    y = routes.rows_of(rng, backend, plain, width, dtype, layout)
    w = routes.weights_of(rng, backend, plain, weight_dtype, weight_layout)
    routing = plain.on(backend)
    expected = routes.combine(y.values, plain, w.values)
    assert routes.finite(expected)
    check(
        backend, lambda **out: cupy_gmm.combine(y.array, routing, w.array, **out), [y, w], expected,
        out_layout, f"combine {y.values.shape} {dtype}",
    )  # fmt: skip
    check(
        backend, lambda **out: cupy_gmm.permute_backward(y.array, routing, **out), [y],
        routes.combine(y.values, plain, None), out_layout, f"permute_backward {y.values.shape} {dtype}",
    )  # fmt: skip


def check_combine_backward(
    backend: Backend, rng: np.random.Generator, plain: Plain, width: int, dtype: str,
    layout: Layout = layouts.contiguous, out_layout: Layout = layouts.contiguous,
    weight_dtype: str = "float32", weight_layout: Layout = layouts.contiguous,
) -> None:  # fmt: skip
    dy = backend.place(routes.normal(rng, (plain.tokens, width), dtype), layout)
    y = routes.rows_of(rng, backend, plain, width, dtype, layout)
    w = routes.weights_of(rng, backend, plain, weight_dtype, weight_layout)
    expected, value, magnitude = routes.combine_backward(dy.values, y.values, plain, w.values)
    bound = TOLERANCE * np.sqrt(max(width, 1)) * magnitude
    outs = backend.output(expected.shape, dtype, out_layout), backend.output(value.shape, "float32")
    for out in (None, tuple(out.array for out in outs)):
        d_y, d_w = cupy_gmm.combine_backward(dy.array, y.array, plain.on(backend), w.array, out=out)
        what = f"combine_backward {y.values.shape} {dtype}"
        oracle.assert_same_bits(backend.get(d_y), expected, what)
        rates = backend.get(d_w)
        assert rates.dtype == np.float32
        assert rates.shape == value.shape
        assert (np.abs(rates - value) <= bound).all(), what
        assert not rates[(plain.live < 0).reshape(rates.shape)].any()
    assert d_y is out[0]
    assert d_w is out[1]
    for placed in outs:
        placed.check_guards()
    for placed in (dy, y, w):
        placed.check_untouched()


CHECKS = {"permute": check_permute, "combine": check_combine, "combine_backward": check_combine_backward}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("call", CHECKS)
def test_shapes_and_types(call: str, dtype: str, backend: Backend, rng: np.random.Generator) -> None:
    for (tokens, slots), width in itertools.product(SHAPES, WIDTHS):
        CHECKS[call](backend, rng, plain_route(rng, tokens, slots), width, dtype)


@pytest.mark.parametrize("name", sorted(layouts.INPUT_LAYOUTS))
@pytest.mark.parametrize("call", CHECKS)
def test_layouts(call: str, name: str, backend: Backend, rng: np.random.Generator) -> None:
    """Any base address, pitch and step, of inputs and results, for widths of whole accesses and others."""
    layout = layouts.INPUT_LAYOUTS[name]
    out_layout = layouts.LAYOUTS.get(name, layouts.padded(3))
    for width, dtype in (
        (64, "bfloat16"),
        (13, "float16"),
        (1, "bfloat16"),
        (40, "float32"),
        (33, "float32"),
    ):
        CHECKS[call](backend, rng, plain_route(rng, 23, 3), width, dtype, layout, out_layout)
        CHECKS[call](backend, rng, plain_route(rng, 23, 3), width, dtype, layouts.contiguous, out_layout)


@pytest.mark.parametrize("weight_dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("call", ["combine", "combine_backward"])
def test_weights(call: str, weight_dtype: str, backend: Backend, rng: np.random.Generator) -> None:
    for name in ("contiguous", "transposed", "reversed-last", "step-two", "off-2-bytes"):
        CHECKS[call](
            backend, rng, plain_route(rng, 29, 5), 48, "bfloat16",
            weight_dtype=weight_dtype, weight_layout=layouts.LAYOUTS[name],
        )  # fmt: skip


@pytest.mark.parametrize("call", CHECKS)
@pytest.mark.parametrize("tokens, slots, width", [(0, 3, 16), (0, 0, 16), (5, 0, 16), (5, 2, 0), (0, 3, 0)])
def test_C41_nothing_to_do(
    tokens: int, slots: int, width: int, call: str, backend: Backend, rng: np.random.Generator
) -> None:
    """No tokens, no slots (each token's sum is zero, and written), no columns."""
    for experts in (0, 9):
        plain = routes.route(np.zeros((tokens, slots), np.int32), experts)
        CHECKS[call](backend, rng, plain, width, "bfloat16")


@pytest.mark.parametrize("call", CHECKS)
def test_C32_C39_all_dropped(call: str, backend: Backend, rng: np.random.Generator) -> None:
    for slots, wrong in itertools.product((1, 8), (-1, 9)):
        plain = routes.route(np.full((17, slots), wrong, np.int32), 9)
        CHECKS[call](backend, rng, plain, 40, "bfloat16")


@pytest.mark.parametrize("call", CHECKS)
def test_garbage_in_the_callers_routing(call: str, backend: Backend, rng: np.random.Generator) -> None:
    """Out of range, twice, or not each other's inverse: dropped, in bounds, and every row written."""
    wild = np.array([-1, -(2**31), 2**31 - 1, 2**31 - 2, 48, 49, 0, 1, 17], np.int32)
    for share, end in itertools.product((0.1, 0.6, 1.0), (None, -5, 7, 2**31 - 1)):
        plain = plain_route(rng, 12, 4)
        for array in (plain.order, plain.inverse):
            changed = rng.random(array.shape) < share
            array[changed] = rng.choice(wild, changed.sum())
        if end is not None:
            plain.offs[-1] = end
        CHECKS[call](backend, rng, plain, 40, "bfloat16")


def test_C13_nan_behind_dropped_slots(backend: Backend, rng: np.random.Generator) -> None:
    """Equal, bit for bit, to a layer in which those slots do not exist."""
    kept = rng.integers(0, 4, (31, 2)).astype(np.int32)
    ids = np.stack([kept[:, 0], np.full(31, -1, np.int32), kept[:, 1]], axis=1)
    few, more = routes.route(kept, 4), routes.route(ids, 4)
    y = routes.normal(rng, (93, 56), "bfloat16")
    y[62:] = np.nan
    weights = routes.normal(rng, (31, 3), "float32")
    weights[:, 1] = np.nan
    padded = cupy_gmm.combine(backend.place(y).array, more.on(backend), backend.place(weights).array)
    alone = cupy_gmm.combine(backend.place(y[:62]).array, few.on(backend), backend.place(weights[:, [0, 2]]).array)
    oracle.assert_same_bits(backend.get(padded), backend.get(alone))


def test_permute_then_its_gradient_counts_slots(backend: Backend, rng: np.random.Generator) -> None:
    """On whole numbers the sum of the copies is the row times its live slots, exactly."""
    plain = plain_route(rng, 101, 8)
    x = oracle.integers(rng, (101, 72), "bfloat16")
    routing = plain.on(backend)
    back = cupy_gmm.permute_backward(cupy_gmm.permute(backend.place(x).array, routing), routing)
    live = (plain.live >= 0).reshape(101, 8).sum(axis=1)
    expected = oracle.rounded(x.astype(np.float32) * live[:, None].astype(np.float32), "bfloat16")
    oracle.assert_same_bits(backend.get(back), expected)


def test_adjoint_identities(backend: Backend, rng: np.random.Generator) -> None:
    """<combine(y, w), g> is linear in y and in w: both gradients give it back; whole numbers, exact."""
    plain = plain_route(rng, 53, 4)
    y, g = (oracle.integers(rng, (rows, 40), "float32") for rows in (53 * 4, 53))
    w = oracle.integers(rng, (53, 4), "float32")
    routing = plain.on(backend)
    at = [backend.place(a).array for a in (y, g, w)]
    out = backend.get(cupy_gmm.combine(at[0], routing, at[2])).astype(np.float64)
    d_y, d_w = (backend.get(d) for d in cupy_gmm.combine_backward(at[1], at[0], routing, at[2]))
    total = (out * g).sum()
    assert total == (d_y.astype(np.float64) * y).sum() == (d_w.astype(np.float64) * w).sum() != 0


@hypothesis.given(st.integers(0, 2**32 - 1), st.integers(0, 12), st.integers(0, 4), st.integers(0, 5))
def test_any_routing(seed: int, tokens: int, slots: int, experts: int) -> None:
    rng = np.random.default_rng(seed)
    plain = routes.route(rng.integers(-2, experts + 2, (tokens, slots)).astype(np.int32), experts)
    for one in CHECKS.values():
        one(Backend(), rng, plain, int(rng.integers(1, 20)), "float16")


@pytest.mark.parametrize("family", ["torch", "jax"])
def test_other_families_give_the_same_bits(family: str, rng: np.random.Generator) -> None:
    """On the CPU: route, permute and combine of another framework's arrays, results in that framework."""
    module = pytest.importorskip(family)
    convert = module.from_numpy if family == "torch" else lambda a: module.device_put(a, module.devices("cpu")[0])
    kind = module.Tensor if family == "torch" else module.Array
    ids = routes.ids_of(rng, 19, 3, 5)
    x, w = routes.normal(rng, (19, 24), "float16"), routes.normal(rng, (19, 3), "float32")
    routing = cupy_gmm.route(convert(ids), 5)
    y = cupy_gmm.permute(convert(x), routing)
    out = cupy_gmm.combine(y, routing, convert(w))
    grads = cupy_gmm.combine_backward(convert(x), y, routing, convert(w))
    assert all(isinstance(a, kind) for a in (routing.order, routing.offs, y, out, *grads))
    plain = routes.route(ids, 5)
    expected = routes.combine(routes.permute(x, plain), plain, w)
    oracle.assert_same_bits(np.asarray(out), expected)
    assert DTYPES["float32"] == np.asarray(grads[1]).dtype


def test_launch_shapes_cover_every_row_and_column() -> None:
    for rows, width in itertools.product((1, 3, 64, 131, 16384, 131072, 2**31 - 1), (1, 5, 33, 256, 896, 2**26)):
        lanes_log2, (blocks, columns) = _rowwise._shares(rows, width)
        lanes = 1 << lanes_log2
        assert 1 <= lanes <= 256
        assert (blocks - 1) * (256 // lanes) < rows <= blocks * (256 // lanes)
        assert 1 <= columns <= min(65535, -(-width // lanes))
        assert blocks < 2**31


def test_C25_no_row_count_to_get_wrong(backend: Backend, rng: np.random.Generator) -> None:
    """The entry asks what `num_out=-1` does: there is no such parameter, the rows follow from the shapes."""
    plain = plain_route(rng, 6, 2)
    with pytest.raises(TypeError):
        cupy_gmm.permute(backend.place(np.ones((6, 8), np.float16)).array, plain.on(backend), num_out=-1)  # type: ignore[call-arg]
