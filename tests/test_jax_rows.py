"""Routing and the expert layer of `cupy_gmm.jax` where there is no GPU: the contract of the kernels, and gradients."""

import numpy as np
import pytest

import cupy_gmm
from tests import apart, routes
from tests.backends import DTYPES
from tests.jax_layers import EXPERTS, INNER, SLOTS, TOKENS, H, exact, gradients, layer, plain, same, same_routing

jax = pytest.importorskip("jax", reason="JAX is not installed")
jnp = jax.numpy

import cupy_gmm.jax as face  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_the_cpu")
pytest_plugins = ("tests.jax_on_cpu",)


# ---- the contract


@pytest.mark.parametrize("tokens, slots, experts", [(1, 1, 1), (7, 1, 3), (29, 3, 5), (600, 8, 97), (5, 2, 8192)])
def test_route(rng, tokens, slots, experts):
    """Ids of any value; the same expert twice in one token; all of them dropped."""
    lowest, highest = -(2**31), 2**31 - 1
    function = jax.jit(face.route, static_argnums=1)
    for ids in (
        routes.ids_of(rng, tokens, slots, experts),
        np.full((tokens, slots), experts - 1, np.int32),
        np.full((tokens, slots), -1, np.int32),
        rng.choice(np.array([lowest, -1, 0, experts - 1, experts, highest], np.int32), (tokens, slots)),
    ):
        same_routing(function(ids, experts), routes.route(ids, experts))
        same_routing(face.route(jnp.asarray(ids), experts), routes.route(ids, experts))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("weight_dtype", ["float32", "bfloat16", "float16"])
def test_rows_have_the_bits_of_plain_loops(rng, dtype, weight_dtype):
    """NaN in every row and weight that the contract does not use."""
    for tokens, slots, width in ((1, 1, 1), (29, 3, 24), (13, 8, 7)):
        plain = routes.route(routes.ids_of(rng, tokens, slots, EXPERTS), EXPERTS)
        routing = cupy_gmm.Routing(plain.order, plain.inverse, plain.offs, plain.counts, tokens)
        x, y = (routes.normal(rng, (rows, width), dtype) for rows in (tokens, tokens * slots))
        weights = routes.normal(rng, (tokens, slots), weight_dtype)
        dead = np.ones(len(y), bool)
        dead[plain.live[plain.live >= 0]] = False
        y[dead] = np.nan
        weights[(plain.live < 0).reshape(weights.shape)] = np.nan

        moved, pull = jax.vjp(jax.jit(lambda x, routing=routing: face.permute(x, routing)), x)
        same(moved, routes.permute(x, plain))
        same(pull(jnp.asarray(y))[0], routes.combine(y, plain, None))

        out, pull = jax.vjp(jax.jit(lambda y, w, routing=routing: face.combine(y, routing, w)), y, weights)
        same(out, routes.combine(y, plain, weights))
        d_y, d_weights = pull(jnp.asarray(x))
        wanted, value, magnitude = routes.combine_backward(x, y, plain, weights)
        same(d_y, wanted)
        assert d_weights.dtype == weights.dtype
        unit = {"float32": 2.0**-20, "bfloat16": 2.0**-8, "float16": 2.0**-10}[weight_dtype]
        assert (np.abs(np.asarray(d_weights, np.float64) - value) <= unit * magnitude).all()


def test_a_routing_may_hold_anything(rng):
    """Arrays that no `route` made: an assignment lives where `order` and `inverse` agree below the last offset."""
    x, weights = routes.normal(rng, (6, 5), "float32"), routes.normal(rng, (6, 2), "float32")
    permute, combine = jax.jit(face.permute), jax.jit(face.combine)
    for last in (-(2**31), 0, 5, 12, 2**31 - 1):
        for low, high in ((-2, 13), (-(2**31), 2**31 - 1)):
            order, inverse = (rng.integers(low, high, 12, dtype=np.int32) for _ in range(2))
            inverse[order[:4].clip(0, 11)] = np.arange(4)
            offs = np.array([3, last], np.int32)
            plain = routes.Plain(order, inverse, offs, offs, 6)
            routing = cupy_gmm.Routing(order, inverse, offs, None, 6)
            y = permute(x, routing)
            same(y, routes.permute(x, plain))
            same(combine(y, routing, weights), routes.combine(np.asarray(y), plain, weights))


def test_activation(rng):
    """Gates where exp overflows, too."""
    gate_up = 3 * routes.normal(rng, (31, 2 * INNER), "float32")
    gate_up[:4, :4] = [[1e4], [-1e4], [1e30], [-1e30]]
    dh = routes.normal(rng, (31, INNER), "float32")
    h, pull = jax.vjp(jax.jit(face.silu_mul), gate_up)
    want = cupy_gmm.silu_mul(gate_up)
    assert np.isfinite(h).all()
    assert (np.abs(h - want) <= 2.0**-20 * np.abs(want) + 2.0**-126).all()
    (grad,) = pull(jnp.asarray(dh))
    want = cupy_gmm.silu_mul_backward(gate_up, dh)
    parts = np.abs(np.concatenate([dh * gate_up[:, INNER:], want[:, INNER:]], 1))  # the slope is a difference
    assert np.isfinite(grad).all()
    assert (np.abs(grad - want) <= 2.0**-20 * parts + 2.0**-126).all()


@pytest.mark.parametrize(
    "tokens, slots, experts, h, inner",
    [(0, 2, 3, 8, 8), (4, 0, 3, 8, 8), (4, 2, 0, 8, 8), (4, 2, 3, 0, 8), (4, 2, 3, 8, 0)],
)
def test_empty_extents(tokens, slots, experts, h, inner):
    ids, weights = np.zeros((tokens, slots), np.int32), np.ones((tokens, slots), np.float32)
    routing, wanted = face.route(ids, experts), cupy_gmm.route(ids, experts)
    same_routing(routing, wanted)
    x, up, down = (
        np.ones(shape, DTYPES["float16"]) for shape in ((tokens, h), (experts, h, 2 * inner), (experts, inner, h))
    )
    rows = face.permute(x, routing)
    same(rows, cupy_gmm.permute(x, cupy_gmm.route(ids, experts)))
    same(
        face.combine(rows, routing, weights), cupy_gmm.combine(np.asarray(rows), cupy_gmm.route(ids, experts), weights)
    )
    y, pull = jax.vjp(lambda x, up, down, w: face.expert_ffn(x, up, down, ids, w), x, up, down, weights)
    same(y, np.zeros((tokens, h), np.float16))
    for got, given in zip(pull(y), (x, up, down, weights), strict=True):
        same(got, np.zeros_like(given))


# ---- the layer


def dense(x, up, down, ids, weights):
    """Every expert for every token, in float32: what nobody would run."""
    gate, value = jnp.split(jnp.einsum("th,ghi->tgi", x, up, precision="highest"), 2, -1)
    each = jnp.einsum("tgi,gih->tgh", jax.nn.silu(gate) * value, down, precision="highest")
    chosen = jax.nn.one_hot(ids, EXPERTS) * weights[..., None]  # zeros for ids out of range
    return jnp.einsum("tkg,tgh->th", chosen, each, precision="highest")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_layer_and_its_gradients(rng, dtype):
    """The NumPy path, which rounds at the same points; and `jax.grad` of plain JAX in float32, which rounds nowhere."""
    x, up, down, ids, weights, dy = inputs = layer(rng, dtype)
    found = jax.jit(lambda *inputs: gradients(face.expert_ffn, *inputs))(*inputs)
    wide = gradients(dense, *(each.astype(np.float32) for each in (x, up, down)), ids, weights, dy.astype(np.float32))
    unit = {"bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]
    for got, near, far in zip(found, plain(*inputs), wide, strict=True):
        assert (got.dtype, got.shape) == (near.dtype, near.shape)
        got, near, far = (np.asarray(each, np.float64) for each in (got, near, far))
        scale = np.abs(near).max()
        assert np.abs(got - near).max() <= unit * scale / 8  # a result seldom falls to the other side of a rounding
        assert np.linalg.norm(got - far) <= 4 * unit * np.linalg.norm(far)
    assert not np.asarray(found[2])[2].any(), "an expert without tokens"


def test_layer_on_whole_numbers(rng):
    """The bits of the NumPy path where the activation is exact; +0 for -0."""
    inputs = exact(rng)
    found = jax.jit(lambda *inputs: gradients(face.expert_ffn, *inputs))(*inputs)
    for got, want in zip(found, plain(*inputs), strict=True):
        assert np.asarray(want).any()
        same(got + 0, want + want.dtype.type(0))


def test_parts_make_the_layer(rng):
    """A Routing goes through `jit` in both directions; its counts are sizes of `ragged_dot`."""
    inputs = layer(rng)
    ids = inputs[3]

    def by_hand(x, up, down, ids, weights):
        routing = jax.jit(face.route, static_argnums=1)(ids, EXPERTS)
        hidden = face.silu_mul(face.grouped_mm(face.permute(x, routing), up, routing.offs))
        return face.combine(face.ragged_dot(hidden, down, routing.counts), routing, weights)

    for got, want in zip(gradients(by_hand, *inputs), gradients(face.expert_ffn, *inputs), strict=True):
        same(got, want)
    leaves, tree = jax.tree.flatten(face.route(ids, EXPERTS))
    assert len(leaves) == 4
    assert jax.tree.unflatten(tree, leaves).tokens == TOKENS


def test_ids_that_come_of_a_router(rng):
    """Gradients pass `route` by, and reach the router through the weights alone; one program for all ids."""
    x, up, down, _, _, dy = layer(rng)
    traced = []

    @jax.jit
    def step(router, x):
        traced.append(x.shape)

        def loss(router, x):
            chosen, ids = jax.lax.top_k(x.astype(jnp.float32) @ router, SLOTS)
            y = face.expert_ffn(x, up, down, ids, jax.nn.softmax(chosen))
            return (y * dy).astype(jnp.float32).sum()

        return jax.grad(loss, (0, 1))(router, x)

    for _ in range(3):
        d_router, dx = step(rng.standard_normal((H, EXPERTS), np.float32), x)
        assert np.isfinite(d_router).all()
        assert np.asarray(d_router).any()
        assert dx.dtype == x.dtype
    assert traced == [(TOKENS, H)]


def test_integers_have_no_gradient(rng):
    x, _, _, ids, *_ = layer(rng)
    _, pull = jax.vjp(lambda x, routing: face.permute(x, routing), x, face.route(ids, EXPERTS))
    d_x, d_routing = pull(jnp.ones((TOKENS * SLOTS, H), x.dtype))
    assert d_x.shape == x.shape
    assert {leaf.dtype for leaf in jax.tree.leaves(d_routing)} == {jax.dtypes.float0}


def test_x64():
    """int64 ids, whose upper halves count."""
    apart.python(
        """
import numpy as np, jax, jax.numpy as jnp
import cupy_gmm, cupy_gmm.jax
ids = np.array([[2**32, 1], [-(2**32) + 2, 2], [0, 2**40 + 1]])
assert jnp.asarray(ids).dtype == jnp.int64
got, want = cupy_gmm.jax.route(jnp.asarray(ids), 3), cupy_gmm.route(ids, 3)
for name in ("order", "inverse", "offs", "counts"):
    one, other = np.asarray(getattr(got, name)), getattr(want, name)
    assert one.dtype == other.dtype == np.int32 and np.array_equal(one, other), name
x, weights = np.ones((3, 5), np.float32), np.full((3, 2), 0.5, np.float32)
rows = cupy_gmm.jax.permute(x, got)
assert np.array_equal(cupy_gmm.jax.combine(rows, got, weights), cupy_gmm.combine(np.asarray(rows), want, weights))
""",
        JAX_ENABLE_X64="1",
        JAX_PLATFORMS="cpu",
    )
