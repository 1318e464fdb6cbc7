"""The comparison of source trees, as far as it goes with no GPU: variants, copies side by side, the judge of each."""

import dataclasses
import io
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from bench import trees
from bench.shapes import Problem

ROOT = Path(__file__).resolve().parent.parent
SMALL = Problem("small", 4, 64, 48, 37, (5, 0, 30, 2))


def test_variants_are_every_combination():
    settings = ["_heuristics.PANEL_COLUMNS=1024", "_heuristics.PANEL_COLUMNS=2048"]
    found = trees.variants([f"old={ROOT}"], ["auto", "128x128"], settings)
    assert [each.label for each in found] == [
        "old PANEL_COLUMNS=1024",
        "old PANEL_COLUMNS=2048",
        "old 128x128 PANEL_COLUMNS=1024",
        "old 128x128 PANEL_COLUMNS=2048",
    ]
    assert [each.config for each in found] == [None, None, "128x128", "128x128"]
    with pytest.raises(ValueError, match="holds neither"):
        trees.variants([str(ROOT / "tools")], [], [])
    with pytest.raises(ValueError, match="name the trees"):
        trees.variants([str(ROOT), str(ROOT)], [], [])


def test_copies_have_their_own_settings_and_kernels(tmp_path):
    (tmp_path / "kernels" / "ptx").mkdir(parents=True)
    (tmp_path / "kernels" / "ptx" / "types.cuh").write_text("// other\n")
    own, other = trees.variants([f"own={ROOT}", f"other={tmp_path}"], [], ["_heuristics.PANEL_COLUMNS=512"])
    libraries = [trees.load(each, f"copy_of_library_{index}") for index, each in enumerate((own, other))]
    from cupy_gmm import _heuristics, _source

    sources = [sys.modules[f"{library.__name__}._source"] for library in libraries]
    assert sources[0].digest() == _source.digest() != sources[1].digest()
    assert sources[1].kernels_dir() == tmp_path / "kernels"
    assert sys.modules[f"{libraries[0].__name__}._heuristics"].PANEL_COLUMNS == 512 != _heuristics.PANEL_COLUMNS
    x = np.ones((3, 4), np.float16)
    assert (libraries[1].grouped_mm(x, np.ones((1, 4, 2), np.float16), np.array([3], np.int32)) == 4).all()
    with pytest.raises(ValueError, match="no such name"):
        trees.load(trees.variants([str(ROOT)], [], ["_heuristics.NOTHING=1"])[0], "copy_of_library_2")


def tree(folder: Path, old: str, new: str) -> str:
    """A copy of the package with one piece of text in `_host.py` changed."""
    shutil.copytree(ROOT / "cupy_gmm", folder / "cupy_gmm", ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "cupy_gmm" / "_host.py"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    return f"{folder.name}={folder}"


def test_what_is_wrong_crashes_or_hangs_is_out(tmp_path):
    """Each in its own process: the sound one stays, and why the others are out is told."""
    pytest.importorskip("torch", reason="torch is not installed")
    from bench import compare

    head = "from typing import Any\n"
    folders = [
        f"sound={ROOT}",
        tree(tmp_path / "crashes", head, head + "import os\nos.abort()\n"),
        tree(tmp_path / "raises", head, head + "raise OSError('planted')\n"),
    ]
    variants = [*trees.variants(folders, [], []), *trees.variants([f"refused={ROOT}"], ["no-such-point"], [])]
    job = {
        "variants": [dataclasses.asdict(each) for each in variants], "problems": [dataclasses.asdict(SMALL)],
        "ops": ["forward", "weight-gradient"], "offsets": False, "rounds": 2, "device": "cpu",
    }  # fmt: skip
    fit, out = compare.checked(job, 200, 4)
    assert fit == {"small forward": [0], "small weight-gradient": [0]}
    for key in fit:
        assert "status -6" in out[key, 1]
        assert "planted" in out[key, 2]
        assert "no-such-point" in out[key, 3]

    hangs = tree(tmp_path / "hangs", head, head + "import time\ntime.sleep(600)\n")
    job["variants"] = [dataclasses.asdict(each) for each in trees.variants([hangs], [], [])]
    fit, out = compare.checked(job, 1, 1)
    assert not any(fit.values())
    assert set(out.values()) == {"no end within 1 s"}


def test_table_has_who_was_timed_and_who_is_out():
    from rich.console import Console

    from bench import compare

    us = {"dense": 90.0, "torch": 150.0, "0": 120.0, "1": 100.0}
    record = {"problem": "small", "op": "forward", "bytes": 4e8, "us": us, "spread": dict.fromkeys(us, 0.01)}
    shown = io.StringIO()
    out = {("small forward", 2): "ended with status -6", ("other forward", 3): "elsewhere"}
    labels = ["old", "new", "crashing", "other"]
    Console(file=shown, width=150).print(compare.view(record | {"wrong": {"3": "wrong beside"}}, labels, 4e12, out))
    lines = {line.split("│")[1].strip(): line for line in shown.getvalue().splitlines() if "│" in line}
    assert "limit 100 us, torch 150 us" in shown.getvalue()
    assert [part.strip() for part in lines["new"].split("│")[2:-1]] == [
        "100.0",
        "1.0%",
        "0.900",
        "1.000",
        "1.500",
        "1.200",
    ]
    assert "status -6" in lines["crashing"]
    assert "wrong beside" in lines["other"]
    assert "elsewhere" not in shown.getvalue()
