"""`cupy_gmm.jax` on a GPU: bits of the oracle through every transformation, command buffers on and off, restarts."""

import functools
import json

import numpy as np
import pytest

from tests import apart, backends, oracle

pytestmark = pytest.mark.gpu
pytest_plugins = ("tests.lateness",)  # the fixture `jax`

ROWS = 1009
SIZES = {
    "uneven": [131, 0, 1, 557, 64, 0, 255, 1],
    "tail": [17, 0, 0, 400, 3, 0, 129, 0],
    "one": [0, 0, 0, ROWS, 0, 0, 0, 0],
    "empty": [0] * 8,
    "too many": [300] * 8,
    "negative": [400, -100, 300, -5, 0, 7, 2**31 - 1, 2**31 - 1],
}
EXTENTS = [(72, 136), (64, 256), (13, 17), (8, 8)]  # the second is a whole number of tiles, the third is never aligned


def operands(rng, sizes, dtype, k, n):
    """Integers; NaN wherever the contract says that nothing is used."""
    ends = np.clip(np.cumsum(sizes, dtype=np.int64), -(2**31), 2**31 - 1).astype(np.int32)
    spans = oracle.bounds_of(ends, ROWS)
    x, w, dy = (oracle.integers(rng, shape, dtype) for shape in ((ROWS, k), (len(sizes), k, n), (ROWS, n)))
    x[spans[-1][1] :] = np.nan
    dy[spans[-1][1] :] = np.nan
    w[[start == end for start, end in spans]] = np.nan
    return x, w, dy, ends, spans


def same(got, want):
    got = np.asarray(got)
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    assert got.tobytes() == want.tobytes()


@pytest.fixture
def face(jax):
    import cupy_gmm.jax

    return cupy_gmm.jax


@pytest.mark.parametrize("k, n", EXTENTS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_product_and_gradients(jax, face, rng, dtype, k, n):
    """One program for all sizes; by sizes and by offsets."""

    def everything(x, w, dy, sizes):
        y, pull = jax.vjp(lambda x, w: face.ragged_dot(x, w, sizes), x, w)
        wide = face.ragged_dot(x, w, sizes, preferred_element_type="float32")
        return y, *pull(dy), wide

    function = jax.jit(everything)
    by_offsets = jax.jit(face.grouped_mm), jax.jit(functools.partial(face.grouped_mm_wgrad, out_dtype="float32"))
    for sizes in SIZES.values():
        x, w, dy, ends, spans = operands(rng, sizes, dtype, k, n)
        y, dx, dw, wide = function(x, w, dy, np.array(sizes, np.int32))
        same(y, oracle.expected_mm(x, w, spans, dtype))
        same(wide, oracle.expected_mm(x, w, spans, "float32"))
        same(dx, oracle.expected_mm(dy, w.swapaxes(1, 2), spans, dtype))
        same(dw, oracle.expected_wgrad(x, dy, spans, dtype, len(sizes), 0, None))
        same(by_offsets[0](x, w, ends), np.asarray(y))
        same(by_offsets[1](x, dy, ends), oracle.expected_wgrad(x, dy, spans, "float32", len(sizes), 0, None))
    assert function._cache_size() == 1


def test_a_range_of_groups(jax, face, rng):
    x, w, _, _, spans = operands(rng, SIZES["uneven"], "bfloat16", 72, 136)
    sizes = np.array(SIZES["uneven"], np.int32)
    traced = jax.jit(lambda x, w, first: face.ragged_dot(x, w, sizes, group_offset=first))
    for first in (0, 2, 5):
        want = oracle.expected_mm(x, w[first : first + 3], spans, "bfloat16", first)
        same(traced(x, w[first : first + 3], np.int32(first)), want)
        same(face.ragged_dot(x, w[first : first + 3], sizes, group_offset=first), want)


def test_many_groups(jax, face, rng):
    """More than fit shared memory: another kernel of the schedule. Sizes are all 0 or 1."""
    groups = 9001
    sizes = (np.arange(groups) % 11 == 3).astype(np.int32)
    ends = np.cumsum(sizes, dtype=np.int32)
    x, w = oracle.integers(rng, (ROWS, 8), "bfloat16"), oracle.integers(rng, (groups, 8, 8), "bfloat16")
    same(jax.jit(face.ragged_dot)(x, w, sizes), oracle.expected_mm(x, w, oracle.bounds_of(ends, ROWS), "bfloat16"))


def test_nothing_is_allocated(jax, face, rng):
    """C69: not by CuPy, whatever XLA asks for; a float constant captured by `scan` stays what it is."""
    x, w, *_ = operands(rng, SIZES["uneven"], "bfloat16", 64, 64)
    sizes = np.array(SIZES["uneven"], np.int32)
    constant = jax.numpy.float32(0.25)

    def step(carry, _):
        y = jax.checkpoint(face.ragged_dot)(carry, w, sizes)
        return jax.nn.relu(y) / 4, (y.astype("float32").sum(), constant)

    def loss(x):
        last, (sums, constants) = jax.lax.scan(step, x, None, length=5)
        return last.astype("float32").sum(), (sums, constants)

    function = jax.jit(jax.value_and_grad(loss, has_aux=True))
    with backends.no_allocation():
        runs = [jax.block_until_ready(function(x)) for _ in range(3)]
    for run in runs:
        assert np.array_equal(run[0][1][1], [0.25] * 5)
        for one, other in zip(jax.tree.leaves(run), jax.tree.leaves(runs[0]), strict=True):
            assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def test_donation(jax, face, rng):
    """C71: a donated array is dead, and a call with it raises."""
    x, w, _, _, spans = operands(rng, SIZES["uneven"], "bfloat16", 64, 64)
    sizes = np.array(SIZES["uneven"], np.int32)
    function = jax.jit(lambda x, w: face.ragged_dot(x, w, sizes), donate_argnums=0)
    given = jax.device_put(x)
    same(function(given, w), oracle.expected_mm(x, w, spans, "bfloat16"))
    assert given.is_deleted()
    with pytest.raises((RuntimeError, ValueError), match="deleted"):
        function(given, w)


def test_shard_map(jax, face, rng):
    """Experts over all devices there are, and the rows of groups that are elsewhere are zero."""
    from jax.sharding import Mesh
    from jax.sharding import PartitionSpec as P

    from cupy_gmm.jax import _axes

    devices = jax.devices()
    count = len(devices) if 8 % len(devices) == 0 else 1
    x, w, dy, _, spans = operands(rng, SIZES["tail"], "bfloat16", 72, 136)
    x, w, dy = (np.nan_to_num(each.astype(np.float32)).astype(each.dtype) for each in (x, w, dy))
    sizes = np.array(SIZES["tail"], np.int32)

    def local(x, w, dy):
        first = (jax.lax.axis_index("d") * (8 // count)).astype("int32")
        y, pull = jax.vjp(lambda x, w: face.ragged_dot(x, w, sizes, group_offset=first), x, w)
        return jax.lax.psum(y, "d"), pull(_axes.varying(dy, frozenset({"d"})))

    mesh = Mesh(np.array(devices[:count]), ("d",))
    specs = {"in_specs": (P(), P("d"), P()), "out_specs": (P(), (P(), P("d")))}
    y, (dx, dw) = jax.jit(jax.shard_map(local, mesh=mesh, **specs))(x, w, dy)
    same(y, oracle.expected_mm(x, w, spans, "bfloat16"))
    same(dx, oracle.expected_mm(dy, w.swapaxes(1, 2), spans, "bfloat16"))
    same(dw, oracle.expected_wgrad(x, dy, spans, "bfloat16", len(sizes), 0, None))


# ---- in processes of their own

PROGRAM = """
import hashlib, json, sys
import numpy as np, jax, jax.numpy as jnp
import cupy_gmm.jax as face
from cupy_gmm.jax import _handler
from tests.handler_calls import counted

called = counted({"fill": _handler.Schedule, "product": _handler.Product})

hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event) if "cache_hit" in event else None)
rng = np.random.default_rng(7)
bf16 = lambda *shape: jnp.asarray(rng.integers(-3, 4, shape), jnp.bfloat16)
x, up, down = bf16(1009, 64), bf16(8, 64, 136), bf16(8, 136, 64)

@jax.jit
def step(x, up, down, sizes):
    def loss(x, up, down):
        h = jax.nn.relu(face.ragged_dot(x, up, sizes))  # not sign: its gradient is zero, and XLA drops what it hides
        return (face.ragged_dot(h, down, sizes, preferred_element_type=jnp.float32) / 64).sum()
    return jax.value_and_grad(loss, (0, 1, 2))(x, up, down)

digest = hashlib.sha256()
for seed in range(int(sys.argv[1])):
    sizes = np.random.default_rng(seed).multinomial(900 + seed, [1 / 8] * 8).astype(np.int32)
    for leaf in jax.tree.leaves(step(jnp.roll(x, seed, 0), up, down, sizes)):
        digest.update(np.asarray(leaf).tobytes())
print(json.dumps({"digest": digest.hexdigest(), "hits": len(hits), **called}))
"""


def run(steps, **environment):
    done = apart.python(PROGRAM, str(steps), XLA_PYTHON_CLIENT_PREALLOCATE="false", **environment)
    return json.loads(done.stdout.splitlines()[-1])


def test_command_buffers(jax):
    """C70: on and off give the same bits for changing data.

    Off, a step is one schedule and six products. On, XLA calls the handlers only to record: in its first steps, and
    when arrays have come to lie elsewhere.
    """
    steps = 100
    off = run(steps, XLA_FLAGS="--xla_gpu_enable_command_buffer=")
    on = run(steps)
    assert (off["fill"], off["product"]) == (steps, 6 * steps)
    assert on["digest"] == off["digest"]
    assert 0 < on["fill"] < off["fill"] / 2, on
    assert 0 < on["product"] < off["product"] / 2, on


def test_restart_with_the_compilation_cache(jax, tmp_path):
    """A program that JAX finds on disk runs without being traced for us again: the plan is made when it is loaded."""
    options = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    first, second = run(20, **options), run(20, **options)
    assert first["digest"] == second["digest"]
    assert second["hits"] > first["hits"]


def test_an_error_of_the_device_is_a_sentence(jax, face, rng):
    """A tuning point that cannot run the call: said when the program is compiled."""
    x, w, *_ = operands(rng, SIZES["uneven"], "bfloat16", 13, 17)
    ends = np.cumsum(SIZES["uneven"], dtype=np.int32)
    with pytest.raises(jax.errors.JaxRuntimeError, match='`config` is "128x128", which cannot run this call'):
        jax.jit(lambda x, w: face.grouped_mm(x, w, ends, config="128x128")).lower(x, w).compile()


STEPS = """
import resource, sys
import numpy as np, jax, jax.numpy as jnp, cupy
import cupy_gmm.jax as face

rng = np.random.default_rng(3)
experts, steps, measured = 16, int(sys.argv[1]), []
weights = {name: jnp.asarray(rng.standard_normal(shape) / 16, jnp.bfloat16)
           for name, shape in (("up", (experts, 256, 384)), ("down", (experts, 384, 256)))}
x = jnp.asarray(rng.standard_normal((4096, 256)), jnp.bfloat16)

def loss(weights, x, sizes):
    h = jax.nn.relu(face.ragged_dot(x, weights["up"], sizes))
    y = face.ragged_dot(h, weights["down"], sizes, preferred_element_type=jnp.float32)
    return ((y - x.astype(jnp.float32)) ** 2).mean()

def step(weights, x, sizes):
    value, grads = jax.value_and_grad(loss)(weights, x, sizes)
    return jax.tree.map(lambda w, g: (w - 8 * g.astype(jnp.float32)).astype(w.dtype), weights, grads), value

step = jax.jit(step, donate_argnums=0)
device = jax.devices()[0]
values = []
for number in range(steps):
    sizes = rng.multinomial(rng.integers(0, 4097), rng.dirichlet([0.5] * experts)).astype(np.int32)
    before = weights
    weights, value = step(weights, x, sizes)
    assert before["up"].is_deleted()
    values.append(value)
    if (number + 1) % (steps // 10) == 0:
        values = [float(value) for value in values]
        assert np.isfinite(values).all()
        values = []
        with open("/proc/self/statm") as file:
            resident = int(file.read().split()[1]) * resource.getpagesize()
        pool = cupy.get_default_memory_pool().total_bytes()
        measured.append((device.memory_stats()["bytes_in_use"], pool, resident))
assert step._cache_size() == 1
begin, end = measured[1], measured[-1]  # behind the first tenth all is compiled, and pools have grown
print(measured)
assert end[0] - begin[0] < 64 << 10, "XLA's device memory grows"  # an array a step would be six times as much
assert end[1] <= begin[1], "CuPy's device memory grows"
assert end[2] - begin[2] < 32 << 20, "the memory of the process grows"
"""


def test_many_steps(jax):
    """Training steps with donated weights and new sizes each: one program, and no memory that grows."""
    for flags in ("", "--xla_gpu_enable_command_buffer="):
        apart.python(STEPS, "2000", XLA_PYTHON_CLIENT_PREALLOCATE="false", XLA_FLAGS=flags)
