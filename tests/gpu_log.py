"""Whether the kernels as they are have been run on a GPU: the logs of `tests.gpu_run` in `bench/results/`.

Most machines that run the tests have no GPU, so an edited kernel passes there without having run once.
`test_gpu_log` warns, `conftest` repeats the sentence at the end of the run.
"""

import json
from pathlib import Path
from typing import Any

from cupy_gmm import _source

RESULTS = Path(__file__).resolve().parent.parent / "bench" / "results"
COMMAND = "run `make gpu` on a machine with a GPU, and commit its log"


def logs(folder: Path = RESULTS) -> list[tuple[str, dict[str, Any]]]:
    """(file name, content) of each log of the GPU lanes, oldest first. Timings are no such log."""
    found = [(path.name, json.loads(path.read_text())) for path in sorted(folder.glob("*.json"))]
    return sorted((each for each in found if "lanes" in each[1]), key=lambda each: each[1]["run"]["date"])


def complaint(folder: Path = RESULTS) -> str:
    """One sentence when no log is of the kernels as they are, a lane of that log failed or a GPU test was skipped."""
    found = logs(folder)
    if not found:
        return f"these kernels have no log of a GPU: bench/results holds none; {COMMAND}."
    now = _source.digest()
    name, log = next((each for each in reversed(found) if each[1]["run"]["kernels"] == now), found[-1])
    run = log["run"]
    if run["kernels"] != now:
        return (
            f"these kernels have no log of a GPU: they have digest {now[:12]}, and the newest log, {name} of "
            f"{run['date']}, is of {run['kernels'][:12]}; {COMMAND}."
        )
    if failed := ", ".join(lane["lane"] for lane in log["lanes"] if lane["exit"] != 0):
        return f"on the GPU these kernels did not pass {failed}: see bench/results/{name}."
    skipped = [why for lane in log["lanes"] if lane["lane"] != "others" for why in lane.get("skipped", ())]
    return f"on the GPU tests of these kernels were skipped, in bench/results/{name}: {skipped[0]}" if skipped else ""
