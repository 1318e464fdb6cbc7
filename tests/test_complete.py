"""`--complete`, which CI gives: what another machine may skip must run there, or fail."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Texts of tests that run in a process of their own; no test of this suite skips by them.
NO_GPU = "@pytest.mark.gpu\ndef test_one():\n    pytest.skip('no CUDA device')\n"
CASES = {
    "in a test": "def test_one():\n    pytest.skip('no compiler')\n",
    "in a fixture": "@pytest.fixture\ndef tool():\n    pytest.skip('no compiler')\n\ndef test_one(tool):\n    pass\n",
    "by a mark": "@pytest.mark.skipif(True, reason='no compiler')\ndef test_one():\n    pass\n",
    "of a module": "pytest.importorskip('no_such_module', reason='no compiler')\n\ndef test_one():\n    pass\n",
}


def run(folder: Path, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_skips.py").write_text(f"import pytest\n\n{text}")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "tests.conftest",
        "-p",
        "no:cacheprovider",
        "-c",
        "/dev/null",
    ]
    command += ["--rootdir", str(folder), *options, str(folder / "test_skips.py")]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("name", CASES)
def test_a_skip_fails_where_nothing_is_wanting(name: str, tmp_path: Path) -> None:
    assert run(tmp_path, CASES[name]).returncode in (0, 5)
    done = run(tmp_path, CASES[name], "--complete")
    assert done.returncode in (1, 2), done.stdout
    assert "no compiler" in done.stdout


def test_the_want_of_a_gpu_is_no_failure(tmp_path: Path) -> None:
    assert run(tmp_path, NO_GPU, "--complete").returncode == 0
