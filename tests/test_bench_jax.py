"""The benchmark of JAX's face, as far as it goes with no GPU: its chains are what they say, its records are read."""

import io
import time

import numpy as np
import pytest
from rich.console import Console

from bench import report, shapes
from bench.shapes import Problem

jax = pytest.importorskip("jax", reason="JAX is not installed")
jnp = jax.numpy

from bench import jax_clock, jax_contenders, jax_products, jax_step, jax_work  # noqa: E402
from cupy_gmm.jax import _abi, _handler, _lowering, ragged_dot  # noqa: E402
from tests import xla  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_the_cpu")
pytest_plugins = ("tests.jax_on_cpu",)

FOREIGN = _lowering.foreign  # before anybody renames targets
SMALL = Problem("small", 4, 64, 48, 37, (5, 0, 30, 2))


@pytest.fixture
def arrays():
    keys = jax.random.split(jax.random.key(0))
    shapes = (SMALL.rows, SMALL.k), (SMALL.groups, SMALL.k, SMALL.n)
    x, w = (jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True))
    return x, w, jnp.array(SMALL.counts, jnp.int32)


class Runtime:
    """CUDA's events as the host's clock has them, and everything in its order."""

    def __init__(self):
        self.log, self.times = [], []

    def eventCreate(self):
        self.times.append(None)
        return len(self.times) - 1

    def eventRecord(self, event, stream):
        self.log.append(("record", event, stream))
        self.times[event] = time.perf_counter()

    def streamWaitEvent(self, stream, event):
        assert self.times[event] is not None, "waits for what is not recorded yet: not at all"
        self.log.append(("wait", event, stream))

    def eventElapsedTime(self, begin, end):
        return (self.times[end] - self.times[begin]) * 1e3

    def deviceSynchronize(self):
        self.log.append(("synchronize",))


@pytest.fixture
def clock(monkeypatch):
    """On XLA's CPU platform, which has no streams: it is given one."""
    monkeypatch.setattr(_abi, "stream_get", lambda api: lambda asked: asked.__setitem__(_abi.ASKED_STREAM, xla.STREAM))
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")  # where JAX has a GPU, too
    runtime = Runtime()
    made = jax_clock.Clock(runtime, lambda: runtime.log.append(("load",)), "cpu")
    made.runtime = runtime
    yield made
    KEPT.append(made)  # XLA may call it as long as the process lives


KEPT = []


def test_a_run_is_timed_behind_the_load(clock):
    """Inside JAX: its stream waits for the load, and what comes next for the end. The device is not waited for."""
    program = jax.jit(lambda x: (x + 1, clock.end(clock.begin(x) * 2)))
    x = jnp.arange(4.0)
    for run, between in (
        (lambda: clock.inside(lambda: program(x)), True),
        (lambda: clock.in_flight(lambda: x + 1, 3), True),
        (lambda: clock.outside(lambda: time.sleep(0.01)), False),
    ):
        clock.runtime.log.clear()
        begin, end = run()
        assert clock.runtime.log == (
            [("load",), ("record", begin - 1, 0), ("wait", begin - 1, xla.STREAM), ("record", begin, xla.STREAM),
             ("record", end, xla.STREAM), ("wait", end, 0)]
            if between else [("load",), ("record", begin, 0), ("record", end, 0)]
        )  # fmt: skip
    (found,) = clock.micros([(begin, end)], 2)
    assert 4e3 < found < 1e6
    assert clock.runtime.log[-1] == ("synchronize",)


def test_marks_leave_what_passes_them_alone(clock):
    x = jnp.arange(5, dtype=jnp.int32)
    found = []

    def program(x):
        y = clock.begin(x)
        return y, clock.end(y)

    clock.inside(lambda: found.append(jax.jit(program)(x)))
    assert found[0][0].tolist() == x.tolist() == [0, 1, 2, 3, 4]


def test_the_clock_says_what_went_wrong(clock, monkeypatch):
    monkeypatch.setattr(jax_clock, "PATIENCE", 0.2)
    with pytest.raises(RuntimeError, match="came to no end"):
        clock.inside(lambda: None)
    clock._next.clear()
    monkeypatch.setattr(_abi, "stream_get", lambda api: lambda asked: 1)
    with pytest.raises(jax.errors.JaxRuntimeError, match="XLA gave no stream"):
        clock.inside(lambda: jax.jit(lambda x: clock.end(clock.begin(x)))(jnp.arange(3)))


@pytest.mark.parametrize("rebuilt", [False, True])
def test_a_chain_holds_all_its_products(xla_machine, arrays, clock, rebuilt):
    """And builds one schedule, or one for each; all is between the marks; the result is that of a single product."""
    run = jax_work.chain(ragged_dot, 5, rebuilt, clock.begin, clock.end)
    function = jax.jit(run).lower(*arrays).compile()
    text = function.as_text()
    made = jax_work.calls_in(text, "cupy_gmm.grouped_mm")
    merges = jax.__version_info__ < (0, 11)  # before, the CPU's XLA does so across the barrier
    assert made == 5 or merges
    assert jax_work.calls_in(text, "cupy_gmm.schedule") == (5 if rebuilt and not merges else 1)
    assert [jax_work.calls_in(text, target) for target in clock._targets.values()] == [1, 1]
    found, at = [], []
    record = clock.runtime.eventRecord
    clock.runtime.eventRecord = lambda *given: (at.append(len(xla_machine.log)), record(*given))
    clock.inside(lambda: found.append(function(*arrays)))
    y, _ = jax.block_until_ready(found[0])
    assert xla_machine.names().count("grouped_mm") == made
    assert at == [0, 0, len(xla_machine.log)]
    single = jax.jit(ragged_dot)(*arrays)
    assert np.array_equal(np.asarray(y).view(np.uint16), np.asarray(single).view(np.uint16))


def test_chains_last_long_enough_and_not_much_longer():
    found = {problem.name: jax_work.length(problem) for problem in shapes.PROBLEMS}
    assert min(found.values()) >= 8
    assert max(found.values()) <= 64
    assert found["mixtral-up"] < found["qwen3-30b-down"]


def test_the_layer_is_the_same_through_either_product():
    key = jax.random.split(jax.random.key(0), 3)
    extents = (SMALL.rows, 16), (4, 16, 24), (4, 12, 16)
    operands = [jax.random.normal(*each, jnp.bfloat16) for each in zip(key, extents, strict=True)]
    sizes = jnp.array(SMALL.counts, jnp.int32)
    ours, lax = (jax.tree.leaves(jax_work.layer(dot)(*operands, sizes)) for dot in (ragged_dot, jax.lax.ragged_dot))
    assert all(jax_work.distance(one, other) < 1e-2 for one, other in zip(ours, lax, strict=True))
    assert sum(jax_work.LAYER_COUNTS) == jax_work.TOKENS * jax_work.TOP_K
    assert min(jax_work.LAYER_COUNTS) > 0


def test_a_record_is_made_printed_and_read(clock, monkeypatch):
    """With NumPy in place of CuPy, whose times are then those of nothing."""

    def from_cupy(arrays, products):
        result = ragged_dot(*arrays)
        return {"cupy": lambda: time.sleep(1e-4), "cupy_schedule": lambda: None}, result

    monkeypatch.setattr(jax_products, "from_cupy", from_cupy)
    monkeypatch.setattr(jax_products, "as_words", lambda array: np.asarray(array).view(np.uint16))
    monkeypatch.setattr(jax_products, "length", lambda problem: 2)
    heated = []
    settings = jax_products.Settings(clock, heated.append, rounds=3, kernels=True)
    record = jax_products.measure(SMALL, settings)
    assert heated == [1.0]
    assert record["errors"]["same bits as cupy"]
    assert record["errors"]["ours"] < 1e-2
    assert {"ours_us", "ours_schedule_us", "cupy_us", "cupy_schedule_us", "ragged_dot_us"} <= set(record)
    assert record["ours_over_cupy"] > 0
    assert record["ours_over_cupy_spread"] >= 0
    assert "ours_kernel_us" not in record, "there are no kernels on the CPU, and that is no error"
    monkeypatch.setattr(jax_products, "LAYER_COUNTS", SMALL.counts)
    monkeypatch.setattr(jax_products, "HIDDEN", 16)
    monkeypatch.setattr(jax_products, "INNER", 8)
    records = [record, jax_products.measure_layer(settings)]
    assert records[1]["errors"]["ours"] < 1e-2
    assert records[1]["ragged_dot_over_ours"] > 0
    console = Console(file=io.StringIO(), width=240)
    console.print(jax_products.table(records))
    report.show({"run": {}, "records": records}, console)
    text = console.file.getvalue()
    assert text.count("small") >= 2
    assert " ± " in text
    assert "same" in text
    assert "without pallas" in text


def test_without_the_peers_of_jax(clock, monkeypatch):
    """A record needs none of them, nor that XLA left our chain as it is."""
    monkeypatch.setattr(jax_products, "from_cupy", lambda arrays, products: ({"cupy": lambda: None}, None))
    monkeypatch.setattr(jax_products, "programs", lambda arrays, products, clock, out: out.update(ours="merged") or {})
    settings = jax_products.Settings(clock, lambda seconds: None, rounds=2, points=0, lax=False)
    record = jax_products.measure(SMALL, settings)
    assert record["out"] == {"ours": "merged"}
    assert not {"ours_us", "ours_over_cupy", "ragged_dot_us", "pallas_us"} & set(record)
    jax_products.table([record])


def test_a_chain_that_xla_cut_short_is_not_timed(arrays, clock, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax_contenders, "calls_in", lambda text, target: 1)
    out = {}
    assert not jax_contenders.programs(arrays, 3, clock, out)
    assert out == dict.fromkeys(("ours", "ours_schedule"), "XLA made (1, 1) products and schedules of a chain of 3")


def test_the_layer_comes_first_and_the_largest_last():
    ordered = sorted(shapes.PROBLEMS, key=jax_products.cost)
    assert ordered[0].name == "decode-qwen3-up"
    assert {each.name for each in ordered[-2:]} == {"mixtral-up", "mixtral-down"}


def test_lax_is_compiled_where_an_option_is_not_known(arrays, monkeypatch):
    monkeypatch.setattr(jax_contenders, "CUBLAS_ONLY", {"xla_gpu_nonsense": 1})
    out = {}
    y = jax_contenders.of_lax(jax.jit(jax.lax.ragged_dot), arrays, False, out)()
    assert out["ragged_dot"].startswith("compiled with all of XLA's tuning: ")
    assert jax_work.distance(y, jax.lax.ragged_dot(*arrays)) < 1e-2


def test_handlers_are_timed_and_do_what_they_did(xla_machine, arrays, monkeypatch):
    """With marks around the launches, and without: the times are less than those of the step."""
    monkeypatch.setattr(_lowering, "foreign", FOREIGN)
    for kind in (_handler.Schedule, _handler.Product):
        monkeypatch.setattr(kind, "made", kind.made)
    handlers = jax_step.Handlers("cpu")
    step = jax_step.step(ragged_dot)
    x, w, sizes = arrays
    operands = x, w, jnp.swapaxes(w, 1, 2), sizes
    wanted = jax.block_until_ready(jax_step.step(jax.lax.ragged_dot)(*operands))
    jax_step.once(step, operands, 2)
    handlers.warmed()
    xla_machine.log.clear()
    jax_step.once(step, operands, 3)
    assert xla_machine.names().count("grouped_mm") == 12
    handlers.mark()
    jax_step.once(step, operands, 2)
    *lines, own = handlers.lines(3)
    assert [line.split(": ")[0] for line in lines] == [
        "cupy_gmm.schedule",
        "cupy_gmm.grouped_mm",
        "cupy_gmm.grouped_mm_wgrad",
    ]
    for line, calls in zip(lines, ("1.00", "4.00", "2.00"), strict=True):
        assert line.endswith(f" {calls} calls a step")
        assert "us on the host, Python " in line
    assert own.startswith("taken off: 0.")
    for got, want in zip(jax.tree.leaves(step(*operands)), jax.tree.leaves(wanted), strict=True):
        assert jax_work.distance(got, want) < 1e-2
