"""Routing and the expert layer of `cupy_gmm.jax` on a GPU: the bits of the CuPy face, through every transformation."""

import json

import numpy as np
import pytest

import cupy_gmm
from tests import apart, backends, routes
from tests.backends import Backend
from tests.jax_layers import exact, gradients, layer, plain, same, same_routing

pytestmark = pytest.mark.gpu
pytest_plugins = ("tests.lateness",)  # the fixture `jax`

BF16 = "bfloat16"

# One launch of `route` and three; 16-byte accesses and single elements; few rows and many.
EXTENTS = {
    "small": {"tokens": 29, "slots": 3, "experts": 5, "h": 24, "inner": 16},
    "unaligned": {"tokens": 101, "slots": 2, "experts": 7, "h": 13, "inner": 17},
    "long": {"tokens": 2039, "slots": 8, "experts": 64, "h": 136, "inner": 72},
    "whole": {"tokens": 1024, "slots": 2, "experts": 8, "h": 256, "inner": 128},
}


@pytest.fixture
def face(jax):
    import cupy_gmm.jax

    return cupy_gmm.jax


def on_host(gpu: Backend, routing):
    arrays = (gpu.get(getattr(routing, name)) for name in ("order", "inverse", "offs", "counts"))
    return cupy_gmm.Routing(*arrays, tokens=routing.tokens)


@pytest.mark.parametrize(
    "tokens, slots, experts", [(1, 1, 1), (29, 3, 5), (512, 8, 64), (513, 8, 8192), (30011, 7, 300)]
)
def test_route(jax, face, gpu, rng, tokens, slots, experts):
    function = jax.jit(lambda ids, experts: face.route(ids, experts), static_argnums=1)  # a cache of its own
    for _ in range(3):
        ids = routes.ids_of(rng, tokens, slots, experts)
        found = function(ids, experts)
        same_routing(found, on_host(gpu, cupy_gmm.route(gpu.cupy.asarray(ids), experts)))
        same_routing(found, cupy_gmm.route(ids, experts))
    assert function._cache_size() == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("width", [1, 7, 24, 4096])
def test_rows_and_their_gradients(jax, face, gpu, rng, dtype, width):
    """NaN in every row and weight that the contract does not use."""
    tokens, slots = 331, 3
    ids = routes.ids_of(rng, tokens, slots, 9)
    here = routes.route(ids, 9)
    there, routing = cupy_gmm.route(gpu.cupy.asarray(ids), 9), face.route(ids, 9)
    x, y = (routes.normal(rng, (rows, width), dtype) for rows in (tokens, tokens * slots))
    weights = routes.normal(rng, (tokens, slots), "float32")
    y[here.offs[-1] :] = np.nan
    weights[(here.live < 0).reshape(weights.shape)] = np.nan
    placed = [gpu.cupy.asarray(each) for each in (x, y, weights)]

    moved, pull = jax.vjp(jax.jit(lambda x: face.permute(x, routing)), x)
    same(moved, gpu.get(cupy_gmm.permute(placed[0], there)))
    same(pull(jax.numpy.asarray(y))[0], gpu.get(cupy_gmm.permute_backward(placed[1], there)))
    out, pull = jax.vjp(jax.jit(lambda y, weights: face.combine(y, routing, weights)), y, weights)
    same(out, gpu.get(cupy_gmm.combine(placed[1], there, placed[2])))
    wanted = cupy_gmm.combine_backward(placed[0], placed[1], there, placed[2])
    for got, want in zip(pull(jax.numpy.asarray(x)), wanted, strict=True):
        same(got, gpu.get(want))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("inner", [5, 16, 2048])
def test_activation_and_its_gradient(jax, face, gpu, rng, dtype, inner):
    gate_up, dh = (routes.normal(rng, (1009, n * inner), dtype) for n in (2, 1))
    h, pull = jax.vjp(jax.jit(face.silu_mul), gate_up)
    placed = gpu.cupy.asarray(gate_up)
    same(h, gpu.get(cupy_gmm.silu_mul(placed)))
    same(pull(jax.numpy.asarray(dh))[0], gpu.get(cupy_gmm.silu_mul_backward(placed, gpu.cupy.asarray(dh))))


def with_cupy(gpu, inputs):
    """y and the gradients by the CuPy face; that of the weights in their dtype."""
    *given, dy = (gpu.cupy.asarray(each) for each in inputs)
    y, saved = cupy_gmm.expert_ffn(*given, save=True)
    *found, d_weights = (gpu.get(each) for each in (y, *cupy_gmm.expert_ffn_backward(dy, saved)))
    return *found, d_weights.astype(inputs[4].dtype)


@pytest.mark.parametrize("name", EXTENTS)
@pytest.mark.parametrize(
    "dtype, weight_dtype", [("bfloat16", "float32"), ("float16", "float32"), ("bfloat16", "bfloat16")]
)
def test_layer_and_its_gradients(jax, face, gpu, rng, name, dtype, weight_dtype):
    """One program for all ids; eager calls, too."""
    function = jax.jit(lambda *inputs: gradients(face.expert_ffn, *inputs))
    for _ in range(3):
        inputs = layer(rng, dtype, weight_dtype, **EXTENTS[name])
        wanted = with_cupy(gpu, inputs)
        for got, want in zip(function(*inputs), wanted, strict=True):
            same(got, want)
        same(face.expert_ffn(*inputs[:5]), wanted[0])
    assert function._cache_size() == 1


@pytest.mark.parametrize("name", ["small", "long"])
def test_layer_on_whole_numbers(jax, face, rng, name):
    """The bits of the NumPy path where the activation is exact; +0 for -0."""
    inputs = exact(rng, **EXTENTS[name])
    found = jax.jit(lambda *inputs: gradients(face.expert_ffn, *inputs))(*inputs)
    for got, want in zip(found, plain(*inputs), strict=True):
        same(np.asarray(got) + want.dtype.type(0), want + want.dtype.type(0))


def test_nothing_is_allocated_and_constants_stay(jax, face, rng):
    """C69: not by CuPy, whatever XLA asks for; under `scan` and `checkpoint`, run after run the same bits."""
    x, up, down, ids, weights, _ = layer(rng, **EXTENTS["long"])
    constant = jax.numpy.float32(0.25)

    def step(carry, _):
        return jax.checkpoint(face.expert_ffn)(carry, up, down, ids, weights), constant

    def loss(x):
        last, seen = jax.lax.scan(step, x, None, length=4)
        return (last.astype("float32") ** 2).sum(), seen

    function = jax.jit(jax.value_and_grad(loss, has_aux=True))
    with backends.no_allocation():
        runs = [jax.block_until_ready(function(x)) for _ in range(3)]
    for run in runs:
        assert np.array_equal(run[0][1], [0.25] * 4)
        for one, other in zip(jax.tree.leaves(run), jax.tree.leaves(runs[0]), strict=True):
            same(one, other)


def test_donation(jax, face, gpu, rng):
    """C71: a donated array is dead, and a call with it raises."""
    inputs = layer(rng, **EXTENTS["whole"])
    function = jax.jit(face.expert_ffn, donate_argnums=0)
    given = jax.device_put(inputs[0])
    same(function(given, *inputs[1:5]), with_cupy(gpu, inputs)[0])
    assert given.is_deleted()
    with pytest.raises((RuntimeError, ValueError), match="deleted"):
        function(given, *inputs[1:5])


def test_shard_map(jax, face, rng):
    """Tokens over all devices there are: the rows of one device; weight gradients are sums over devices."""
    from jax.sharding import Mesh
    from jax.sharding import PartitionSpec as P

    x, up, down, ids, weights, dy = layer(rng, **EXTENTS["whole"])
    devices = jax.devices()
    count = len(devices) if len(x) % len(devices) == 0 else 1
    mesh = Mesh(np.array(devices[:count]), ("d",))
    specs = {"in_specs": (P("d"), P(), P(), P("d"), P("d")), "out_specs": P("d")}
    sharded = jax.jit(jax.shard_map(face.expert_ffn, mesh=mesh, **specs))
    found = jax.jit(lambda *inputs: gradients(sharded, *inputs))(x, up, down, ids, weights, dy)
    alone = jax.jit(lambda *inputs: gradients(face.expert_ffn, *inputs))(x, up, down, ids, weights, dy)
    for place, (got, want) in enumerate(zip(found, alone, strict=True)):
        if count == 1 or place in (0, 1, 4):
            same(got, want)
        else:
            got, want = (np.asarray(each, np.float64) for each in (got, want))
            assert np.abs(got - want).max() <= 2.0**-6 * np.abs(want).max()


# ---- in processes of their own

PROGRAM = """
import hashlib, json, sys
import numpy as np, jax, jax.numpy as jnp
import cupy_gmm.jax as face
from cupy_gmm.jax import _handler
from tests.handler_calls import counted

called = counted({"rows": _handler.Rows, "fill": _handler.Schedule, "product": _handler.Product})

rng = np.random.default_rng(7)
bf16 = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
x, up, down = bf16(1009, 64), bf16(8, 64, 144) / 4, bf16(8, 72, 64)
weights = jnp.asarray(rng.random((1009, 6), np.float32))

@jax.jit
def step(x, up, down, ids, weights):
    def loss(x, up, down, weights):
        y = face.expert_ffn(x, up, down, ids, weights)
        return (face.expert_ffn(y, up, down, ids[::-1], weights).astype(jnp.float32) ** 2).mean()
    return jax.value_and_grad(loss, (0, 1, 2, 3))(x, up, down, weights)

digest = hashlib.sha256()
for seed in range(int(sys.argv[1])):
    ids = np.random.default_rng(seed).integers(-1, 9, (1009, 6)).astype(np.int32)
    for leaf in jax.tree.leaves(step(jnp.roll(x, seed, 0), up, down, ids, weights)):
        digest.update(np.asarray(leaf).tobytes())
print(json.dumps({"digest": digest.hexdigest(), **called}))
"""


def run(steps, **environment):
    done = apart.python(PROGRAM, str(steps), XLA_PYTHON_CLIENT_PREALLOCATE="false", **environment)
    return json.loads(done.stdout.splitlines()[-1])


def test_command_buffers(jax):
    """C70: on and off give the same bits for changing ids.

    Off, a step of two layers calls 14 beside two schedules and twelve products. On, XLA calls the handlers only to
    record: in its first steps, and when arrays have come to lie elsewhere.
    """
    steps = 100
    off = run(steps, XLA_FLAGS="--xla_gpu_enable_command_buffer=")
    on = run(steps)
    assert (off["rows"], off["fill"], off["product"]) == (14 * steps, 2 * steps, 12 * steps)
    assert on["digest"] == off["digest"]
    assert 0 < on["rows"] < off["rows"] / 2, on


def test_restart_with_the_compilation_cache(jax, tmp_path):
    """A program that JAX finds on disk runs: its launches are made when it is loaded."""
    options = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    assert run(20, **options)["digest"] == run(20, **options)["digest"]
