"""Runs what needs a GPU and writes one log: `python -m tests.gpu_run --out bench/results/gpu-h200.json`.

Lanes: all tests marked `gpu`, those past 2^31 elements on their own, and compute-sanitizer over `sanitizer_lane` with
memory pools off; with `--others` all other tests, too, some of which see whether there is a GPU. A lane is a process
with a time limit; the checkers run side by side.
"""

import argparse
import json
import pathlib
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from bench import facts

LARGE = "tests/test_large.py"
TESTS = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "240", "-m")
CHECKERS = ("memcheck", "racecheck", "synccheck", "initcheck")
PYTEST_COUNTS = re.compile(r"(\d+) (passed|failed|error|errors|skipped)")


def start(command: Sequence[str], log: pathlib.Path) -> tuple[subprocess.Popen[bytes], float]:
    with log.open("wb") as stream:
        return subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT), time.monotonic()


def finish(process: subprocess.Popen[bytes], began: float, limit: float, log: pathlib.Path) -> dict[str, Any]:
    """Waits for a lane; its record says how it ended and how its log closes."""
    try:
        code: int | str = process.wait(max(1.0, limit - (time.monotonic() - began)))
    except subprocess.TimeoutExpired:
        process.kill()
        code = "time limit"
    # Where a machine keeps its packages is nobody's business.
    lines = re.sub(r"/\S*/site-packages/", "", log.read_text(errors="replace")).splitlines()
    return {"exit": code, "seconds": round(time.monotonic() - began, 1), "closing": lines[-3:], "lines": lines}


def tests(name: str, marker: str, arguments: Sequence[str], limit: float, folder: pathlib.Path) -> dict[str, Any]:
    log = folder / f"{name}.log"
    record = finish(*start([*TESTS, marker, *arguments], log), limit, log)
    counts = {
        kind: int(count) for count, kind in PYTEST_COUNTS.findall(record["closing"][-1] if record["closing"] else "")
    }
    lines = record.pop("lines")
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    skipped = [line for line in lines if line.startswith("SKIPPED")]  # why: a log that hides it says too much
    return {"lane": name, "counts": counts, "failed": failed, "skipped": skipped, **record}


def checkers(names: Sequence[str], limit: float, folder: pathlib.Path) -> list[dict[str, Any]]:
    """compute-sanitizer's tools over the sanitizer lane, all at once."""
    tool = shutil.which("compute-sanitizer")
    if tool is None:
        return [{"lane": name, "exit": "compute-sanitizer is not installed"} for name in names]
    options = {"memcheck": ["--report-api-errors", "no"]}  # cuda-bindings asks for functions that a driver may lack
    running = []
    for name in names:
        log = folder / f"{name}.log"
        command = [tool, "--tool", name, *options.get(name, []), sys.executable, "-m", "tests.sanitizer_lane"]
        running.append((name, *start(command, log), log))
    records = []
    for name, process, began, log in running:
        record = finish(process, began, limit, log)
        lines = record.pop("lines")
        record["summary"] = [line for line in lines if "SUMMARY" in line or "calls checked" in line]
        record["first"] = [line for line in lines if line.startswith("=========")][1:12]
        records.append({"lane": name, **record})
    return records


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="the JSON log")
    parser.add_argument("--logs", type=pathlib.Path, default=pathlib.Path("/tmp"), help="folder of the lanes' output")
    parser.add_argument("--tool", action="append", choices=CHECKERS, help="checkers to run; all when left out")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds that one lane may take")
    parser.add_argument("--jobs", type=int, default=8, help="processes of the test lane")
    parser.add_argument("--commit", default=None, help="where there is no git: the commit of the tree")
    parser.add_argument("--others", action="store_true", help="the tests that need no GPU, too")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--no-tests", action="store_true", help="checkers only")
    only.add_argument("--no-checkers", action="store_true", help="tests only")
    args = parser.parse_args()
    args.logs.mkdir(parents=True, exist_ok=True)
    lanes = []
    if not args.no_tests:
        spread = ["-n", str(args.jobs), "--deselect", LARGE, "tests"]
        lanes.append(tests("tests", "gpu", spread, args.limit, args.logs))
        lanes.append(tests("large", "gpu", [LARGE], args.limit, args.logs))
        if args.others:
            lanes.append(tests("others", "not gpu", ["-n", str(args.jobs), "tests"], args.limit, args.logs))
    if not args.no_checkers:
        lanes += checkers(args.tool or CHECKERS, args.limit, args.logs)
    args.out.write_text(json.dumps({"run": facts.run(args.commit), "lanes": lanes}, indent=1) + "\n")
    for lane in lanes:
        print(lane["lane"], lane["exit"], lane.get("counts") or lane.get("summary"), f"{lane.get('seconds')} s")
        for line in lane.get("failed", [])[:40]:
            print("   ", line[:220])
    return int(any(lane["exit"] != 0 for lane in lanes))


if __name__ == "__main__":
    sys.exit(main())
