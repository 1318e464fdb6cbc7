"""What routing and the layer of `cupy_gmm.jax` refuse, in its words, before anything is lowered."""

import numpy as np
import pytest

from cupy_gmm.errors import ArgumentError, DtypeError, UnsupportedError

jax = pytest.importorskip("jax", reason="JAX is not installed")
jnp = jax.numpy

import cupy_gmm.jax as face  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_the_cpu")
pytest_plugins = ("tests.jax_on_cpu",)

IDS = np.array([[0, 2], [1, 1], [-1, 0], [2, 3]], np.int32)
WEIGHTS = np.ones((4, 2), np.float32)
X = np.ones((4, 6), jnp.bfloat16)
ROWS = np.ones((8, 6), jnp.bfloat16)
UP = np.ones((3, 6, 10), jnp.bfloat16)
DOWN = np.ones((3, 5, 6), jnp.bfloat16)


@pytest.fixture
def routing():
    return face.route(IDS, 3)


def route(_, expert_idx=IDS, num_experts=3):
    return face.route(expert_idx, num_experts)


def permute(routing, x=X):
    return face.permute(x, routing)


def combine(routing, y=ROWS, weights=WEIGHTS):
    return face.combine(y, routing, weights)


def silu_mul(_, gate_up=UP[0]):
    return face.silu_mul(gate_up)


def expert_ffn(_, x=X, w_gate_up=UP, w_down=DOWN, expert_idx=IDS, expert_weight=WEIGHTS):
    return face.expert_ffn(x, w_gate_up, w_down, expert_idx, expert_weight)


CASES = {
    "none": (permute, {"x": None}, ArgumentError, "`x` is None: expected an array."),
    "a list": (
        route,
        {"expert_idx": [[0]]},
        ArgumentError,
        "`expert_idx` is a list: expected a jax.Array, a NumPy array or a value that JAX is tracing; pass "
        "`jax.numpy.asarray` of it.",
    ),
    "rank of ids": (
        route,
        {"expert_idx": IDS[:, 0]},
        ArgumentError,
        "`expert_idx` has shape (4,): expected (tokens, slots); for one expert a token pass `expert_idx[:, None]`.",
    ),
    "dtype of ids": (
        route,
        {"expert_idx": IDS.astype("uint8")},
        DtypeError,
        "`expert_idx` has dtype uint8: expected int32 or int64; cast it, for example "
        '`expert_idx.astype("int32")` (PyTorch: `expert_idx.to(torch.int32)`).',
    ),
    "experts": (
        route,
        {"num_experts": 8193},
        ArgumentError,
        "`num_experts` is 8193: expected 0 to 8192; spread them over several layers.",
    ),
    "rank of x": (
        permute,
        {"x": X[None]},
        ArgumentError,
        "`x` has shape (1, 4, 6): expected (tokens, h); pass `x.reshape(-1, 6)`.",
    ),
    "tokens": (
        permute,
        {"x": X[:2]},
        ArgumentError,
        "`x` has 2 tokens: expected 4, as `routing` was made for; pass the array that belongs to this routing.",
    ),
    "rows": (
        combine,
        {"y": X},
        ArgumentError,
        "`y` has shape (4, 6): expected (8, h), a row for each element of `routing.order`; pass rows as `permute` "
        "arranges them.",
    ),
    "weights": (
        combine,
        {"weights": WEIGHTS[:, 0]},
        ArgumentError,
        "`weights` has shape (4,): expected (tokens, slots); for one expert a token pass `weights[:, None]`.",
    ),
    "dtype of weights": (
        combine,
        {"weights": IDS},
        DtypeError,
        "`weights` has dtype int32: expected float32, bfloat16 or float16; cast it, for example "
        '`weights.astype("float32")` (PyTorch: `weights.to(torch.float32)`).',
    ),
    "halves": (
        silu_mul,
        {"gate_up": UP[0][:, 1:]},
        ArgumentError,
        "`gate_up` has shape (6, 9): expected an even last axis, [gate | up]; pass both halves.",
    ),
    "dtype of x": (
        expert_ffn,
        {"x": X.astype("float32")},
        DtypeError,
        '`x` has dtype float32: expected bfloat16 or float16; cast it, for example `x.astype("bfloat16")` '
        "(PyTorch: `x.to(torch.bfloat16)`).",
    ),
    "w_down": (
        expert_ffn,
        {"w_down": DOWN.swapaxes(1, 2)},
        ArgumentError,
        "`w_down` has shape (3, 6, 5): expected (3, 5, 6), as `w_gate_up` has shape (3, 6, 10); pass `w_down.mT`.",
    ),
    "tokens of the layer": (
        expert_ffn,
        {"expert_idx": IDS[1:]},
        ArgumentError,
        "`expert_idx` has shape (3, 2): expected (4, slots), as `x` has shape (4, 6); pass a row for each token.",
    ),
    "expert_weight": (
        expert_ffn,
        {"expert_weight": WEIGHTS[:, :1]},
        ArgumentError,
        "`expert_weight` has shape (4, 1): expected (4, 2), as `expert_idx` has; pass a weight for each assignment.",
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("traced", [False, True])
def test_texts(case, traced, routing):
    """The same under `jit`."""
    function, options, kind, text = CASES[case]
    arrays = {name: value for name, value in options.items() if traced and hasattr(value, "shape")}
    run = jax.jit(lambda routing, arrays: function(routing, **{**options, **arrays}))
    with pytest.raises(kind) as caught:
        run(routing, arrays) if traced else function(routing, **options)
    assert str(caught.value) == text


def test_a_routing_is_a_routing(routing):
    with pytest.raises(ArgumentError, match="`routing` is a ndarray: expected the Routing that `route` returned"):
        face.permute(X, IDS)
    unknown = type(routing)(routing.order, routing.inverse, routing.offs, None)
    assert face.combine(face.permute(X, unknown), unknown, WEIGHTS).shape == X.shape  # both see the tokens
    wrong = type(routing)(routing.order.astype("float32"), routing.inverse, routing.offs, None, 4)
    with pytest.raises(DtypeError, match=r"`routing\.order` has dtype float32: expected int32"):
        face.permute(X, wrong)


def test_extents_beyond_the_kernels():
    """Shapes alone: nothing is allocated."""
    ids = jax.ShapeDtypeStruct((2**30, 2), jnp.int32)
    with pytest.raises(ArgumentError, match=r"expected less than 2\^31 assignments; split the tokens over several"):
        jax.eval_shape(lambda ids: face.route(ids, 8), ids)


def test_symbolic_extents():
    export = pytest.importorskip("jax.export")
    ids = jax.ShapeDtypeStruct((export.symbolic_shape("t")[0], 2), jnp.int32)
    with pytest.raises(ArgumentError, match=r"`expert_idx` has the symbolic shape \(t, 2\): expected extents that"):
        export.export(jax.jit(lambda ids: face.route(ids, 3)), platforms=["cuda"])(ids)


# ---- transformations without meaning


def test_vmap_is_refused(routing):
    sentence = (
        r"`jax\.vmap` met {}: expected the tokens of all examples as one axis; reshape instead of `vmap`, or use "
        r"`jax\.lax\.map` over the examples\."
    )
    with pytest.raises(UnsupportedError, match=sentence.format("route")):
        jax.vmap(lambda ids: face.route(ids, 3))(jnp.stack([IDS] * 2))
    with pytest.raises(UnsupportedError, match=sentence.format("permute")):
        jax.jit(jax.vmap(lambda x: face.permute(x, routing)))(jnp.stack([X] * 2))
    with pytest.raises(UnsupportedError, match=sentence.format("combine")):
        jax.vmap(jax.grad(lambda y: face.combine(y, routing, WEIGHTS).astype("float32").sum()))(jnp.stack([ROWS] * 2))
    with pytest.raises(UnsupportedError, match=sentence.format("silu_mul")):
        jax.vmap(face.silu_mul)(UP)
    with pytest.raises(UnsupportedError, match=sentence.format("permute")):
        jax.vmap(lambda x: expert_ffn(None, x))(jnp.stack([X] * 2))
    assert np.array_equal(jax.lax.map(face.silu_mul, UP), jnp.stack([face.silu_mul(each) for each in UP]))


def test_second_derivatives_are_refused(routing):
    for name, function, given in (
        ("permute", lambda x: (face.permute(x, routing) ** 3).sum(), X.astype("float32")),
        ("combine", lambda y: (face.combine(y, routing, WEIGHTS) ** 3).sum(), ROWS.astype("float32")),
        ("silu_mul", lambda gate_up: face.silu_mul(gate_up).sum(), UP[0].astype("float32")),
        ("", lambda x: expert_ffn(None, x).astype("float32").sum(), X),
    ):
        with pytest.raises(UnsupportedError, match=f"{name}.* was differentiated where it has no derivative"):
            jax.grad(lambda x, function=function: jax.grad(function)(x).astype("float32").sum())(given)


def test_forward_mode_is_refused(routing):
    """By JAX itself, whose rule for reverse mode this is."""
    for function, given in ((lambda x: face.permute(x, routing), X), (face.silu_mul, UP[0])):
        with pytest.raises(TypeError, match=r"forward-mode .*custom_vjp function"):
            jax.jvp(function, (given,), (given,))
