"""The training examples: they agree with each other, learn, resume bit for bit, and leave their records."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cupy_gmm import counts

pytest.importorskip("typer", reason="typer is not installed")
pytest.importorskip("matplotlib", reason="matplotlib is not installed")

from examples import data, model, moe_xp, records, training

ROOT = Path(__file__).resolve().parent.parent
SMALL = dataclasses.replace(
    model.TINY, layers=2, hidden=24, heads=3, inner=20, experts=8, context=18, batch=5, steps=20, warmup=2,
    learning_rate=1e-2,
)  # fmt: skip


@pytest.fixture(autouse=True)
def numpy_alone(monkeypatch):
    monkeypatch.setattr(moe_xp, "xp", np)


@pytest.fixture
def parts():
    return dataclasses.replace(moe_xp.PARTS, name="moe_xp", put=np.array, get=np.asarray)


def start(config=SMALL):
    """Parameters further apart than fresh ones, gains that are not 1, and a batch."""
    rng = np.random.default_rng(3)
    params = {
        name: value + (0.3 * rng.standard_normal(value.shape)).astype(np.float32) * (value.std() or 1.0)
        for name, value in model.parameters(config, 1).items()
    }
    return params, data.batch(data.text()[0], config.batch, config.context, 7)


def xp_gradients(params, tokens, config):
    entropy, balance, used, saved = moe_xp.forward(params, tokens, config)
    return entropy + config.balance * balance, used, moe_xp.backward(params, saved, config)


def distance(got, want):
    return float(np.linalg.norm(np.asarray(got, np.float64) - want) / (np.linalg.norm(want) + 1e-30))


@pytest.mark.parametrize("balance", [0.0, 0.5])
def test_examples_agree_on_loss_counts_and_gradients(balance):
    """Same parameters and batch: the backward pass by hand against JAX's, apart by roundings to bfloat16 only."""
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    from examples import moe_jax

    config = dataclasses.replace(SMALL, balance=balance)
    params, tokens = start(config)
    loss, used, grads = xp_gradients(params, tokens, config)
    with jax.default_device(jax.devices("cpu")[0]):
        find = jax.jit(jax.value_and_grad(moe_jax.objective, has_aux=True), static_argnums=2)
        (wanted, (_, wanted_used)), wanted_grads = find(params, tokens, config)
    assert np.array_equal(used, wanted_used), "another expert was chosen"
    assert float(loss) == pytest.approx(float(wanted), rel=2e-3)
    assert grads.keys() == wanted_grads.keys() == params.keys()
    far = {name: distance(grads[name], np.asarray(wanted_grads[name], np.float64)) for name in params}
    assert {name: each for name, each in far.items() if each > 2e-2} == {}  # bfloat16 has 2^-8 = 0.4 %
    assert all(grads[name].shape == params[name].shape for name in params)


def test_the_two_optimisers_agree():
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    from examples import moe_jax

    first = model.first_state(SMALL, 2)
    rng = np.random.default_rng(5)
    grads = {name: rng.standard_normal(value.shape, dtype=np.float32) for name, value in first["params"].items()}
    ours = {part: {name: value.copy() for name, value in tree.items()} for part, tree in first.items()}
    theirs = first
    with jax.default_device(jax.devices("cpu")[0]):
        for step in (1, 2, 3):
            moe_xp.adamw(ours, grads, step, 0.01, SMALL)
            theirs = moe_jax.adamw(theirs, grads, step, 0.01, SMALL)
    for part, tree in ours.items():
        for name, value in tree.items():
            assert distance(value, np.asarray(theirs[part][name], np.float64)) < 1e-5, (part, name)


def test_balance_loss_is_one_when_even_and_larger_when_not():
    params, tokens = start()
    even = {name: np.zeros_like(value) if name.endswith("router") else value for name, value in params.items()}
    assert float(moe_xp.forward(even, tokens, SMALL)[1]) == pytest.approx(1.0, abs=1e-5)
    assert float(moe_xp.forward(params, tokens, SMALL)[1]) > 1.01


def test_numpy_run_learns_and_leaves_its_records(parts, tmp_path):
    history = training.train(parts, SMALL, tmp_path)
    entropy = data.unigram_entropy(data.text()[1])
    validation = list(history.validation.values())
    assert validation[-1] < validation[0] - 1.0
    assert len(history.losses) == SMALL.steps
    with np.load(tmp_path / "counts.npz") as file:
        recorded = file["counts"]
    assert recorded.shape == (SMALL.steps, SMALL.layers, SMALL.experts)
    assert (recorded.sum(-1) == SMALL.batch * SMALL.context * SMALL.top_k).all()
    shown = counts.load(tmp_path / "counts.npz")
    assert len(shown) == SMALL.steps * SMALL.layers
    assert shown[-1].name == f"counts-s{SMALL.steps}-l{SMALL.layers - 1}"
    assert shown[-1].counts == tuple(recorded[-1, -1])
    assert json.loads((tmp_path / "losses.json").read_text())["unigram_entropy"] == entropy
    assert "<svg" in (tmp_path / "losses.svg").read_text()


def test_rates_are_of_training_alone_since_the_last_report(parts, tmp_path, monkeypatch, capsys):
    """A clock that only a step, a validation batch and a checkpoint move: the first step compiles, say."""
    now = [0.0]

    def taking(seconds, function):
        def call(*args):
            now[0] += seconds
            return function(*args)

        return call

    def step(state, tokens, number, rate, config):
        now[0] += 1000.0 if number == 1 else 2.0
        return state, 1.0, np.ones((config.layers, config.experts))

    monkeypatch.setattr(training.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(records, "save", taking(500.0, records.save))
    slow = dataclasses.replace(parts, step=step, loss=taking(100.0, lambda *_: 1.0))
    training.train(slow, dataclasses.replace(SMALL, steps=36), tmp_path, save_every=4)
    rates = re.findall(r"([\d,]+) tokens/s", capsys.readouterr().out)
    assert rates == ["0"] + ["45"] * 12  # 5 x 18 tokens in 1,000 s, then in 2 s


def test_lines_of_the_picture_are_means_of_neighbours():
    steps, values = records.thinned(np.arange(10))
    assert np.array_equal(steps, np.arange(1, 11))
    assert np.array_equal(values, np.arange(10))
    steps, values = records.thinned(np.stack([np.arange(2000), np.ones(2000)], axis=1))
    assert len(steps) == len(values) <= 250
    assert (steps[0], values[0].tolist()) == (5.5, [4.5, 1.0])


def test_kept_results_are_those_of_the_set_that_ships():
    """The record, its picture and the counts are of one run, which reached what it should."""
    folder = ROOT / "examples" / "results"
    kept = json.loads((folder / "moe_jax.json").read_text())
    assert len(kept["train"]) == counts.load_set("moe-example").steps[-1] == model.FULL.steps
    assert kept["validation"]["2000"] / kept["unigram_entropy"] < 0.3
    table = (folder / "README.md").read_text()
    for step, loss in kept["validation"].items():
        assert re.search(rf"^\| {step} \| [\d.]+ \| {loss:.3f} \|", table, re.MULTILINE), step
    assert (folder / "moe_jax.svg").stat().st_size < 60_000


def test_resumed_run_has_the_same_bits(parts, tmp_path):
    whole = training.train(parts, SMALL, tmp_path / "whole", until=6)
    training.train(parts, SMALL, tmp_path / "halves", until=4)
    halves = training.train(parts, SMALL, tmp_path / "halves", until=6, resume=True)
    assert halves.losses == whole.losses
    assert np.array_equal(halves.counts, whole.counts)
    (one, _), (other, _) = (records.load(tmp_path / name, SMALL, 0) for name in ("whole", "halves"))
    for part, tree in one.items():
        for name, value in tree.items():
            assert value.tobytes() == other[part][name].tobytes(), (part, name)


def test_a_checkpoint_of_another_run_is_refused(parts, tmp_path):
    with pytest.raises(ValueError, match="is not there: leave out `--resume`"):
        training.train(parts, SMALL, tmp_path, resume=True)
    training.train(parts, SMALL, tmp_path, until=1)
    with pytest.raises(ValueError, match="is of a run with seed 0: pass the same options"):
        training.train(parts, SMALL, tmp_path, seed=1, resume=True)


def test_jax_run_learns_and_resumes(tmp_path):
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    from examples import moe_jax

    with jax.default_device(jax.devices("cpu")[0]):
        training.train(moe_jax.PARTS, SMALL, tmp_path, until=12)
        history = training.train(moe_jax.PARTS, SMALL, tmp_path, resume=True)
    validation = list(history.validation.values())
    assert validation[-1] < validation[0] - 1.0
    assert np.array(history.counts).shape == (SMALL.steps, SMALL.layers, SMALL.experts)


@pytest.mark.parametrize("name", ["moe_jax", "moe_xp"])
def test_help(name):
    if name == "moe_jax":
        pytest.importorskip("jax", reason="JAX is not installed")
    command = [sys.executable, "-m", f"examples.{name}", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    plain = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)
    assert all(option in plain for option in ("--steps", "--tiny", "--resume", "--until", "--out", "--seed"))


def test_text_is_split_by_file_and_batches_are_shifted():
    train, held_out = data.text()
    assert 8 < len(train) / len(held_out) < 32
    tokens = data.batch(train, 3, 11, 0, 1)
    assert tokens.shape == (3, 12)
    assert np.array_equal(tokens, data.batch(train, 3, 11, 0, 1))
    assert not np.array_equal(tokens, data.batch(train, 3, 11, 0, 2))
