"""`cupy_gmm.jax` where there is no GPU: the same meaning through `lax.ragged_dot`, and what is lowered for CUDA."""

from importlib.util import find_spec

import numpy as np
import pytest

import cupy_gmm
from tests import apart, oracle
from tests.jax_on_cpu import SHARED, calls, lowered, on_two_devices

jax = pytest.importorskip("jax", reason="JAX is not installed")
jnp = jax.numpy

import cupy_gmm.jax as face  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_the_cpu")
pytest_plugins = ("tests.jax_on_cpu",)

ROWS, K, N = 29, 13, 17
SIZES = {
    "even": [7, 7, 7, 8],
    "tail": [5, 0, 11, 7],
    "empty": [0, 0, 0, 0],
    "one": [0, 29, 0, 0],
    "too many": [20, 20, 20, 20],
    "negative": [9, -4, 11, 3],
    "all negative": [-1, -2, -3, -4],
    "wrapping": [2**31 - 1, 2**31 - 1, 2**31 - 1, 7],
    "falling": [-(2**31), -(2**31), 6, 2**31 - 1],
}


def operands(rng, sizes, dtype="bfloat16", k=K, n=N):
    """NaN wherever the contract says that nothing is used."""
    ends = ends_of(sizes)
    spans = oracle.bounds_of(ends, ROWS)
    x, w, dy = (oracle.integers(rng, shape, dtype) for shape in ((ROWS, k), (len(sizes), k, n), (ROWS, n)))
    x[max(end for _, end in spans) :] = np.nan
    dy[max(end for _, end in spans) :] = np.nan
    w[[start == end for start, end in spans]] = np.nan
    return x, w, dy, ends, spans


def ends_of(sizes):
    return np.clip(np.cumsum(sizes, dtype=np.int64), -(2**31), 2**31 - 1).astype(np.int32)


def same(got, want):
    got, want = np.asarray(got), np.asarray(want)
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    assert got.tobytes() == want.tobytes()


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_forward_keeps_the_contract(rng, name, dtype):
    """Bits of the NumPy path, by sizes and by offsets; NaN in the tail and in the weights of empty groups."""
    x, w, _, ends, spans = operands(rng, SIZES[name], dtype)
    want = oracle.expected_mm(x, w, spans, dtype)
    same(jax.jit(face.ragged_dot)(x, w, jnp.array(SIZES[name], jnp.int32)), want)
    same(jax.jit(face.grouped_mm)(x, w, ends), want)
    same(cupy_gmm.grouped_mm(x, w, ends), want)


@pytest.mark.parametrize("out_dtype", ["bfloat16", "float16", "float32"])
def test_result_type(rng, out_dtype):
    x, w, _, ends, spans = operands(rng, SIZES["tail"])
    want = oracle.expected_mm(x, w, spans, out_dtype)
    same(face.ragged_dot(x, w, jnp.array(SIZES["tail"]), preferred_element_type=out_dtype), want)
    same(face.grouped_mm(x, w, ends, out_dtype=out_dtype), want)


@pytest.mark.parametrize("name", SIZES)
def test_gradients_keep_the_contract(rng, name):
    x, w, dy, ends, spans = operands(rng, SIZES[name])
    sizes = jnp.array(SIZES[name], jnp.int32)
    y, pull = jax.vjp(face.ragged_dot, x, w, sizes)
    dx, dw, dsizes = pull(jnp.asarray(dy))
    assert y.shape == (ROWS, N)
    assert dsizes.dtype == jax.dtypes.float0
    same(dx, oracle.expected_mm(dy, w.swapaxes(1, 2), spans, "bfloat16"))
    same(dw, oracle.expected_wgrad(x, dy, spans, "bfloat16", len(sizes), 0, None))
    same(face.grouped_mm_wgrad(x, dy, ends), dw)


@pytest.mark.parametrize("name", ["even", "tail", "one"])
def test_gradients_are_those_of_lax(rng, name):
    """A float32 result, whose cotangent is rounded; random values."""
    x, w = (rng.standard_normal(shape).astype(jnp.bfloat16) for shape in ((ROWS, K), (4, K, N)))
    sizes = jnp.array(SIZES[name], jnp.int32)

    def loss(dot):
        def value(x, w):
            return (dot(x, w, sizes, preferred_element_type=jnp.float32) ** 2).sum()

        return jax.jit(jax.value_and_grad(value, (0, 1)))

    used = (np.arange(ROWS) < sum(SIZES[name]))[:, None]
    (ours, grads), (theirs, wanted) = loss(face.ragged_dot)(x, w), loss(jax.lax.ragged_dot)(np.where(used, x, 0), w)
    assert abs(ours - theirs) <= 1e-5 * abs(theirs)
    for got, want, scale in zip(grads, wanted, (K * N, ROWS * K), strict=True):
        got, want = (np.asarray(each, np.float32) for each in (got, want))
        assert got.shape == want.shape
        assert (np.abs(got - want) <= 2.0**-7 * (np.abs(want) + 4 * np.sqrt(scale))).all()


def test_a_range_of_groups(rng):
    """Numbers, values of one element, and out of range as a value: rows of groups that are not local are zero."""
    sizes = SIZES["tail"]
    x, w, dy, ends, _ = operands(rng, sizes)
    function = jax.jit(lambda x, w, first: face.ragged_dot(x, w, jnp.array(sizes), group_offset=first))
    for first, local in ((0, 2), (1, 3), (2, 2), (3, 1)):
        part = w[first : first + local]
        want = cupy_gmm.grouped_mm(x, part, ends, group_offset=first)
        for value in (first, np.int64(first), jnp.int32(first), jnp.array([first], jnp.int32)):
            same(face.ragged_dot(x, part, jnp.array(sizes), group_offset=value), want)
        same(function(x, part, jnp.int32(first)), want)
        same(face.grouped_mm(x, part, ends, group_offset=first), want)
        want = cupy_gmm.grouped_mm_wgrad(x, dy, ends, group_offset=first, num_groups=local)
        same(face.grouped_mm_wgrad(x, dy, ends, group_offset=first, num_groups=local), want)
        same(face.grouped_mm_wgrad(x, dy, ends, group_offset=jnp.int32(first), num_groups=local), want)
    for first in (-3, -1, 3, 7):
        want = cupy_gmm.grouped_mm(x, w[:2], ends, group_offset=np.array(first, np.int32))
        same(function(x, w[:2], jnp.int32(first)), want)


def test_no_retrace_on_new_sizes(rng):
    x, w, *_ = operands(rng, SIZES["even"])
    traced = []

    @jax.jit
    def step(x, w, sizes):
        traced.append(sizes.shape)
        return jax.grad(lambda w: face.ragged_dot(x, w, sizes).astype(jnp.float32).sum())(w)

    for sizes in SIZES.values():
        step(x, w, jnp.array(sizes, jnp.int32))
    assert traced == [(4,)]
    step(x, w[:3], jnp.array([1, 2, 3], jnp.int32))  # C44: another number of groups is another trace, and right
    assert traced == [(4,), (3,)]


def test_empty_extents():
    for rows, k, n, groups in ((0, 4, 4, 2), (4, 0, 4, 2), (4, 4, 0, 2), (4, 4, 4, 0)):
        x, w = jnp.ones((rows, k), jnp.float16), jnp.ones((groups, k, n), jnp.float16)
        sizes = jnp.ones((groups,), jnp.int32)
        y, pull = jax.vjp(lambda x, w, sizes=sizes: face.ragged_dot(x, w, sizes), x, w)
        same(y, np.zeros((rows, n), np.float16))
        dx, dw = pull(y)
        same(dx, np.zeros((rows, k), np.float16))
        same(dw, np.zeros((groups, k, n), np.float16))
        same(face.grouped_mm_wgrad(x, y, sizes), np.zeros((groups, k, n), np.float16))


@pytest.mark.parametrize(
    "left, right, wanted",
    [("float32", "float32", None), ("bfloat16", "float32", "float32"), ("bfloat16", "bfloat16", "float64")],
)
def test_other_dtypes_go_to_lax(rng, left, right, wanted):
    """With the meaning of sizes kept, also when lowered for CUDA."""
    if wanted == "float64" and not jax.config.jax_enable_x64:
        wanted = None
    sizes = jnp.array(SIZES["tail"], jnp.int32)
    x, w = (rng.integers(-3, 4, shape).astype(dtype) for shape, dtype in (((ROWS, K), left), ((4, K, N), right)))
    want = np.asarray(jax.lax.ragged_dot(x, w, sizes, preferred_element_type=wanted))
    w = np.array(w)
    w[1] = np.nan
    function = jax.jit(lambda x, w: face.ragged_dot(x, w, sizes, preferred_element_type=wanted))
    if (left, right) != ("bfloat16", "bfloat16"):
        assert "custom_call @cupy_gmm" not in lowered(function, x, w)
    same(function(x, w), np.where((np.arange(ROWS) < sum(SIZES["tail"]))[:, None], want, 0).astype(want.dtype))


def test_integers_of_any_width(rng):
    x, w, *_, spans = operands(rng, SIZES["tail"])
    for dtype in ("int8", "uint8", "int16", "uint32", "int32"):
        same(face.ragged_dot(x, w, np.array(SIZES["tail"], dtype)), oracle.expected_mm(x, w, spans, "bfloat16"))


def test_x64():
    """int64 sizes and offsets, and a running sum that int32 would wrap."""
    apart.python(
        """
import numpy as np, jax, jax.numpy as jnp
import cupy_gmm, cupy_gmm.jax
x, w = np.ones((9, 4), np.float16), np.ones((3, 4, 5), np.float16)
for sizes in ([2, 0, 4], [2**40, -2**40, 3], [-5, 2**33, 1]):
    offs = np.cumsum(np.array(sizes, np.int64))
    want = cupy_gmm.grouped_mm(x, w, offs)
    assert jnp.array(sizes).dtype == jnp.int64
    assert np.array_equal(cupy_gmm.jax.ragged_dot(x, w, jnp.array(sizes)), want), sizes
    assert np.array_equal(cupy_gmm.jax.grouped_mm(x, w, jnp.asarray(offs)), want), sizes
""",
        JAX_ENABLE_X64="1",
        JAX_PLATFORMS="cpu",
    )


# ---- lowered for CUDA, on a machine without one


def test_lowering_for_cuda(rng):
    """Our calls with their facts, and nothing of `ragged_dot`; the weights are read transposed, not transposed."""
    x, w, *_ = operands(rng, SIZES["even"])
    sizes = jnp.array(SIZES["even"], jnp.int32)
    text = lowered(jax.jit(jax.value_and_grad(lambda x, w, s: face.ragged_dot(x, w, s).sum(), (0, 1))), x, w, sizes)
    assert "ragged" not in text
    assert "stablehlo.transpose" not in text
    assert "dot_general" not in text
    common = "groups=4 schedule_groups=4 dtype=bfloat16 out_dtype=bfloat16"
    assert calls(text) == [
        ("cupy_gmm.schedule", "rows=29 groups=4 sizes=1 wide=0 group_offset=0"),
        ("cupy_gmm.grouped_mm", f"op=grouped_mm rows=29 k=13 n=17 {common} transposed=0 config=-"),
        ("cupy_gmm.grouped_mm", f"op=grouped_mm rows=29 k=17 n=13 {common} transposed=1 config=-"),
        ("cupy_gmm.grouped_mm_wgrad", f"op=grouped_mm_wgrad rows=29 k=13 n=17 {common} transposed=0 config=-"),
    ]
    assert {target for target, _ in calls(text)} < set(face.TARGETS)


def test_lowering_elsewhere(rng):
    """TPU and ROCm take what the CPU takes."""
    x, w, *_ = operands(rng, SIZES["even"])
    sizes = jnp.array(SIZES["even"], jnp.int32)
    for platform in ("cpu", "tpu", "rocm"):
        assert "custom_call @cupy_gmm" not in lowered(jax.jit(face.ragged_dot), x, w, sizes, platform=platform)


def test_export(rng):
    """A program for CUDA is written and read again without a device; one for several platforms runs here."""
    export = pytest.importorskip("jax.export")
    x, w, _, _, spans = operands(rng, SIZES["tail"])
    sizes = jnp.array(SIZES["tail"], jnp.int32)
    checks = [export.DisabledSafetyCheck.custom_call(target) for target in face.TARGETS]
    for platforms in (["cuda"], ["cpu", "cuda"]):
        made = export.export(jax.jit(face.ragged_dot), platforms=platforms, disabled_checks=checks)(x, w, sizes)
        again = made if find_spec("flatbuffers") is None else export.deserialize(made.serialize())
        assert [target for target, _ in calls(again.mlir_module())] == ["cupy_gmm.schedule", "cupy_gmm.grouped_mm"]
    same(again.call(x, w, sizes), oracle.expected_mm(x, w, spans, "bfloat16"))


def test_shard_map_and_checkpoint_in_scan():
    """Two devices: experts shared out by `group_offset`; rows shared out, weights the same everywhere."""
    on_two_devices(SHARED + PROGRAM)


PROGRAM = """
key = jax.random.key(0)
x = jax.random.randint(key, (16, 8), -2, 3).astype(jnp.bfloat16)
w = jax.random.randint(key, (4, 8, 8), -2, 3).astype(jnp.bfloat16)
sizes = jnp.array([4, 0, 9, 2], jnp.int32)
def loss(f):
    return jax.jit(jax.value_and_grad(lambda x, w: (f(x, w, sizes).astype(jnp.float32) ** 2).sum(), (0, 1)))
def same(one, other):
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))

def experts(x, w, sizes):
    first = (2 * jax.lax.axis_index("d")).astype(jnp.int32)
    return jax.lax.psum(face.ragged_dot(x, w, sizes, group_offset=first), "d")
shared = mapped(experts, (P(), P("d"), P()), P())
same(loss(shared)(x, w), loss(jax.lax.ragged_dot)(x, w))

def rows(x, w, sizes):
    step = lambda x, _: (jnp.sign(jax.checkpoint(face.ragged_dot)(x, w, sizes[0])), None)
    dx = jax.grad(lambda x: face.ragged_dot(x, w, sizes[0]).astype(jnp.float32).sum())(x)
    dw = jax.grad(lambda w: jax.lax.psum(face.ragged_dot(x, w, sizes[0]).astype(jnp.float32).sum(), "d"))(w)
    return jax.lax.scan(step, x, None, length=2)[0], dx, dw
halves = jnp.array([[3, 0, 4, 1], [1, 2, 3, 1]], jnp.int32)
data = mapped(rows, (P("d"), P(), P("d")), (P("d"), P("d"), P()))
y, dx, dw = data(x, w, halves)
alone = [jax.jit(lambda x, w, s: jax.value_and_grad(
    lambda w: jax.lax.ragged_dot(x, w, s).astype(jnp.float32).sum())(w)[1])(x[i * 8 : i * 8 + 8], w, halves[i])
    for i in range(2)]
same(dw, alone[0] + alone[1])
for f, operands in ((shared, (x, w, sizes)), (data, (x, w, halves))):
    text = f.trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    assert "custom_call @cupy_gmm.grouped_mm" in text and "ragged" not in text
"""
