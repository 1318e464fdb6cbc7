"""Count sets: what ships is what was recorded, it is the default of the commands, and a sentence for every misuse."""

import re
from pathlib import Path

import numpy as np
import pytest

from cupy_gmm import counts as c
from cupy_gmm.errors import ArgumentError
from tests import apart

PACKAGE = Path(c.__file__).parent


@pytest.fixture(scope="module")
def shipped():
    return c.load_set("moe-example")


# ---- the set that ships


def test_every_histogram_has_all_rows_of_a_step(shipped):
    assert c.SETS == ("moe-example",)
    assert shipped.counts.shape == (len(shipped.steps), shipped.layers, 32) == (290, 6, 32)
    assert shipped.counts.dtype == np.int32
    assert (shipped.counts.sum(-1) == 16384 * 2).all()
    assert shipped.steps == (*range(1, 101), *range(110, 2001, 10))
    assert (shipped.k, shipped.n) == (512, 1024)


def test_the_set_holds_what_its_readme_says(shipped):
    text = (PACKAGE / "_count_sets" / "README.md").read_text()
    assert shipped.histogram(17, 4).counts[np.argmax(shipped.counts[16, 4])] / 1024 == pytest.approx(9.3, abs=0.05)
    assert "at step 17 one of layer 4 receives 9.3 times" in text
    assert (shipped.counts[20:30, 5] == 0).any(-1).sum() >= 8
    last = shipped.counts[-1].max(-1) / 1024
    assert 1.7 < last.min() < last.max() < 2.4
    code = re.search(r"```python\n(from cupy_gmm.*?)```", text, re.DOTALL).group(1)
    apart.python(code)


def test_the_file_is_small():
    assert (PACKAGE / "_count_sets" / "moe-example.npz").stat().st_size < 150_000


def test_one_histogram_by_step_and_layer(shipped):
    found = shipped.histogram(20, 5)
    assert found == c.Histogram("moe-example-s20-l5", tuple(shipped.counts[19, 5].tolist()), 512, 1024)
    # Why the demo takes it: experts with no row and with one, as recorded and when scaled to its rows.
    for rows in (32768, 8192):
        assert {0, 1} < set(c.scale(found.counts, rows))
    assert shipped.histogram(np.int64(110), 0).counts == tuple(shipped.counts[100, 0].tolist())


def test_several_histograms(shipped):
    assert [each.name[12:] for each in shipped.histograms([2000, 1], [5, 0])] == [
        "s2000-l5", "s2000-l0", "s1-l5", "s1-l0",
    ]  # fmt: skip
    assert len(shipped.histograms()) == 290 * 6
    assert len(shipped.histograms(layers=[3])) == 290


def test_load_by_name_gives_the_telling_ones(shipped):
    assert c.load("moe-example") == [shipped.histogram(*each) for each in shipped.telling]
    assert [each.name for each in c.load("moe-example")] == [
        "moe-example-s20-l5", "moe-example-s1000-l2", "moe-example-s2000-l2",
    ]  # fmt: skip


def test_nobody_can_write_into_the_set(shipped):
    with pytest.raises(ValueError, match="read-only"):
        shipped.counts[0, 0, 0] = 1


def test_a_file_is_read_only_when_asked_for():
    program = (
        "import builtins, io, sys\n"
        "sys.addaudithook(lambda name, args: name == 'open' and '.npz' in str(args[0]) and sys.exit('read'))\n"
        "import cupy_gmm.counts\nprint('fine')"
    )
    assert apart.python(program).stdout == "fine\n"


# ---- files


def test_own_files_are_read_as_the_examples_write_them(tmp_path):
    counts = np.arange(24, dtype=np.int32).reshape(3, 2, 4)
    np.savez_compressed(tmp_path / "own.npz", counts=counts)
    found = c.load_set(tmp_path / "own.npz")
    assert (found.name, found.steps, found.layers, found.k, found.telling) == ("own", (1, 2, 3), 2, None, ())
    assert found.histogram(2, 1) == c.Histogram("own-s2-l1", (12, 13, 14, 15))
    assert c.load(tmp_path / "own.npz") == found.histograms()
    np.savez(tmp_path / "some.npz", counts=counts.astype(np.uint16), steps=[4, 8, 9])
    assert c.load_set(str(tmp_path / "some.npz")).histogram(8, 0).counts == (8, 9, 10, 11)


def test_a_path_is_always_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("moe-example").write_text("[3, 0, 5]")
    assert c.load(Path("moe-example")) == [c.Histogram("moe-example", (3, 0, 5))]
    assert len(c.load("moe-example")) == 3


@pytest.mark.parametrize(
    "arrays, sentence",
    [
        ({"rows": np.ones((1, 1, 1), int)}, "counts is not a file in the archive"),
        ({"counts": np.ones((2, 3), int)}, "`counts` is int64 (2, 3), `steps` int64 (2,)"),
        ({"counts": np.ones((2, 0, 3), int)}, "`counts` is int64 (2, 0, 3)"),
        ({"counts": np.ones((2, 1, 3))}, "`counts` is float64 (2, 1, 3)"),
        ({"counts": np.ones((2, 1, 3), int), "steps": [1]}, "`steps` int64 (1,)"),
        ({"counts": np.ones((2, 1, 3), int), "steps": [5, 5]}, "the steps do not rise"),
        ({"counts": np.full((1, 1, 1), -1)}, "a count is negative"),
        ({"counts": np.full((1, 1, 1), 2**31)}, "past 2^31"),
        ({"counts": np.array([[[None]]])}, "Object arrays cannot be loaded"),
    ],
)
def test_a_file_of_another_form_is_refused(tmp_path, arrays, sentence):
    path = tmp_path / "wrong.npz"
    np.savez(path, **arrays)
    with pytest.raises(ArgumentError) as error:
        c.load_set(path)
    assert sentence in str(error.value)
    assert f"{path}: expected an integer array `counts` (steps, layers, experts)" in str(error.value)


@pytest.mark.parametrize("content", [b"no archive", b"PK\x03\x04 cut", b""])
def test_what_is_no_archive_is_refused(tmp_path, content):
    path = tmp_path / "wrong.npz"
    path.write_bytes(content)
    with pytest.raises(ArgumentError, match=r"wrong.npz: expected an integer array"):
        c.load_set(path)


@pytest.mark.parametrize(
    "call, sentence",
    [
        (lambda s: s.histogram(105, 0), "moe-example has no step 105: it holds steps 1 to 100, 110 to 2000 by 10"),
        (lambda s: s.histogram(0, 0), "moe-example has no step 0: it holds"),
        (lambda s: s.histogram(1.0, 0), "moe-example has no step 1.0: it holds"),
        (lambda s: s.histogram(20, 6), "moe-example has no layer 6: it holds layers 0 to 5"),
        (lambda s: s.histogram(20, -1), "moe-example has no layer -1: it holds layers 0 to 5"),
        (lambda s: s.histograms([20], [True]), "moe-example has no layer True: it holds layers 0 to 5"),
        (lambda s: c.load_set("lopsided"), "lopsided is no count set: expected an .npz file or the name of a set, moe"),
        (lambda s: c.load("lopsided"), "lopsided cannot be read: No such file or directory; count sets by name: moe-"),
        (lambda s: c.load_set("absent.npz"), "absent.npz cannot be read: No such file or directory"),
    ],
)
def test_misuse_is_a_sentence(shipped, call, sentence):
    with pytest.raises(ArgumentError) as error:
        call(shipped)
    assert sentence in str(error.value)


def test_steps_are_told_in_runs(tmp_path):
    np.savez(tmp_path / "some.npz", counts=np.ones((7, 1, 1), int), steps=[1, 2, 3, 10, 20, 30, 31])
    with pytest.raises(ArgumentError, match=r"it holds steps 1 to 3, 10 to 30 by 10, 31"):
        c.load_set(tmp_path / "some.npz").histogram(4, 0)
