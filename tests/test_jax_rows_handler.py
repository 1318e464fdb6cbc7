"""What the handlers of routing, activation and layer launch when XLA calls them: NumPy in place of kernels."""

import itertools
import types

import numpy as np
import pytest

import cupy_gmm
from tests import fakes, routes, xla
from tests.backends import DTYPES
from tests.jax_layers import EXPERTS, SLOTS, TOKENS, gradients, layer, plain, same, same_routing

jax = pytest.importorskip("jax", reason="JAX is not installed")
jnp = jax.numpy

import cupy_gmm.jax as face  # noqa: E402
from cupy_gmm import _launch  # noqa: E402
from cupy_gmm.jax import _handler, _row_handler, _row_wire, _rows, _wire  # noqa: E402
from cupy_gmm.jax._row_wire import RowsCall  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_the_cpu")
pytest_plugins = ("tests.jax_on_cpu",)

fake = fakes.machine


@pytest.mark.parametrize("tokens, slots, experts", [(1, 1, 1), (29, 3, 5), (512, 8, 64), (513, 8, 64), (2500, 7, 300)])
def test_route(xla_machine, rng, tokens, slots, experts):
    """One launch up to 4096 assignments, three above, which count in a result that nobody sees."""
    function = jax.jit(face.route, static_argnums=1)
    for _ in range(3):
        ids = routes.ids_of(rng, tokens, slots, experts)
        same_routing(function(ids, experts), cupy_gmm.route(ids, experts))
    steps = ["route_single"] if tokens * slots <= 4096 else ["route_count", "route_scan", "route_place"]
    assert xla_machine.names() == 3 * steps
    assert function._cache_size() == 1, "ids are no part of the program"
    assert len(_handler._ready) == 1, "the launches are made once"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("width, kind", [(24, "wide"), (7, "any"), (1, "any")])
def test_rows_and_their_gradients(xla_machine, rng, dtype, width, kind):
    """The bits of the NumPy path, which the stand-ins compute from addresses."""
    routing = cupy_gmm.route(routes.ids_of(rng, TOKENS, SLOTS, EXPERTS), EXPERTS)
    x, dy = (routes.normal(rng, (rows, width), dtype) for rows in (TOKENS, TOKENS * SLOTS))
    y, pull = jax.vjp(jax.jit(lambda x: face.permute(x, routing)), x)
    same(y, cupy_gmm.permute(x, routing))
    same(pull(jnp.asarray(dy))[0], cupy_gmm.permute_backward(dy, routing))
    for weight_dtype in ("float32", "bfloat16", "float16"):
        weights = routes.normal(rng, (TOKENS, SLOTS), weight_dtype)
        out, pull = jax.vjp(jax.jit(lambda y, weights: face.combine(y, routing, weights)), dy, weights)
        same(out, cupy_gmm.combine(dy, routing, weights))
        d_y, d_weights = cupy_gmm.combine_backward(x, dy, routing, weights)
        for got, want in zip(pull(jnp.asarray(x)), (d_y, d_weights.astype(weights.dtype)), strict=True):
            same(got, want)
    moved = {"any": {"float32": "4_bytes"}.get(dtype, "2_bytes")}.get(kind, kind)
    both = [f"combine_rows_{dtype}_{kind}", f"combine_rows_backward_{dtype}_{kind}"]
    assert xla_machine.names() == [f"permute_rows_{moved}", both[0], *both, *both, *both]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("inner, kind", [(16, "wide"), (5, "any")])
def test_activation_and_its_gradient(xla_machine, rng, dtype, inner, kind):
    gate_up, dh = (routes.normal(rng, (31, n * inner), dtype) for n in (2, 1))
    h, pull = jax.vjp(jax.jit(face.silu_mul), gate_up)
    same(h, cupy_gmm.silu_mul(gate_up))
    same(pull(jnp.asarray(dh))[0], cupy_gmm.silu_mul_backward(gate_up, dh))
    assert xla_machine.names() == [f"silu_mul_{dtype}_{kind}", f"silu_mul_backward_{dtype}_{kind}"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("weight_dtype", ["float32", "bfloat16"])
def test_layer(xla_machine, rng, dtype, weight_dtype):
    """The bits of the NumPy path, the launches of the CuPy path, one schedule for six products, one program."""
    function = jax.jit(lambda *inputs: gradients(face.expert_ffn, *inputs))
    for _ in range(2):
        xla_machine.log.clear()
        inputs = layer(rng, dtype, weight_dtype)
        for got, want in zip(function(*inputs), plain(*inputs), strict=True):
            same(got, want)
        names = xla_machine.names()
        assert names.count("fill") == 1
        assert names.count("zero") == 0
        assert names.count("grouped_mm") == 4
        assert names.count("grouped_mm_wgrad") == 2
        rows = [name for name in names if name.split("_")[0] in ("route", "permute", "combine", "silu")]
        assert sorted(rows) == sorted([
            "route_single", "permute_rows_wide", f"silu_mul_{dtype}_wide", f"combine_rows_{dtype}_wide",
            f"combine_rows_backward_{dtype}_wide", f"silu_mul_backward_{dtype}_wide", f"combine_rows_{dtype}_wide",
        ])  # fmt: skip
    assert function._cache_size() == 1


def test_layer_in_scan_with_checkpoint_and_donation(xla_machine, rng):
    """Two layers: a captured constant stays what it is, the donated state is dead."""
    x, up, down, ids, weights, _ = layer(rng)
    constant = jnp.float32(0.125)

    def step(carry, choice):
        y = jax.checkpoint(face.expert_ffn)(carry, up, down, choice, weights)
        return y * jnp.bfloat16(0.0625), constant

    def loss(x, ids):
        last, seen = jax.lax.scan(step, x, ids)
        return last.astype(jnp.float32).sum(), (last, seen)

    both = jnp.stack([ids, ids[::-1]])
    given = jnp.asarray(x)
    (_, (last, seen)), dx = jax.jit(jax.value_and_grad(loss, has_aux=True), donate_argnums=0)(given, both)
    want = x
    for choice in (ids, ids[::-1]):
        want = cupy_gmm.expert_ffn(want, up, down, choice, weights) * want.dtype.type(0.0625)
    same(last, want)
    assert np.array_equal(seen, [0.125, 0.125])
    assert dx.shape == x.shape
    names = xla_machine.names()
    assert names.count("route_single") == names.count("fill") == 4  # each layer, and again before its gradient
    assert names.count("grouped_mm_wgrad") == 0  # nobody asked
    if given.is_deleted():
        with pytest.raises((RuntimeError, ValueError), match="deleted"):
            jnp.sign(given)


def test_eager_arrays(xla_machine, rng):
    """Each call of a layer is found again: nothing is traced or made anew for other values."""
    found = set()
    for _ in range(3):
        *inputs, _ = layer(rng)
        same(face.expert_ffn(*inputs), cupy_gmm.expert_ffn(*inputs))
        found.add((len(_handler._ready), _rows._first_order._cache_size(), _rows._route._cache_size()))
    assert found == {(7, 3, 1)}  # two of the products and their schedule besides


def test_an_error_of_the_compiler_comes_when_the_program_is_loaded(xla_machine, rng, monkeypatch):
    def unit_function(*_):
        raise cupy_gmm.CompileError("NVRTC said no.")

    monkeypatch.setattr(_launch, "unit_function", unit_function)
    gate_up = routes.normal(rng, (31, 8), "bfloat16")
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"cupy_gmm: NVRTC said no\."):
        jax.jit(face.silu_mul).lower(gate_up).compile()
    assert xla_machine.names() == []


# ---- parameters

CALLS = [
    RowsCall("route", 29, 3, 5, 0, "int32"),
    RowsCall("route", 29, 3, 5, 0, "int64"),
    RowsCall("route", 2500, 7, 300, 0, "int64"),
    *(
        RowsCall(op, tokens, slots, 5, width, dtype, weights if op.startswith("combine") else "-")
        for op in ("permute", "permute_backward", "combine", "combine_backward")
        for tokens, slots, width, dtype, weights in (
            (29, 3, 24, "bfloat16", "float32"), (1, 1, 7, "float16", "bfloat16"), (3000, 2, 4096, "float32", "float16"),
        )
    ),
    *(RowsCall(op, rows, 1, 0, inner, dtype) for op in ("silu_mul", "silu_mul_backward")
      for rows, inner, dtype in ((31, 16, "bfloat16"), (1, 5, "float32"), (9000, 2048, "float16"))),
]  # fmt: skip


def as_cupy(gpu, call, addresses):
    """The public function on CuPy arrays at these addresses, writing to `out=`."""
    arrays = [
        gpu.cupy.ndarray(shape, DTYPES[dtype] if dtype != "int64" else np.int64, ptr=address)
        for address, (shape, dtype) in zip(addresses, (*call.operands, *call.results), strict=True)
    ]
    given, out = arrays[: len(call.operands)], arrays[len(call.operands) :]

    def routing(order, inverse, offs):
        return cupy_gmm.Routing(order, inverse, offs, None, call.tokens)

    if call.op == "route":
        cupy_gmm.route(given[0], call.experts, out=cupy_gmm.Routing(*out[:4], tokens=call.tokens))
    elif call.op == "permute":
        cupy_gmm.permute(given[0], routing(*given[1:]), out=out[0])
    elif call.op == "permute_backward":
        cupy_gmm.permute_backward(given[0], routing(*given[1:]), out=out[0])
    elif call.op == "combine":
        cupy_gmm.combine(given[0], routing(*given[1:4]), given[4], out=out[0])
    elif call.op == "combine_backward":
        cupy_gmm.combine_backward(*given[:2], routing(*given[2:5]), given[5], out=tuple(out))
    else:
        getattr(cupy_gmm, call.op)(*given, out=out[0])


@pytest.mark.parametrize("call", CALLS, ids=_wire.text)
def test_launches_are_those_of_the_cupy_face(call, fake, monkeypatch):
    """Kernel, grid, block, shared memory, and every word of the parameters, at the same addresses."""
    monkeypatch.setattr(_launch, "unit_function", lambda unit, symbol, *_: types.SimpleNamespace(handle=symbol))
    found = []
    monkeypatch.setattr(_launch, "enqueue", lambda *launch: found.append(launch))
    monkeypatch.setattr(_launch, "ready", xla.repeated(lambda *launch: found.append(launch)))
    count = len(call.operands) + len(call.results)
    addresses = [0x7F00_0000_0000 + 0x123_4500 * (index + 1) for index in range(count)]
    if call.op == "route" and count == 6:
        fake.addresses = itertools.count(addresses[-1])  # the CuPy face asks its pool for scratch
    as_cupy(fake, call, addresses)
    wanted = found.copy()
    found.clear()
    made = _row_handler.Rows(call, 0)
    for shift in (1 << 20, 0):  # nothing of a call stays for the next one
        found.clear()
        at = [address + shift for address in addresses]
        for launch in made.ready(fake.cupy_streams[0], at[: len(call.operands)], at[len(call.operands) :]):
            launch()
    assert found == wanted
    assert wanted


def test_a_misaligned_array_is_refused(fake, monkeypatch):
    monkeypatch.setattr(_launch, "unit_function", lambda *_: types.SimpleNamespace(handle=1))
    rows = _row_handler.Rows(RowsCall("silu_mul", 31, 1, 0, 16, "bfloat16"), 0)
    with pytest.raises(RuntimeError, match=r"XLA gave an array at 0x208: expected a multiple of 16\."):
        rows.ready(0, [0x100], [0x208])
    with pytest.raises(RuntimeError, match=r"XLA gave 3 arrays: expected 2\."):
        rows.ready(0, [0x100], [0x200, 0x300])
    assert not rows.known
    assert not fake.calls("launch")


def test_a_call_survives_its_text():
    for call in CALLS:
        assert _wire.parsed(_wire.text(call).encode(), RowsCall) == call
    with pytest.raises(cupy_gmm.UnsupportedError, match="another release of this library wrote"):
        _wire.parsed(_wire.text(CALLS[0]).replace("slots=3 ", "").encode(), RowsCall)


def test_every_call_has_a_handler():
    assert set(face.TARGETS) == set(_handler.handlers())
    assert {call.op for call in CALLS} == set(_row_wire.OPS)
