"""Commands that take a count set: it is their default, and steps and layers can be picked."""

import json
from pathlib import Path

import numpy as np
import pytest

from cupy_gmm import counts

pytest.importorskip("typer", reason="the extra cli is not installed")
pytest.importorskip("rich", reason="the extra cli is not installed")
from tests.commands import document

DEMO = "demo --cpu --tokens 300 --hidden 24 --inner 40 --json".split()


@pytest.fixture
def shipped():
    return counts.load_set("moe-example")


def test_counts_without_a_file_shows_the_set(cli):
    found = document(cli("counts", "--json"))["histograms"]
    assert [tuple(each["counts"]) for each in found] == [each.counts for each in counts.load("moe-example")]
    assert {(each["file"], each["k"], each["n"]) for each in found} == {("moe-example", 512, 1024)}
    assert document(cli("counts", "moe-example", "--json"))["histograms"] == found
    out = cli("counts")[1]
    assert "moe-example: recorded while examples.moe_jax trained on an H200" in out
    assert "290 steps and 6 layers: --step and --layer pick." in out


def test_counts_picks_steps_and_layers(cli, shipped):
    found = document(cli("counts", "--step", 1, "--step", 2000, "--layer", 3, "--layer", 0, "--json"))["histograms"]
    assert [each["name"][12:] for each in found] == ["s1-l3", "s1-l0", "s2000-l3", "s2000-l0"]
    assert found[2]["counts"] == shipped.counts[-1, 3].tolist()
    assert len(document(cli("counts", "--step", 7, "--json"))["histograms"]) == 6
    assert len(document(cli("counts", "--layer", 0, "--json"))["histograms"]) == 290
    np.savez("own.npz", counts=np.full((2, 3, 4), 5))
    assert document(cli("counts", "own.npz", "--step", 2, "--json"))["histograms"][-1]["name"] == "own-s2-l2"


def test_demo_replays_the_set(cli, shipped):
    found = document(cli(*DEMO, "--top-k", 2))
    assert found["ok"] is True
    assert (found["name"], found["replayed"]) == ("moe-example-s20-l5", "moe-example")
    assert found["counts"] == list(counts.scale(shipped.histogram(20, 5).counts, 600))
    assert "documentation" in found["text"]
    late = document(cli(*DEMO, "--top-k", 2, "--step", 2000, "--layer", 1))
    assert late["counts"] == list(counts.scale(shipped.histogram(2000, 1).counts, 600))
    out = cli(*DEMO[:-1], "--top-k", 2)[1]
    assert "experts replayed from moe-example-s20-l5:" in out
    assert "recorded while examples.moe_jax trained" in out


@pytest.mark.parametrize("words", ["--router", "--text a.txt", "--experts 9"])
def test_demo_routes_where_it_is_asked_to(cli, words):
    Path("a.txt").write_text("The quick brown fox jumps over the lazy dog. " * 9)
    found = document(cli(*DEMO, *words.split()))
    assert (found["name"], found["replayed"]) == ("text", None)
    assert found["counts"][-2:] == [1, 0]
    assert "experts chosen by a fixed random router:" in cli(*DEMO[:-1], *words.split())[1]


def test_demo_replays_on_the_users_text(cli):
    Path("a.txt").write_text("The quick brown fox jumps over the lazy dog. " * 9)
    found = document(cli(*DEMO, "--text", "a.txt", "--step", 1, "--layer", 0, "--experts", 32))
    assert (found["name"], found["text"]) == ("moe-example-s1-l0", "a.txt")


@pytest.mark.parametrize(
    "words, sentence",
    [
        ("counts --step 105", "moe-example has no step 105: it holds steps 1 to 100, 110 to 2000 by 10"),
        ("counts --layer 6", "moe-example has no layer 6: it holds layers 0 to 5"),
        ("counts list.json --step 1", "list.json has no steps and layers to pick from: leave out --step and --layer"),
        ("counts lopsided", "lopsided cannot be read: No such file or directory; count sets by name: moe-example"),
        ("demo --step 1", "`--step` and `--layer` go together"),
        ("demo --layer 1", "`--step` and `--layer` go together"),
        ("demo --router --counts moe-example", "`--router` replays no counts: leave it out, or leave out --counts"),
        ("demo --counts moe-example --experts 4", "`--experts` is 4: expected 32 as in moe-example"),
        ("demo --step 103 --layer 0", "moe-example has no step 103"),
    ],
)
def test_wrong_use_is_a_sentence_and_code_2(cli, words, sentence):
    Path("list.json").write_text(json.dumps([1, 2]))
    code, out, err = cli(*words.split())
    assert (code, out) == (2, "")
    assert sentence in err
    assert len(err.splitlines()) == 1
