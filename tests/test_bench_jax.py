"""The benchmark of JAX's face, as far as it goes with no GPU: its chains are what they say, its records are read."""

import io

import numpy as np
import pytest
from rich.console import Console

from bench import report, shapes
from bench.shapes import Problem

jax = pytest.importorskip("jax", reason="JAX is not installed")
jnp = jax.numpy

from bench import jax_products, jax_step, jax_work  # noqa: E402
from cupy_gmm.jax import _handler, _lowering, ragged_dot  # noqa: E402
from tests import xla  # noqa: E402

FOREIGN = _lowering.foreign  # before anybody renames targets
SMALL = Problem("small", 4, 64, 48, 37, (5, 0, 30, 2))


@pytest.fixture(autouse=True)
def on_the_cpu():
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@pytest.fixture
def machine():
    with pytest.MonkeyPatch.context() as patch:
        yield from xla.machine(patch)


@pytest.fixture
def arrays():
    keys = jax.random.split(jax.random.key(0))
    shapes = (SMALL.rows, SMALL.k), (SMALL.groups, SMALL.k, SMALL.n)
    x, w = (jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True))
    return x, w, jnp.array(SMALL.counts, jnp.int32)


@pytest.mark.parametrize("rebuilt", [False, True])
def test_a_chain_holds_all_its_products(machine, arrays, rebuilt):
    """And builds one schedule, or one for each; the result is that of a single product."""
    function = jax.jit(jax_work.chain(ragged_dot, 5, rebuilt)).lower(*arrays).compile()
    text = function.as_text()
    made = jax_work.calls_in(text, "cupy_gmm.grouped_mm")
    assert made == 5 or (not rebuilt and jax.__version_info__ < (0, 11)), "before 0.11 the CPU's XLA merges across it"
    assert jax_work.calls_in(text, "cupy_gmm.schedule") == (5 if rebuilt else 1)
    y, kept = jax.block_until_ready(function(*arrays))
    assert machine.names().count("grouped_mm") == made
    single = jax.jit(ragged_dot)(*arrays)
    assert np.array_equal(np.asarray(y).view(np.uint16), np.asarray(single).view(np.uint16))
    assert np.isclose(kept, 5 * np.float32(single[0, 0]), rtol=1e-5)


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


def test_a_record_is_made_printed_and_read(monkeypatch):
    """With NumPy in place of CuPy, whose times are then those of nothing."""

    def from_cupy(arrays, products):
        result = ragged_dot(*arrays)
        return {"cupy": lambda: None, "cupy_schedule": lambda: None}, result

    monkeypatch.setattr(jax_products, "from_cupy", from_cupy)
    monkeypatch.setattr(jax_products, "as_words", lambda array: np.asarray(array).view(np.uint16))
    monkeypatch.setattr(jax_products, "HOT_SECONDS", 0)
    monkeypatch.setattr(jax_products, "length", lambda problem: 2)
    record = jax_products.measure(SMALL, rounds=2, points=1)
    assert record["errors"]["same bits as cupy"]
    assert record["errors"]["ours"] < 1e-2
    assert {"ours_us", "ours_schedule_us", "cupy_us", "cupy_schedule_us", "ragged_dot_us"} <= set(record)
    monkeypatch.setattr(jax_products, "LAYER_COUNTS", SMALL.counts)
    monkeypatch.setattr(jax_products, "HIDDEN", 16)
    monkeypatch.setattr(jax_products, "INNER", 8)
    records = [record, jax_products.measure_layer(rounds=2)]
    assert records[1]["errors"]["ours"] < 1e-2
    console = Console(file=io.StringIO(), width=240)
    console.print(jax_products.table(records))
    report.show({"run": {}, "records": records}, console)
    text = console.file.getvalue()
    assert text.count("small") >= 2
    assert "same" in text
    assert "without pallas" in text


def test_a_chain_that_xla_cut_short_is_not_timed(arrays, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax_products, "calls_in", lambda text, target: 1)
    with pytest.raises(RuntimeError, match=r"ours: XLA made \(1, 1\) products and schedules of a chain of 3"):
        jax_products.ours(arrays, 3)


def test_handlers_are_timed_and_do_what_they_did(machine, arrays, monkeypatch):
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
    machine.log.clear()
    jax_step.once(step, operands, 3)
    assert machine.names().count("grouped_mm") == 12
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
