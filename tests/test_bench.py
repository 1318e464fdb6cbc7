"""The benchmark, as far as it goes with no GPU: its judge, records, absent peers, the arithmetic of its report."""

import contextlib
import io
import json
import math
import os
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import bench
from bench import clocks, report, shapes
from bench.shapes import Problem

RESULTS = Path(__file__).resolve().parent.parent / "bench" / "results"
SMALL = Problem("small", 4, 64, 48, 37, (5, 0, 30, 2))
OPS = ("forward", "input-gradient", "weight-gradient")


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="torch is not installed")


# ---- the machine


@pytest.mark.parametrize("given, seen", [(None, "0"), ("0,1", "0"), ("3", "3"), ("GPU-5f,GPU-17", "GPU-5f"), ("", "")])
def test_a_benchmark_sees_one_gpu(given, seen, monkeypatch):
    monkeypatch.delenv(bench.VISIBLE, raising=False)
    if given is not None:
        monkeypatch.setenv(bench.VISIBLE, given)
    bench.one_gpu()
    assert os.environ[bench.VISIBLE] == seen


def test_every_benchmark_takes_one_gpu():
    """A peer that takes all of them would have the clock wait on another one."""
    runs = {path.stem: path.read_text() for path in RESULTS.parent.glob("*.py")}
    runs = {name: text.split('if __name__ == "__main__":\n')[1] for name, text in runs.items() if "__main__" in text}
    without = {name for name, text in runs.items() if not text.startswith("    one_gpu()\n")}
    assert without == {"report", "compare_run"}, "one reads records, and the other is started by `compare`"


# ---- the judge


@pytest.mark.parametrize("op", OPS)
def test_judge_takes_what_is_right_and_nothing_else(op, torch):
    import cupy_gmm
    from bench import work

    found = work.make(SMALL, op, "cpu")
    right = work.call_of(cupy_gmm, found, found.offs)
    assert 0 < float(found.error(right)) <= 1
    assert math.isnan(float(found.error(found.poisoned())))
    last = tuple(extent - 1 for extent in right.shape)
    for value in (math.nan, float(right[last]) * 1.02 + 0.1):
        wrong = right.clone()
        wrong[last] = value
        assert not float(found.error(wrong)) <= 1


def test_judge_wants_zeros_for_an_empty_group(torch):
    from bench import work

    found = work.make(SMALL, "weight-gradient", "cpu")
    result = found.want.bfloat16()
    assert float(found.error(result)) <= 1
    result[1, 3, 5] = 1e-20
    assert float(found.error(result)) > 1


@pytest.mark.parametrize("op, used", [("forward", 3), ("weight-gradient", 4)])
def test_bytes_count_each_used_matrix_once(op, used, torch):
    from bench import work

    assert work.moved_bytes(SMALL, op) == 2 * 37 * (64 + 48) + 2 * used * 64 * 48


# ---- peers


def test_absent_peers_say_why(torch, monkeypatch):
    from bench import peers, work
    from bench.peers import jax_gpu

    jax_gpu.imported.cache_clear()
    for module in ("jax", "quack", "quack.gemm_interface"):
        monkeypatch.setitem(sys.modules, module, None)
    found = work.make(SMALL, "forward", "cpu")
    gathered = peers.gather(found, [peers.registry()[name] for name in ("pallas", "quack", "ragged_dot")])
    assert not gathered.calls
    assert gathered.out["pallas"].startswith("JAX cannot be imported")
    assert gathered.out["ragged_dot"] == gathered.out["pallas"]
    assert gathered.out["quack"].startswith("QuACK cannot be imported")


def test_peers_are_judged_loosely_and_the_best_variant_counts(torch):
    from bench import peers, work

    found = work.make(SMALL, "forward", "cpu")
    right = found.want.bfloat16()

    def fails() -> None:
        raise RuntimeError("no such\n  kernel")

    made = peers.Peer("other", lambda work: {"a": lambda: right, "b": lambda: right * 1.5, "c": fails})
    gathered = peers.gather(found, [made])
    assert list(gathered.calls) == ["other:a"]
    assert gathered.errors["other:a"] <= 1 < peers.LOOSE < gathered.errors["other:b"]
    assert gathered.out["other:b"].startswith("wrong: error over bound")
    assert gathered.out["other:c"] == "RuntimeError: no such kernel"
    across = peers.Peer("across", lambda work: {}, crossing=lambda work: fails)
    medians = {"other:a": 9.0, "other:b": 8.0, "across:x": 20.0, "crossing": 6.0}
    assert peers.concluded([made, across], medians) == {
        "other_us": 8.0,
        "other_config": "b",
        "across_us": 14.0,
        "across_config": "x",
    }


def test_jax_takes_operands_over_and_gives_results_back(torch, monkeypatch):
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    from bench import peers, work
    from bench.peers import jax_gpu

    monkeypatch.setattr(jax_gpu, "imported", lambda: jax)
    found = work.make(SMALL, "forward", "cpu")
    gathered = peers.gather(found, [peers.registry()["ragged_dot"]])
    assert gathered.errors["ragged_dot"] <= 1
    assert jax_gpu.crossing(found)().tolist() == [6, 1, 31, 3]
    gradient = peers.gather(work.make(SMALL, "weight-gradient", "cpu"), [peers.registry()["ragged_dot"]])
    assert gradient.out == {"ragged_dot": "forward products only"}


def test_blocks_of_the_pallas_kernel_divide_n(torch):
    from bench.peers import jax_gpu

    assert jax_gpu.points(2048) == [(128, 8), (64, 8), (128, 2)]
    assert jax_gpu.points(1536) == [(128, 4), (64, 4), (128, 2)]
    assert jax_gpu.points(200) == [(128, 1), (64, 1)]


# ---- clocks


def test_clocks_are_medians_of_what_was_sampled_in_the_window():
    line = "2026/03/01 12:00:0{}.500, {}, {}"
    lines = [line.format(0, 1980, 200), line.format(1, 1400, 690), line.format(2, 1410, "[N/A]"), "No devices"]
    sampler = clocks.Clocks()
    sampler.read(lines)
    start = time.mktime((2026, 3, 1, 12, 0, 1, 0, 0, -1))
    assert sampler.during((start, start + 3)) == {"sm_mhz": 1405, "watts": 690}
    assert sampler.during((start + 10, start + 11)) == {}


def test_clocks_are_optional(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with clocks.Clocks() as sampler:
        assert sampler.during((0, time.time())) == {}


def test_a_slow_call_of_the_host_gets_several_loads(torch):
    from bench import timing

    assert [timing.loads_for(micros) for micros in (0, 20, 600, 2200)] == [1, 1, 2, 5]


# ---- a record, and what becomes of it


class Times:
    """Stands for `timing.Times`: each contender runs once, then gets a time of its own."""

    def __init__(self, contenders, *_, **__):
        self.names, self.window = list(contenders), (0.0, 1.0)
        for call in contenders.values():
            call()

    def medians(self):
        return {name: 100.0 + index for index, name in enumerate(self.names)}

    def spread(self, name):
        return 0.01


@pytest.mark.parametrize("op", OPS)
def test_a_record_has_the_fields_of_the_table(op, torch, monkeypatch):
    from bench import peers, products, timing, work

    monkeypatch.setattr(timing, "interleaved", Times)
    found = work.make(SMALL, op, "cpu")
    other = peers.Peer("torch", lambda work: {"": lambda: found.want.bfloat16()})
    record, window = products.measure(found, 4e12, [other, peers.registry()["quack"]], False, 20)
    assert window == (0, 1)
    expected = {"problem": "small", "op": op, "dtype": "bfloat16", "groups": 4, "rows": 37, "k": 64, "n": 48}
    assert {name: record[name] for name in expected} == expected
    assert [record[f"{name}_us"] for name in ("dense", "ours", "ours_schedule", "torch")] == [100, 101, 102, 103]
    assert record["limit_us"] == 100 > record["bytes_us"] > 0
    assert "quack" in record["out"]
    assert set(record["errors"]) == {"ours", "ours_schedule", "torch"}
    json.dumps(record)


def test_a_wrong_result_of_ours_gets_no_time(torch, monkeypatch):
    from bench import products, timing, work
    from cupy_gmm import ops

    monkeypatch.setattr(timing, "interleaved", Times)
    monkeypatch.setattr(ops, "grouped_mm", lambda *a, out, **k: out)  # returns it as it was: poisoned
    record, _ = products.measure(work.make(SMALL, "forward", "cpu"), 4e12, [], False, 20)
    assert record["ours_us"] is None
    assert record["out"]["ours"].startswith("wrong: error over bound")
    shown = io.StringIO()
    report.show({"run": {"kernels": "0"}, "records": [record]}, Console(file=shown, width=250))
    assert "without ours: wrong" in shown.getvalue()


# ---- the report


def made(problem: str, op: str, ours: float, limit: float = 100.0, **more: float) -> report.Record:
    known = shapes.problem(problem)
    return {
        "problem": problem, "op": op, "rows": known.rows, "config": "some", "dense_us": limit, "bytes_us": limit / 2,
        "limit_us": limit, "ours_us": ours, "ours_schedule_us": ours + 2, **more,
    }  # fmt: skip


def test_verdict_counts_what_it_says():
    records = [
        made("balanced", "forward", 100, torch_us=110, quack_us=98),
        made("skewed", "forward", 125, torch_us=250),
        made("decode-qwen3-up", "forward", 50, limit=90, torch_us=80),
        made("balanced", "weight-gradient", 100, torch_us=140),
        made("hot", "weight-gradient", 100, torch_us=180),
    ]
    found = {line.text: line for line in report.verdict(records)}
    assert found["forward: limit / ours, geometric mean"].values[0] == pytest.approx((1 * 0.8 * 1.8) ** (1 / 3))
    each = found["forward: limit / ours, each"]
    assert (each.values[0], each.where, each.met) == (0.8, "skewed", True)
    uneven = found["forward: torch / ours on uneven counts, geometric mean"]
    assert uneven.values[0] == pytest.approx((2 * 1.6) ** 0.5)
    assert uneven.met
    assert found["forward: quack / ours, each"].met is False
    assert found["forward: torch / ours, each"].values == (1.1, pytest.approx(110 / 102))
    assert "forward: loop / ours, each" not in found
    assert found["forward: skewed / balanced"].values[0] == 1.25
    assert found["forward: skewed / balanced"].met is False
    decode = found["forward: decode, share of the copy bandwidth"]
    assert (decode.values[0], decode.where) == (0.9, "decode-qwen3-up")
    gradient = found["weight gradient: torch / ours, geometric mean"]
    assert gradient.values[0] == pytest.approx((1.4 * 1.8) ** 0.5)
    assert found["weight gradient: torch / ours, each"].where == "balanced"


def test_nothing_measured_is_neither_met_nor_missed():
    assert {line.met for line in report.verdict([])} == {None}


@pytest.mark.parametrize("path", sorted(RESULTS.glob("p*-*.json")), ids=lambda path: path.stem)
def test_kept_results_can_be_printed_again(path, monkeypatch):
    shown = io.StringIO()
    monkeypatch.setattr("sys.argv", ["report", str(path), "--width", "250"])
    with contextlib.redirect_stdout(shown):
        report.main()
    document = json.loads(path.read_text())
    assert document["run"]["kernels"] in shown.getvalue().replace("\n", "")
    for record in document["records"]:
        assert record["problem"] in shown.getvalue()
        assert np.isclose(report.ratio(record, "limit"), record["limit_us"] / record["ours_us"])
