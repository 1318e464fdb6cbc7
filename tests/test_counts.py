"""Counts: the worked example number for number, scaling, replay, skew, files, a sentence for every misuse."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.shapes import PROBLEMS, problem
from cupy_gmm import counts as c
from cupy_gmm.errors import ArgumentError

HISTOGRAMS = st.lists(st.integers(0, 10**6), min_size=1, max_size=40)
BALANCED = problem("balanced").counts
SKEWED = problem("skewed").counts
# K = 4096, N = 2048, 132 SMs, 500 TFLOP/s.
EXAMPLE = {"k": 4096, "n": 2048, "machine": c.Machine(tflops=500)}


def test_worked_example_has_these_counts():
    assert sorted(SKEWED) == [64] * 32 + [400] * 28 + [784] * 4
    assert BALANCED == (256,) * 64
    assert sum(SKEWED) == sum(BALANCED) == 8192 * 2


def test_worked_example_work():
    tiling = c.tile(BALANCED, tile_m=128, **EXAMPLE)
    assert tiling.flop == 2 * 16384 * 4096 * 2048
    assert round(tiling.flop / 1e9) == 275
    assert round(tiling.flop_us / 1e3, 2) == 0.55


def test_worked_example_balanced():
    tiling = c.tile(BALANCED, tile_m=128, **EXAMPLE)
    assert (tiling.row_blocks, tiling.tiles) == (2 * 64, 2048)
    assert (round(tiling.waves, 1), tiling.whole_waves) == (15.5, 16)
    assert (tiling.computed_rows, tiling.useful) == (16384, 1.0)
    assert (tiling.relative_time_by_tiles, tiling.relative_time_by_whole_waves) == (1.0, 1.0)


def test_worked_example_skewed_128():
    tiling = c.tile(SKEWED, tile_m=128, **EXAMPLE)
    assert [c.tile([rows], tile_m=128, **EXAMPLE).row_blocks for rows in (64, 400, 784)] == [1, 4, 7]
    assert (tiling.row_blocks, tiling.tiles) == (32 + 112 + 28, 2752)
    assert tiling.row_blocks == 172
    assert (round(tiling.waves, 1), tiling.whole_waves) == (20.8, 21)
    assert (tiling.computed_rows, round(tiling.useful, 2)) == (22016, 0.74)
    assert round(tiling.relative_time_by_tiles, 2) == 1.34
    assert round(tiling.relative_time_by_whole_waves, 2) == 1.31


def test_worked_example_skewed_64():
    tiling = c.tile(SKEWED, tile_m=64, **EXAMPLE)
    assert [c.tile([rows], tile_m=64, **EXAMPLE).row_blocks for rows in (64, 400, 784)] == [1, 7, 13]
    assert (tiling.row_blocks, tiling.computed_rows, round(tiling.useful, 2)) == (280, 17920, 0.91)
    # "each weight tile is reused half as often": the weight bytes of a tile serve half the rows.
    tall = c.tile(SKEWED, tile_m=128, **EXAMPLE)
    assert tiling.tile_math_us == tall.tile_math_us / 2
    assert tiling.tile_load_us > tall.tile_load_us / 2


def test_worked_example_loop():
    tiling = c.tile(SKEWED, tile_m=128, **EXAMPLE)
    assert (tiling.loop_launches, tiling.loop_smallest_launch) == (64, 16)
    assert tiling.loop_whole_waves == 64


def test_tile_counts_ragged_columns_and_empty_groups():
    tiling = c.tile([3, 0, 5], k=16, n=129, tile_m=4, tile_n=128)
    assert (tiling.row_blocks, tiling.tiles, tiling.computed_rows) == (3, 6, 12)
    assert tiling.useful == 8 / 12
    assert tiling.loop_launches == 2
    assert tiling.relative_time_by_tiles == 6 / 6  # evenly: 3, 3, 2 rows, one block each


def test_tile_predicts_by_the_model_it_documents():
    machine = c.Machine(sms=2, tflops=1.0, bandwidth_tb_s=1.0, l2_tb_s=1e9)
    tiling = c.tile([100] * 3, k=1000, n=100, tile_m=100, tile_n=100, machine=machine)
    assert tiling.whole_waves == 2
    assert tiling.tile_math_us == pytest.approx(2 * 100 * 100 * 1000 / 0.5e12 * 1e6)
    assert tiling.waves_us == pytest.approx(2 * tiling.tile_math_us)
    assert tiling.bytes_us == pytest.approx(2 * (300 * 1100 + 3 * 1000 * 100) / 1e12 * 1e6)
    assert tiling.predicted_us == tiling.waves_us
    slow = c.tile([100, 0, 0], k=1000, n=100, tile_m=100, machine=c.Machine(sms=1, tflops=1e9, bandwidth_tb_s=1e-3))
    assert slow.predicted_us == slow.bytes_us == pytest.approx(2 * (100 * 1100 + 1000 * 100) / 1e9 * 1e6)
    narrow = c.tile([100], k=1000, n=100, tile_m=100, tile_n=60, machine=c.Machine(sms=1, tflops=1e9, l2_tb_s=1e-6))
    assert narrow.waves_us == pytest.approx(2 * 2 * (100 + 60) * 1000)


def test_no_rows_at_all():
    tiling = c.tile([0, 0], k=8, n=8, tile_m=16)
    assert (tiling.tiles, tiling.whole_waves, tiling.useful, tiling.relative_time_by_tiles) == (
        0,
        0,
        1.0,
        1.0,
    )
    skew = c.describe([0, 0])
    assert (skew.rows, skew.empty, skew.gini, skew.max_over_mean, skew.effective_groups) == (
        0,
        2,
        0.0,
        1.0,
        2.0,
    )
    assert c.scale([0, 0], 0) == (0, 0)


def test_numbers_of_any_size():
    huge = [10**30, 3 * 10**30]
    assert c.scale(huge, 4) == (1, 3)
    assert c.tile(huge, k=1, n=1, tile_m=10**29).row_blocks == 40
    many = c.describe([1] * 200_000)
    assert (many.groups, many.gini) == (200_000, 0.0)


@given(HISTOGRAMS, st.integers(1, 300), st.integers(1, 300))
def test_tile_agrees_with_drawing_every_block(histogram, tile_m, sms):
    tiling = c.tile(histogram, k=8, n=200, tile_m=tile_m, tile_n=64, machine=c.Machine(sms=sms))
    # One column of tiles stands for all four: 200 columns are 64 + 64 + 64 + 8.
    blocks = sum(len(range(0, rows, tile_m)) for rows in histogram)
    assert (tiling.row_blocks, tiling.tiles) == (blocks, 4 * blocks)
    assert tiling.whole_waves == math.ceil(tiling.tiles / sms)
    assert 0 < tiling.useful <= 1


@given(HISTOGRAMS.filter(any), st.integers(0, 10**6))
def test_scale_is_the_largest_remainder(histogram, rows):
    scaled, total = c.scale(histogram, rows), sum(histogram)
    assert sum(scaled) == rows
    assert all(abs(new * total - old * rows) < total for new, old in zip(scaled, histogram, strict=True))
    up = [new * total > old * rows for new, old in zip(scaled, histogram, strict=True)]
    rest = [old * rows % total for old in histogram]
    lowest_up = min((r for r, is_up in zip(rest, up, strict=True) if is_up), default=total)
    highest_down = max((r for r, is_up in zip(rest, up, strict=True) if not is_up), default=0)
    assert lowest_up >= highest_down
    assert c.scale(scaled, rows) == scaled


def test_scale_gives_ties_to_the_lower_index():
    assert c.scale([1, 1, 1, 1], 6) == (2, 2, 1, 1)
    assert c.scale([5, 0, 5], 3) == (2, 0, 1)
    assert c.balance(3, 8) == (3, 3, 2)


@given(HISTOGRAMS)
def test_gini_is_the_mean_difference(histogram):
    skew = c.describe(histogram)
    if any(histogram):
        pairs = sum(abs(a - b) for a in histogram for b in histogram)
        assert skew.gini == pytest.approx(pairs / (2 * len(histogram) * sum(histogram)))
    assert skew.effective_groups <= len(histogram) + 1e-9


def test_describe_the_hot_problem():
    skew = c.describe(problem("hot").counts)
    assert (skew.groups, skew.rows, skew.empty, skew.smallest, skew.largest) == (64, 16384, 0, 52, 13108)
    assert skew.max_over_mean == 13108 / 256
    one_has_all = c.describe([0, 7, 0, 0])
    assert (one_has_all.gini, one_has_all.effective_groups) == (0.75, 1.0)


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda each: each.name)
@pytest.mark.parametrize("top_k", [1, 2, 8])
def test_replay_gives_exactly_these_counts(problem, top_k):
    counts = c.scale(problem.counts, 4096)
    ids = c.replay(counts, top_k, seed=3)
    assert (ids.dtype, ids.shape) == (np.int32, (4096 // top_k, top_k))
    assert tuple(np.bincount(ids.ravel(), minlength=problem.groups)) == counts
    if max(counts) <= 4096 // top_k:
        assert all(len(set(row)) == top_k for row in ids.tolist())
    assert not np.array_equal(ids, np.sort(ids, axis=0))
    assert np.array_equal(ids, c.replay(counts, top_k, seed=3))


def test_rank_rows():
    assert c.rank_rows([1, 2, 3, 4], 2) == (3, 7)
    assert c.rank_rows([1, 2, 3], 2) == (3, 3)
    assert c.rank_rows([5], 3) == (5, 0, 0)


def test_recorder_copies_and_round_trips(tmp_path):
    recorder = c.Recorder("layer 3")
    reused = np.array([3, 0, 5], np.int32)
    recorder.add(reused)
    reused[:] = [8, 0, 0]
    recorder.add(reused)
    recorder.add([1, 2, 3])
    assert len(recorder) == 3
    path = recorder.save(tmp_path / "counts.json")
    assert c.load(path) == recorder.histograms()
    assert [item.counts for item in c.load(path)] == [(3, 0, 5), (8, 0, 0), (1, 2, 3)]
    assert c.load(path)[1].name == "layer 3[1]"


def test_recorder_takes_torch():
    torch = pytest.importorskip("torch")
    recorder = c.Recorder()
    counts = torch.tensor([3, 0, 5], dtype=torch.int32)
    recorder.add(counts)
    counts.zero_()
    assert recorder.histograms()[0].counts == (3, 0, 5)


def test_load_takes_all_three_forms(tmp_path):
    def load(content):
        path = tmp_path / "file.json"
        path.write_text(json.dumps(content))
        return c.load(path)

    assert load([3, 0, 5]) == [c.Histogram("file", (3, 0, 5))]
    assert load({"counts": [3, 0], "layer": 7}) == [c.Histogram("file", (3, 0))]
    assert load({"name": "up", "counts": [1], "k": 4, "n": 6}) == [c.Histogram("up", (1,), 4, 6)]
    assert load([[1, 2], {"counts": [3, 4]}]) == [
        c.Histogram("file[0]", (1, 2)),
        c.Histogram("file[1]", (3, 4)),
    ]


@pytest.mark.parametrize(
    "content, sentence",
    [
        ("{", "file.json is not JSON"),
        ('{"rows": [1]}', "there is no list 'counts' among its keys ('rows')"),
        ("[1, 2.5]", "`counts[1]` is 2.5: expected the rows of a group, a whole number >= 0"),
        ("[]", "`counts` is empty: expected the rows of at least one group"),
        ("[[1], [2, -3]]", "item 1: `counts[1]` is -3: expected the rows of a group"),
        ('{"counts": 4}', "`counts` is 4: expected a list with the rows of each group, as [3, 0, 5]"),
        ('{"counts": [1], "k": -1}', "`k` is -1: expected a whole number >= 0"),
    ],
)
def test_load_says_what_is_wrong(tmp_path, content, sentence):
    path = tmp_path / "file.json"
    path.write_text(content)
    with pytest.raises(ArgumentError) as error:
        c.load(path)
    assert sentence in str(error.value)
    assert str(path) in str(error.value)


def test_load_of_no_file():
    with pytest.raises(ArgumentError, match=r"nowhere.json cannot be read: No such file"):
        c.load(Path("nowhere.json"))


@pytest.mark.parametrize(
    "call, sentence",
    [
        (lambda: c.check("35"), "`counts` is '35': expected a list"),
        (lambda: c.check([True]), "`counts[0]` is True: expected the rows of a group"),
        (lambda: c.check(np.ones((2, 2), int)), "`counts[0]` is [1, 1]: expected the rows of a group"),
        (lambda: c.scale([0, 0], 5), "`counts` has no rows in 2 groups: cannot be scaled to 5 rows"),
        (lambda: c.scale([1], -5), "`rows` is -5: expected a whole number >= 0"),
        (lambda: c.balance(0, 5), "`groups` is 0: expected a whole number >= 1"),
        (lambda: c.replay([1, 2], 2), "multiple of top_k = 2; pass `scale(counts, 2)`"),
        (lambda: c.tile([1], k=4, n=4, tile_m=0), "`tile_m` is 0: expected a whole number >= 1"),
        (lambda: c.tile([1], k=4.0, n=4, tile_m=1), "`k` is 4.0: expected a whole number >= 0"),
        (
            lambda: c.tile([1], k=4, n=4, tile_m=1, machine=c.Machine(tflops=math.nan)),
            "`tflops` is nan: expected a number above 0",
        ),
    ],
)
def test_misuse_is_a_sentence(call, sentence):
    with pytest.raises(ArgumentError) as error:
        call()
    assert sentence in str(error.value)


def test_problems_scale_to_other_rows():
    decode = problem("qwen3-30b-up").scaled(512)
    assert (decode.rows, sum(decode.counts), decode.groups) == (512, 512, 128)
    assert len({each.name for each in PROBLEMS}) == len(PROBLEMS) >= 9
