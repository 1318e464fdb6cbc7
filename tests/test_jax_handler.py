"""What the handlers launch when XLA calls them: the real interface on XLA's CPU platform, NumPy in place of kernels."""

import contextlib
import functools

import numpy as np
import pytest

from cupy_gmm import _plan, reference
from cupy_gmm._config import CONFIGS, HOPPER
from tests import oracle, xla

jax = pytest.importorskip("jax", reason="JAX is not installed")
jnp = jax.numpy

import cupy_gmm.jax as face  # noqa: E402
from cupy_gmm import _device, _heuristics, _launch, _params, _table  # noqa: E402
from cupy_gmm.jax import _counters, _handler, _wire  # noqa: E402
from tests.kernels_for_tests import FakeDriver, Status  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_the_cpu")
pytest_plugins = ("tests.jax_on_cpu",)

ROWS, K, N = 29, 16, 24
SIZES = [5, 0, 11, 7]


@pytest.fixture
def operands(rng):
    return tuple(
        jnp.asarray(oracle.integers(rng, shape, "bfloat16")) for shape in ((ROWS, K), (len(SIZES), K, N), (ROWS, N))
    )


def expected(x, w, ends, offset=0, out_dtype="bfloat16"):
    out = np.empty((x.shape[0], w.shape[2]), xla.DTYPES[out_dtype])
    reference.grouped_mm(np.asarray(x), np.asarray(w), reference.clamp_offsets(ends, x.shape[0]), out, offset)
    return out


def same(got, want):
    got = np.asarray(got)
    assert got.dtype == want.dtype
    assert got.tobytes() == want.tobytes()


def test_forward(xla_machine, operands):
    """Each product counts from its own zeroes, where scratch lies for the first time and where it lay before."""
    x, w, _ = operands
    function = jax.jit(lambda x, w, sizes: face.ragged_dot(x, w, sizes, preferred_element_type=jnp.float32))
    for sizes in (SIZES, [0, 0, 0, 0], [40, 1, -7, 3], [2**31 - 1, 2**31 - 1, 5, 5]):
        xla_machine.log.clear()
        ends = np.clip(np.cumsum(sizes, dtype=np.int64), -(2**31), 2**31 - 1)
        same(function(x, w, jnp.array(sizes, jnp.int32)), expected(x, w, ends, out_dtype="float32"))
        assert xla_machine.names() == ["fill", "grouped_mm"]
    assert len(xla_machine.built) == 1, "the plan is made once"
    assert function._cache_size() == 1, "sizes are no part of the program"


def test_offsets(xla_machine, operands):
    x, w, dy = operands
    offs = jnp.cumsum(jnp.array(SIZES, jnp.int32))
    same(jax.jit(face.grouped_mm)(x, w, offs), expected(x, w, offs))
    dw = jax.jit(functools.partial(face.grouped_mm_wgrad, out_dtype="float32"))(x, dy, offs)
    want = np.empty((len(SIZES), K, N), np.float32)
    bounds = reference.clamp_offsets(np.asarray(offs), ROWS)
    reference.grouped_mm_wgrad(np.asarray(x), np.asarray(dy), bounds, want, False, 0)
    same(dw, want)
    assert xla_machine.names() == ["fill", "grouped_mm", "fill", "grouped_mm_wgrad"]


def test_one_schedule_serves_a_layer(xla_machine, operands):
    """Two products of the same sizes and their four gradients: the table is built once.

    With `checkpoint` as well where its policy keeps the table; without, XLA may not merge what is recomputed.
    """
    x, w, _ = operands
    sizes = jnp.array(SIZES, jnp.int32)

    def layer(x, w, sizes):
        h = face.ragged_dot(x, w, sizes)
        return face.ragged_dot(h, w.swapaxes(1, 2), sizes).astype(jnp.float32).sum()

    kept = jax.checkpoint(layer, policy=jax.checkpoint_policies.save_only_these_names(face.SCHEDULE))
    found = []
    for function, tables in ((layer, (1,)), (kept, (1,)), (jax.checkpoint(layer), (1, 2))):
        xla_machine.log.clear()
        found.append(jax.block_until_ready(jax.jit(jax.value_and_grad(function, (0, 1)))(x, w, sizes)))
        names = xla_machine.names()
        assert names.count("fill") in tables
        assert names.count("grouped_mm_wgrad") == 2
        assert names.count("zero") == 0
    for other in found[1:]:
        for one, two in zip(*map(jax.tree.leaves, (found[0], other)), strict=True):
            assert np.array_equal(one, two)


def test_gradients_are_those_of_lax(xla_machine, operands):
    """Small integers: every product is exact. The input gradient reads the weights where they lie."""
    x, w, dy = operands
    dy = jnp.sign(dy)
    sizes = jnp.array(SIZES, jnp.int32)

    def vjp(dot):
        return jax.jit(lambda x, w, dy: jax.vjp(lambda x, w: dot(x, w, sizes), x, w)[1](dy))

    ours = vjp(face.ragged_dot)(x, w, dy)
    layouts = {problem.b_strides for name, problem in xla_machine.log if name == "grouped_mm" and problem.k == N}
    assert layouts == {(K * N, 1, N)}
    used = (np.arange(ROWS) < sum(SIZES))[:, None]
    x, dy = jnp.where(used, x, 0), jnp.where(used, dy, 0)
    for got, want in zip(ours, vjp(jax.lax.ragged_dot)(x, w, dy), strict=True):
        same(got, np.asarray(want))


def test_a_range_of_groups(xla_machine, operands):
    """The first local group as a number and as a value of the program."""
    x, w, _ = operands
    ends = np.cumsum(SIZES)
    local = w[1:3]
    want = expected(x, local, ends, 1)
    sizes = jnp.array(SIZES, jnp.int32)
    same(jax.jit(lambda x, w: face.ragged_dot(x, w, sizes, group_offset=1))(x, local), want)
    function = jax.jit(lambda x, w, first: face.ragged_dot(x, w, sizes, group_offset=first))
    for shape in ((), (1,)):
        same(function(x, local, jnp.full(shape, 1, jnp.int32)), want)
    same(function(x, local, jnp.int32(2)), expected(x, w[1:3], ends, 2))
    assert [first for name, first in xla_machine.log if name == "fill"] == [1, 1, 1, 2]


def test_scan_and_donation(xla_machine, operands):
    """A captured constant stays what it is; a donated operand is dead, and says so."""
    x, w, _ = operands
    square = w[:, :, :K]
    sizes = jnp.array([ROWS, 0, 0, 0], jnp.int32)
    constant = jnp.float32(0.125)

    def step(carry, _):
        y = face.ragged_dot(carry, square, sizes, preferred_element_type=jnp.float32)
        return (jnp.sign(y) * 2).astype(x.dtype), y.sum() * constant

    last, sums = jax.jit(lambda x: jax.lax.scan(step, x, None, length=3), donate_argnums=0)(jnp.copy(x))
    values, want = np.asarray(x), []
    for _ in range(3):
        y = expected(values, square, [ROWS] * 4, out_dtype="float32")
        want.append(y.sum() * np.float32(0.125))
        values = (np.sign(y) * 2).astype(values.dtype)
    assert np.array_equal(sums, want)
    same(last, values)

    dead = jnp.copy(x)
    donating = jax.jit(lambda x, w: (face.ragged_dot(x, w[:, :, :K], sizes), x + 1), donate_argnums=0)
    donating(dead, w)
    if dead.is_deleted():
        with pytest.raises((RuntimeError, ValueError), match="deleted"):
            donating(dead, w)


def test_eager_arrays(xla_machine, operands):
    x, w, _ = operands
    same(face.ragged_dot(x, w, np.array(SIZES, np.int32)), expected(x, w, np.cumsum(SIZES)))


def test_an_error_of_the_plan_comes_when_the_program_is_loaded(xla_machine, operands, monkeypatch):
    """In the sentence of the library, from the instantiate stage: nothing was launched."""
    x, w, _ = operands

    def build(*_):
        raise _plan.ArgumentError('`config` is "16x128", which cannot run this call: because.')

    monkeypatch.setattr(_plan, "build", build)
    function = jax.jit(lambda x, w: face.grouped_mm(x, w, jnp.full(len(SIZES), ROWS), config="16x128"))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r'INVALID_ARGUMENT.*`config` is "16x128", which cannot run'):
        function.lower(x, w).compile()
    assert xla_machine.names() == []


def test_a_misaligned_array_is_refused(xla_machine):
    call = _wire.ProductCall("grouped_mm", ROWS, K, N, 4, 4, "bfloat16", "bfloat16", False, "-")
    product = _handler.Product(call, xla.DEVICE)
    with pytest.raises(RuntimeError, match="expected multiples of 16"):
        product.ready(xla.STREAM, [256, 520, 768], [1024, 1280])
    assert not product.known


def test_addresses_are_packed_once_and_anew_where_they_change(xla_machine, operands, remember_only, monkeypatch):
    """What is kept of them is bounded, and never taken for others."""
    remember_only(3)
    x, w, _ = operands
    function = jax.jit(face.ragged_dot).lower(x, w, jnp.array(SIZES, jnp.int32)).compile()
    (schedule,) = (launch for launch in _handler._ready.values() if isinstance(launch, _handler.Schedule))
    (product,) = (launch for launch in _handler._ready.values() if isinstance(launch, _handler.Product))
    kept = []  # so that no address comes twice
    for step in range(5):
        sizes = np.roll(SIZES, step)
        kept.append((jnp.copy(x) + step, jnp.copy(w), jnp.array(sizes, jnp.int32)))
        kept.append(function(*kept[-1]))
        same(kept[-1], expected(*kept[-2][:2], np.cumsum(sizes)))
        assert len(product.known) > 0
        assert 0 < len(schedule.known) <= 3 - len(product.known)
    made = []
    monkeypatch.setattr(_handler.Product, "made", lambda self, *given: made.append(given) or (lambda: None,))
    product.known.clear()
    remember_only(100)
    for _ in range(3):
        function(*kept[-2])  # the result may lie elsewhere
    assert 0 < len(made) <= 3
    assert {(stream, *operands, *results) for stream, operands, results in made} == set(product.known)
    assert {operands[0] for _, operands, _ in made} == {kept[-2][0].unsafe_buffer_pointer()}


def test_counters_are_of_places_and_not_of_calls(xla_machine):
    """One for each address of scratch, whoever's it is; where none is left, scratch is zeroed."""
    calls = [
        _wire.ProductCall("grouped_mm", ROWS, k, n, 4, 4, "bfloat16", "bfloat16", False, "-")
        for k, n in ((K, N), (N, K))
    ]
    products = [_handler.Product(call, xla.DEVICE) for call in calls]
    counted, zeroed = [], []
    for product in products:
        product._plan.launch.ready = lambda *given: counted.append(given[5]) or (lambda: None)
    for scratch in range(256, 256 * (xla.COUNTERS + 4), 256):
        for product in products:
            xla_machine.log.clear()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(_launch, "zeroing", xla.repeated(lambda *arguments: zeroed.append(arguments)))
                for launch in product.made(xla.STREAM, [4096, 8192, 12288], [16384, scratch]):
                    launch()
    size, memory = next(iter(xla_machine.counter_memory.items()))
    places = [memory.ctypes.data + slot * size for slot in range(xla.COUNTERS)]
    without = list(range(256 * (xla.COUNTERS + 1), 256 * (xla.COUNTERS + 4), 256))
    assert counted == [address for address in places + without for _ in products]
    assert zeroed == [(address, 8, xla.STREAM) for address in without for _ in products]


def test_counters_are_made_once_and_zeroed(monkeypatch):
    """On a stream of their own, which the making waits for; where there is no memory, there are none."""
    fake = FakeDriver()
    fake.do_cuMemAlloc = lambda nbytes: 1 << 20
    fake.do_cuStreamCreate = lambda flags: f"stream {flags}"
    monkeypatch.setattr(_device, "current", lambda device: contextlib.nullcontext(fake))
    monkeypatch.setattr(_counters, "_made", {})
    for words, slot_bytes in ((_params.TICKET_WORDS, 32), (_table.COUNTER_WORDS, 1376)):
        fake.calls.clear()
        made = _counters.of(1, words)
        assert _counters.of(1, words) is made
        nbytes = _counters.SLOTS[slot_bytes] * slot_bytes
        assert fake.calls == [
            ("cuMemAlloc", nbytes),
            ("cuStreamCreate", 1),
            ("cuMemsetD8Async", 1 << 20, 0, nbytes, "stream 1"),
            ("cuStreamSynchronize", "stream 1"),
            ("cuStreamDestroy", "stream 1"),
        ]
        assert [made.at(address) for address in (7, 8, 7)] == [1 << 20, (1 << 20) + slot_bytes, 1 << 20]
    fake.statuses["cuMemAlloc"] = Status.CUDA_ERROR_OUT_OF_MEMORY
    assert _counters.of(2, _params.TICKET_WORDS).at(7) == 0


# ---- what travels


@pytest.mark.parametrize(
    "call",
    [
        _wire.ScheduleCall(7, 3, True, False, -1),
        _wire.ScheduleCall(0x7FFF0000, 4096, False, True, 17),
        _wire.ProductCall("grouped_mm", 1, 2, 3, 4, 5, "float16", "float32", True, "hopper-256x208"),
        _wire.ProductCall("grouped_mm_wgrad", 9, 8, 7, 6, 5, "bfloat16", "bfloat16", False, "-"),
    ],
)
def test_a_call_survives_its_text(call):
    assert _wire.parsed(_wire.text(call).encode(), type(call)) == call
    with pytest.raises(_wire.UnsupportedError, match="another release of this library wrote: expected format 1; lower"):
        _wire.parsed(_wire.text(call).replace("format=1", "format=2").encode(), type(call))
    with pytest.raises(_wire.UnsupportedError, match="another release"):
        _wire.parsed(_wire.text(call).encode() + b" more=1", type(call))


def test_results_have_room_on_every_architecture():
    """Table and scratch are allocated by shapes alone: no tuning point may need more."""
    for rows, groups in ((1, 1), (40, 3), (5000, 7), (100_003, 256)):
        words = _wire.table_words(rows, groups)
        for arch in ("sm_80", HOPPER):
            shape = _table.table_shape(groups, rows, _heuristics.block_shape(rows, groups, arch))
            assert shape.words <= words
        for k, n in ((64, 64), (72, 40), (1, 1), (136, 2048)):
            call = _wire.ProductCall("grouped_mm_wgrad", rows, k, n, groups, groups, "float16", "float32", False, "-")
            for config in CONFIGS.values():
                if config.op == call.op:
                    tiles = _plan._tiles(call.problem, config)
                    zeroed, partial = _plan._scratch(config, tiles, _plan._pieces(call.problem, tiles)[1])
                    assert _table.whole(4 * zeroed) + partial <= call.scratch_bytes
