"""The kernels as they are have run on a GPU, or a loud warning says that they have not."""

import json
import warnings
from pathlib import Path
from typing import Any

from cupy_gmm import _source
from tests import gpu_log


def write(folder: Path, name: str, **run: Any) -> None:
    lanes = [{"lane": "tests", "exit": 0}, {"lane": "memcheck", "exit": run.pop("exit", 0)}]
    (folder / name).write_text(json.dumps({"run": {"date": "2000-01-01", **run}, "lanes": lanes}))


def test_the_kernels_have_run_on_a_gpu() -> None:
    """A warning and no failure: whoever edits a kernel may have no GPU at hand."""
    if complaint := gpu_log.complaint():
        warnings.warn(complaint, stacklevel=1)


def test_a_log_of_these_kernels_is_silent(tmp_path: Path) -> None:
    write(tmp_path, "a.json", kernels=_source.digest())
    write(tmp_path, "b.json", kernels="0" * 64)
    assert gpu_log.complaint(tmp_path) == ""


def test_what_is_complained_of(tmp_path: Path) -> None:
    assert "no log of a GPU: bench/results holds none; run `make gpu`" in gpu_log.complaint(tmp_path)
    (tmp_path / "times.json").write_text(json.dumps({"run": {"kernels": _source.digest()}, "records": []}))
    assert "holds none" in gpu_log.complaint(tmp_path)
    write(tmp_path, "z.json", kernels="1" * 64)
    write(tmp_path, "a.json", kernels="2" * 64, date="2000-01-02")
    complaint = gpu_log.complaint(tmp_path)
    assert f"digest {_source.digest()[:12]}, and the newest log, a.json of 2000-01-02, is of {'2' * 12};" in complaint
    write(tmp_path, "b.json", kernels=_source.digest(), exit="time limit")
    assert gpu_log.complaint(tmp_path) == "on the GPU these kernels did not pass memcheck: see bench/results/b.json."
    lanes = [{"lane": name, "exit": 0, "skipped": [f"SKIPPED [9] {name}"]} for name in ("others", "tests")]
    run = {"date": "2000-01-03", "kernels": _source.digest()}
    (tmp_path / "c.json").write_text(json.dumps({"run": run, "lanes": lanes[:1]}))
    assert gpu_log.complaint(tmp_path) == ""
    (tmp_path / "c.json").write_text(json.dumps({"run": run, "lanes": lanes}))
    assert gpu_log.complaint(tmp_path).endswith("were skipped, in bench/results/c.json: SKIPPED [9] tests")
