"""What `cupy_gmm.jax` refuses, in its words, before anything is lowered."""

import numpy as np
import pytest

from cupy_gmm.errors import ArgumentError, DtypeError, GmmError, UnsupportedError

jax = pytest.importorskip("jax", reason="JAX is not installed")
jnp = jax.numpy

import cupy_gmm.jax as face  # noqa: E402
from tests import apart  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_the_cpu")
pytest_plugins = ("tests.jax_on_cpu",)

X = np.ones((8, 4), jnp.bfloat16)
W = np.ones((3, 4, 6), jnp.bfloat16)
DY = np.ones((8, 6), jnp.bfloat16)
SIZES = np.array([3, 0, 5], np.int32)
ONE = np.ones((1,), np.int32)


def dot(lhs=X, rhs=W, group_sizes=SIZES, **options):
    return face.ragged_dot(lhs, rhs, group_sizes, **options)


def mm(x=X, w=W, offs=SIZES, **options):
    return face.grouped_mm(x, w, offs, **options)


def wgrad(x=X, dy=DY, offs=SIZES, **options):
    return face.grouped_mm_wgrad(x, dy, offs, **options)


CASES = {
    "none": (dot, {"rhs": None}, ArgumentError, "`rhs` is None: expected an array."),
    "a list": (
        dot,
        {"group_sizes": [3, 0, 5]},
        ArgumentError,
        "`group_sizes` is a list: expected a jax.Array, a NumPy array or a value that JAX is tracing; pass "
        "`jax.numpy.asarray` of it.",
    ),
    "rank of lhs": (
        dot,
        {"lhs": X[None]},
        ArgumentError,
        "`lhs` has shape (1, 8, 4): expected (rows, k); pass `lhs.reshape(-1, 4)`.",
    ),
    "rank of rhs": (
        dot,
        {"rhs": W[0]},
        ArgumentError,
        "`rhs` has shape (4, 6): expected (groups, k, n); for one group pass `rhs[None]`.",
    ),
    "k": (
        dot,
        {"rhs": W.swapaxes(1, 2)},
        ArgumentError,
        "`rhs` has shape (3, 6, 4): expected (groups, k, n) with k = 4, as `lhs` has shape (8, 4); pass `rhs.mT`.",
    ),
    "rank of sizes": (
        dot,
        {"group_sizes": SIZES[None]},
        ArgumentError,
        "`group_sizes` has shape (1, 3): expected (groups,) rows of each group; pass `group_sizes.reshape(-1)`.",
    ),
    "dtype of sizes": (
        dot,
        {"group_sizes": SIZES.astype("float32")},
        DtypeError,
        "`group_sizes` has dtype float32: expected integers, rows of each group; cast it, for example "
        '`group_sizes.astype("int32")`.',
    ),
    "groups": (
        dot,
        {"rhs": W[:2]},
        ArgumentError,
        "`group_sizes` has length 3: expected 2, as `rhs` has 2 groups; where these are some of all groups, pass the "
        "index of the first one as `group_offset`.",
    ),
    "local groups": (
        dot,
        {"group_offset": 1},
        ArgumentError,
        "`group_sizes` has length 3: expected at least 4, as `rhs` has 3 groups from `group_offset` 1 on; pass the "
        "sizes of all groups, not only the local ones.",
    ),
    "more groups than sizes": (
        dot,
        {"group_offset": ONE, "group_sizes": SIZES[:2]},
        ArgumentError,
        "`group_sizes` has length 2: expected at least 3, as `rhs` has 3 groups; pass the sizes of all groups, not "
        "only the local ones.",
    ),
    "negative offset": (
        dot,
        {"group_offset": -1},
        ArgumentError,
        "`group_offset` is -1 and `group_sizes` has length 3: expected 0 to 3, the index in `group_sizes` of the first "
        "local group.",
    ),
    "kind of offset": (
        dot,
        {"group_offset": 1.5},
        ArgumentError,
        "`group_offset` is 1.5: expected an int, or an int32 array of one element on the device of `x`.",
    ),
    "shape of offset": (
        dot,
        {"group_offset": SIZES},
        ArgumentError,
        "`group_offset` has shape (3,): expected one element, shape () or (1,).",
    ),
    "dtype of offset": (
        dot,
        {"group_offset": ONE.astype("float32")},
        DtypeError,
        "`group_offset` has dtype float32: expected int32; cast it, for example "
        '`group_offset.astype("int32")` (PyTorch: `group_offset.to(torch.int32)`).',
    ),
    "sharding": (
        dot,
        {"out_sharding": "rows"},
        ArgumentError,
        "`out_sharding` is 'rows': expected None; call inside `jax.shard_map`, where each device has its own rows.",
    ),
    "dtype of x": (
        mm,
        {"x": X.astype("float32")},
        DtypeError,
        '`x` has dtype float32: expected bfloat16 or float16; cast it, for example `x.astype("bfloat16")` '
        "(PyTorch: `x.to(torch.bfloat16)`).",
    ),
    "dtype of w": (
        mm,
        {"w": W.astype("float16")},
        DtypeError,
        '`w` has dtype float16: expected bfloat16, as `x` has; cast it, for example `w.astype("bfloat16")` '
        "(PyTorch: `w.to(torch.bfloat16)`).",
    ),
    "out_dtype": (
        mm,
        {"out_dtype": jnp.float64},
        DtypeError,
        "`out_dtype` is float64: expected bfloat16, float16 or float32; for another type cast the result.",
    ),
    "too few offsets": (
        mm,
        {"offs": SIZES[:2]},
        ArgumentError,
        "`offs` has length 2: expected at least 3, as `w` has 3 groups; pass the end offsets of all groups, the last "
        "one too.",
    ),
    "config": (
        mm,
        {"config": "4x4"},
        ArgumentError,
        '`config` is \'4x4\': expected one of "128x256", "128x128", "64x128", "16x128", "any-128x64", '
        '"hopper-256x208", or None to let grouped_mm choose.',
    ),
    "rows of dy": (wgrad, {"dy": DY[1:]}, ArgumentError, None),
    "num_groups": (
        wgrad,
        {"num_groups": -1},
        ArgumentError,
        "`num_groups` is -1: expected 0 or more, the number of groups of the result.",
    ),
    "num_groups of a traced offset": (
        wgrad,
        {"group_offset": ONE},
        ArgumentError,
        "`num_groups` is None and `group_offset` is on the device: pass `num_groups=`, the number of groups of the "
        "result.",
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("traced", [False, True])
def test_texts(case, traced):
    """The same under `jit`."""
    function, options, kind, text = CASES[case]
    arrays = {name: value for name, value in options.items() if traced and hasattr(value, "shape")}
    with pytest.raises(kind) as caught:
        jax.jit(lambda arrays: function(**{**options, **arrays}))(arrays) if traced else function(**options)
    assert text is None or str(caught.value) == text
    assert str(caught.value).endswith(".")


def test_a_tensor_is_no_array():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    with pytest.raises(ArgumentError, match=r"`lhs` is a Tensor: expected a jax\.Array, a NumPy array or"):
        dot(lhs=torch.ones(8, 4))


def test_extents_beyond_the_kernels():
    """Shapes alone: nothing is allocated."""
    x = jax.ShapeDtypeStruct((0x7FFF0001, 4), jnp.bfloat16)
    with pytest.raises(ArgumentError, match=r"`rows` is 2147418113: expected 0 to 2147418112; split the call"):
        jax.eval_shape(face.ragged_dot, x, W, SIZES)


def test_symbolic_extents():
    """C44: an export with a number of groups to be told later."""
    export = pytest.importorskip("jax.export")
    groups = export.symbolic_shape("g")[0]
    operands = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (((8, 4), jnp.bfloat16), ((groups, 4, 6), jnp.bfloat16), ((groups,), jnp.int32))
    ]
    with pytest.raises(
        ArgumentError,
        match=r"`rhs` has the symbolic shape \(g, 4, 6\): expected extents that are numbers, as kernels are chosen by "
        r"them; export the function once for each shape\.",
    ):
        export.export(jax.jit(face.ragged_dot), platforms=["cuda"])(*operands)


# ---- transformations without meaning


def test_vmap_is_refused():
    for function, axes in ((dot, (0, None)), (mm, (0, None)), (mm, (None, 0))):
        operands = [jnp.stack([each] * 2) if axis == 0 else each for each, axis in zip((X, W), axes, strict=True)]
        with pytest.raises(
            UnsupportedError,
            match=r"`jax\.vmap` met grouped_mm: the rows of all examples make one matrix, so expected `x` with them "
            r"folded into its rows, sorted by group; reshape instead of `vmap`, or use `jax\.lax\.map` over the ",
        ):
            jax.vmap(function, axes)(*operands)
    with pytest.raises(UnsupportedError, match=r"`jax\.vmap` met the schedule: the rows of all examples"):
        jax.vmap(lambda sizes: dot(group_sizes=sizes))(jnp.stack([SIZES] * 2))
    with pytest.raises(UnsupportedError, match=r"`jax\.vmap` met grouped_mm"):
        jax.jit(jax.vmap(jax.grad(lambda x: dot(x).astype(jnp.float32).sum())))(jnp.stack([X] * 2))


def test_lax_map_instead_of_vmap():
    stacked = jnp.stack([X, 2 * X])
    assert np.array_equal(jax.lax.map(dot, stacked), jnp.stack([dot(X), dot(2 * X)]))


def test_second_derivatives_are_refused():
    def value(x):
        return (dot(x).astype(jnp.float32) ** 3).sum()

    sentence = (
        r"grouped_mm\w* was differentiated where it has no derivative, as in a second derivative or in a derivative of "
        r"`grouped_mm_wgrad`: expected `jax\.grad` or `jax\.vjp` of `ragged_dot` or `grouped_mm`, taken once; use "
        r"`jax\.lax\.ragged_dot` for more\."
    )
    with pytest.raises(UnsupportedError, match=sentence):
        jax.grad(lambda x: jax.grad(value)(x).astype(jnp.float32).sum())(X)
    with pytest.raises(UnsupportedError, match=sentence):
        jax.grad(lambda x: wgrad(x).astype(jnp.float32).sum())(X)


def test_forward_mode_is_refused():
    """By JAX itself, whose rule for reverse mode this is."""
    with pytest.raises(TypeError, match=r"forward-mode .*custom_vjp function"):
        jax.jvp(dot, (X,), (X,))


def test_the_sentences_are_of_the_library():
    with pytest.raises(GmmError):
        dot(rhs=W[:2])


def test_importing_the_library_does_not_import_jax():
    apart.python(
        """
import sys, cupy_gmm
assert not {name for name in sys.modules if name.partition(".")[0] in ("jax", "jaxlib")}
assert "cupy_gmm.jax" not in sys.modules
import jax
known = set(sys.modules)
import cupy_gmm.jax
assert cupy_gmm.jax.ragged_dot
assert not {"cupy", "cuda"} & (set(sys.modules) - known), "importing the face started CUDA"
from jax._src import xla_bridge
assert not xla_bridge._backends, "importing the face started a device"
"""
    )
