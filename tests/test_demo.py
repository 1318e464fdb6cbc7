"""The demo: what it prints and writes, and that its judge catches faults planted in the layer."""

import inspect
import json
from pathlib import Path

import numpy as np
import pytest

from cupy_gmm import counts, moe
from cupy_gmm.errors import UnsupportedError

pytest.importorskip("typer", reason="the extra cli is not installed")
pytest.importorskip("rich", reason="the extra cli is not installed")
from cupy_gmm._cli import figures, text
from tests.commands import SMALL, document


def test_without_matplotlib_the_demo_says_so_and_goes_on(cli, monkeypatch):
    def missing(*_):
        raise UnsupportedError("A picture needs matplotlib: pip install 'cupy-gmm[cli]'")

    monkeypatch.setattr(figures, "demo", missing)
    found = document(cli("demo", *SMALL, "--json"))
    assert (found["picture"], found["no_picture"]) == (
        None,
        "A picture needs matplotlib: pip install 'cupy-gmm[cli]'",
    )
    assert cli("demo", *SMALL, "--plot", "demo.svg")[0] == 1


def test_demo_checks_everything_and_draws(cli, tmp_path):
    code, out, _ = cli("demo", *SMALL)
    assert code == 0
    assert "All checks passed." in out
    assert "dw of 1 empty expert" in out
    assert f"Picture: {tmp_path / 'demo.svg'}" in out
    assert Path("demo.svg").stat().st_size > 10_000


def test_demo_json(cli):
    found = document(cli("demo", *SMALL, "--json", "--seed", 3))
    assert found["ok"] is True
    assert [check["quantity"] for check in found["checks"]] == [
        "y", "dx", "dw_gate_up", "dw_down", "dexpert_weight", "dw of 1 empty expert",
    ]  # fmt: skip
    assert [check["shape"] for check in found["checks"]][:3] == [[300, 24], [300, 24], [7, 24, 80]]
    assert sum(found["counts"]) == 600
    assert found["counts"][-2:] == [1, 0]
    assert found["skew"]["max_over_mean"] > 1.2


@pytest.mark.gpu
def test_demo_on_the_gpu(cli):
    words = "--tokens 500 --hidden 64 --inner 72 --experts 9 --top-k 3 --json".split()
    found = document(cli("demo", *words))
    assert found["on_gpu"] is True
    assert found["timings"]["clock"] == "CUDA events, median"
    assert found["ok"] is True


def test_demo_routes_the_users_text(cli):
    Path("a.txt").write_text("a" * 40)
    found = document(cli("demo", *SMALL[:1], *SMALL[3:], "--text", "a.txt", "--json"))
    assert found["sizes"]["tokens"] == 40
    # One letter, one context: all tokens agree, but for the one that is moved to give an expert a single row.
    assert sorted(found["counts"])[-2:] == [39, 40]


def test_demo_replays_counts(cli):
    name = "recorded.json"
    Path(name).write_text(json.dumps({"name": "layer", "counts": [0, 700, 1, 299, 1000]}))
    found = document(cli("demo", *SMALL[:7], "--top-k", 2, "--counts", name, "--json"))
    assert found["counts"] == list(counts.scale([0, 700, 1, 299, 1000], 600))
    assert (found["sizes"]["experts"], found["replayed"]) == (5, "recorded.json")
    code, _, err = cli("demo", "--counts", name, "--experts", 4)
    assert (code, err) == (2, "`--experts` is 4: expected 5 as in recorded.json\n")


def swap_gate_and_up(y, saved):
    return y, type(saved)(**{**fields(saved), "gate_up": np.roll(saved.gate_up, 40, axis=1)})


def fields(saved):
    return {name: getattr(saved, name) for name in type(saved).__dataclass_fields__}


def change(name, at, to):
    def fault(*results):
        names = ("y",) if len(results) == 2 else ("dx", "dw_gate_up", "dw_down", "dexpert_weight")
        if name in names:
            array = results[names.index(name)]
            array[at] = to(array)
        return results

    return fault


# Each is a fault that grouped products have had elsewhere; the judge must name the quantity.
FAULTS = {
    "two rows of y swapped": ("expert_ffn", "y", change("y", [5, 9], lambda a: a[[9, 5]])),
    "one element of y one step off": ("expert_ffn", "y", change("y", (7, 3), lambda a: a[7, 3] * 1.016)),
    "a row of y never written": ("expert_ffn", "y", change("y", 11, lambda a: np.nan)),
    "gate and up swapped": ("expert_ffn", "dx", swap_gate_and_up),
    "dx of a token missing": ("expert_ffn_backward", "dx", change("dx", 2, lambda a: 0)),
    "dw of the next expert": (
        "expert_ffn_backward", "dw_down", change("dw_down", slice(None), lambda a: np.roll(a, 1, 0)),
    ),
    "a stale fragment of dw": (
        "expert_ffn_backward", "dw_gate_up", change("dw_gate_up", np.s_[1, :8, :8], lambda a: a[2, :8, :8]),
    ),
    "dw of the empty expert not written": (
        "expert_ffn_backward", "dw of 1 empty expert", change("dw_gate_up", (6, 0, 0), lambda a: 1),
    ),
    "a routing weight without gradient": (
        "expert_ffn_backward", "dexpert_weight", change("dexpert_weight", (4, 1), lambda a: 0),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_demo_catches(cli, monkeypatch, name):
    function, quantity, fault = FAULTS[name]
    right = getattr(moe, function)
    monkeypatch.setattr(moe, function, lambda *args, **kwargs: fault(*right(*args, **kwargs)))
    found = document(cli("demo", *SMALL, "--json"), code=1)
    assert quantity in [check["quantity"] for check in found["checks"] if not check["ok"]]
    assert "A check failed." in cli("demo", *SMALL)[1]


def test_the_standard_text_is_long_and_always_the_same(monkeypatch):
    text.standard_library.cache_clear()
    first = text.standard_library()
    text.standard_library.cache_clear()
    monkeypatch.setattr(inspect, "getfile", lambda _: None)  # as other libraries do when they are imported
    assert first == text.standard_library()
    assert len(first) > 200_000
