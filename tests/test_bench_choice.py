"""Which problems a run takes: groups, names, recorded counts and files of counts, scaled."""

import argparse
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from bench import choice, report, shapes
from cupy_gmm import counts

FEW = {"model": "M", "layer": 3, "counts": [5, 0, 30, 2]}


@pytest.fixture
def folder(tmp_path):
    """As many files as there are recorded models to replay, of two kinds, and one that holds no counts."""
    for index in range(16):
        content = dict(FEW, counts=[index, 0, 30, 2])
        (tmp_path / f"model-l{index}.json").write_text(json.dumps(content))
    (tmp_path / "README.md").write_text("Counts.")
    return tmp_path


def names(*args, **kwargs):
    return [each.name for each in choice.chosen(*args, **kwargs)]


def test_by_default_named_and_recorded_problems_are_taken():
    named = [each.name for each in shapes.PROBLEMS]
    sizes = ("32768x512x1024", "16384x2048x2048", "65536x2048x2048")
    recorded = [f"moe-example-{when}-{size}" for when in ("s20-l5", "s1000-l2", "s2000-l2") for size in sizes]
    assert names() == named + recorded
    assert names(groups=["named"]) == named
    assert names(groups=["recorded"]) == recorded


def test_recorded_problems_are_the_counts_of_the_set():
    found = {each.name: each for each in choice.recorded()}
    as_it_was, small, large = list(found.values())[:3]
    assert as_it_was.counts == counts.load_set("moe-example").histogram(20, 5).counts
    assert (as_it_was.k, as_it_was.n) == (512, 1024)
    assert small.counts == counts.scale(as_it_was.counts, 16384)
    assert large.counts == counts.scale(as_it_was.counts, 65536)


def test_a_folder_of_counts_is_replayed_on_every_size(folder):
    found = choice.chosen(None, [str(folder)], ["replayed"])
    assert len(found) == 16 * 4
    assert {(each.rows, each.k, each.n) for each in found} == {
        (rows, k, 2048) for rows in (16384, 65536) for k in (2048, 4096)
    }
    assert all(sum(each.counts) == each.rows for each in found)
    assert len(choice.chosen(None, [str(folder)])) == len(names()) + 64


def test_rows_and_shapes_can_be_chosen(folder):
    path = str(folder / "model-l7.json")
    found = choice.chosen(None, [path], ["replayed"], rows=[37, 512], shapes=[(64, 40)])
    assert [each.name for each in found] == ["model-l7-37x64x40", "model-l7-512x64x40"]
    assert found[0].counts == counts.scale([7, 0, 30, 2], 37)


def test_problems_are_chosen_by_name_from_any_group(folder):
    wanted = ["skewed", "moe-example-s2000-l2-16384x2048x2048", "model-l3-65536x4096x2048"]
    assert names(wanted, [str(folder)], ["named"]) == wanted
    with pytest.raises(ValueError, match="no problem is called lopsided; there are balanced, skewed"):
        choice.chosen(["lopsided"])


def test_the_set_can_be_replayed_by_name():
    found = names(None, ["moe-example"], ["replayed"])
    assert len(found) == 3 * 4
    both = names(None, ["moe-example"])
    assert len(both) == len(set(both)) == len(names()) + 3 * 2  # two sizes of each are there already


def test_two_problems_of_one_name_are_refused(tmp_path):
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "same.json").write_text(json.dumps([3, 0, number]))
    with pytest.raises(ValueError, match="two problems are called same-16384x2048x2048: give the histograms names"):
        choice.chosen(None, [str(tmp_path / "1"), str(tmp_path / "2" / "same.json")])


def test_nothing_or_too_much_to_replay_is_refused(tmp_path):
    with pytest.raises(ValueError, match="has no JSON files: expected a folder with files of counts"):
        choice.chosen(None, [str(tmp_path)])
    (tmp_path / "long.json").write_text(json.dumps([[step, 1] for step in range(65)]))
    with pytest.raises(ValueError, match=r"long.json has 65 histograms, of which at most 64 can be timed"):
        choice.chosen(None, [str(tmp_path)])
    with pytest.raises(ValueError, match="absent cannot be read: No such file or directory; count sets by name: moe"):
        choice.chosen(None, ["absent"])
    with pytest.raises(ValueError, match="nothing to time: the group replayed takes its counts from --counts"):
        choice.chosen(groups=["replayed"])


def test_the_benchmark_lists_what_it_would_time(folder, monkeypatch, capsys):
    pytest.importorskip("torch", reason="torch is not installed")
    from bench import products

    def listed(*words):
        monkeypatch.setattr("sys.argv", ["products", "--list", *words])
        products.main()
        return capsys.readouterr().out.splitlines()

    assert len(listed()) == 18
    assert len(listed("--group", "replayed", "--counts", str(folder))) == 64
    line = listed("--group", "replayed", "--counts", str(folder / "model-l7.json"), "--rows", "37", "--shape", "64x40")
    assert line == ["model-l7-37x64x40: 4 groups, 37 rows, K = 64, N = 40"]
    for words in (["--shape", "64"], ["--group", "other"], ["--counts", str(Path("absent"))]):
        with pytest.raises(SystemExit):
            listed(*words)
    assert "No such file or directory" in capsys.readouterr().err


def test_the_comparison_leaves_recorded_problems_out_unless_asked():
    parser = argparse.ArgumentParser()
    choice.add_options(parser, ("named", "replayed"))
    assert len(choice.of(parser.parse_args([]))) == len(shapes.PROBLEMS)
    assert len(choice.of(parser.parse_args(["--group", "recorded"]))) == 9


def test_the_report_keeps_recorded_problems_apart():
    def record(name, ours):
        return {
            "problem": name, "op": "forward", "rows": 16384, "config": "some", "dense_us": 100, "bytes_us": 50,
            "limit_us": 100, "ours_us": ours, "ours_schedule_us": ours, "torch_us": 300,
        }  # fmt: skip

    named = [record("balanced", 100), record("skewed", 125)]
    others = [record("moe-example-s20-l5-16384x2048x2048", 200), record("model-l7-16384x2048x2048", 400)]
    shown = io.StringIO()
    Console(file=shown, width=150).print(report.summary_view([*named, *others]))
    rows = [
        [cell.strip() for cell in line.split("│")[1:-1]] for line in shown.getvalue().splitlines() if "forward" in line
    ]
    assert [row[1:3] for row in rows] == [
        ["named (2)", "0.894 (0.800)"],
        ["named, uneven (1)", "0.800 (0.800)"],
        ["recorded (1)", "0.500 (0.500)"],
        ["replayed (1)", "0.250 (0.250)"],
    ]
    assert report.verdict([*named, *others]) == report.verdict(named)
