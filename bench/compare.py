"""Times source trees, tuning points or settings of the library against each other: `python -m bench.compare`.

First every variant runs alone, several at a time, in a process with a time limit: its results are judged, and one
that is wrong, crashes or hangs is out for that problem. The others are then timed in one process, in turns on one hot
card, with dense cuBLAS and torch among them.

    python -m bench.compare --tree old=../old --tree new=. --problem balanced --problem skewed --op forward
    python -m bench.compare --config auto --config 128x128 --set _heuristics.PANEL_COLUMNS=1024
"""

import argparse
import concurrent.futures
import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import choice, one_gpu, trees

OPS = ("forward", "input-gradient", "weight-gradient")


def child(limit: float, *arguments: str) -> tuple[list[dict[str, Any]], str]:
    """Runs one process of `bench.compare_run`: its records, and how it ended where it did not end well."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            [sys.executable, "-m", "bench.compare_run", *arguments],
            cwd=trees.HERE, stdout=out, stderr=err, env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        try:
            code = process.wait(limit)
            ended = "" if code == 0 else f"ended with status {code}"
        except subprocess.TimeoutExpired:
            process.kill()
            ended = f"no end within {limit:g} s"
            try:
                process.wait(30)  # a kernel that hangs is taken off the card first
            except subprocess.TimeoutExpired:
                ended += ", and it cannot be killed"
        out.seek(0)
        err.seek(0)
        records = [json.loads(line) for line in out.read().splitlines() if line.startswith("{") and line.endswith("}")]
        closing = err.read().strip().splitlines()[-1:]
    return records, ended and ": ".join([ended, *closing])[:400]


def checked(job: dict[str, Any], limit: float, jobs: int) -> tuple[dict[str, list[int]], dict[tuple[str, int], str]]:
    """(which variants may be timed, by problem and product; why the others may not)."""
    wanted = [f"{problem['name']} {op}" for problem in job["problems"] for op in job["ops"]]
    every = range(len(job["variants"]))
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        results = list(pool.map(lambda index: child(limit, "check", json.dumps(job), str(index)), every))
    fit: dict[str, list[int]] = {key: [] for key in wanted}
    out: dict[tuple[str, int], str] = {}
    for index, (records, ended) in zip(every, results, strict=True):
        seen = {f"{record['problem']} {record['op']}": record.get("why", "") for record in records}
        for key in wanted:
            # What came before a crash counts: its process went on to the next problem.
            if why := seen.get(key, ended or "no result"):
                out[key, index] = why
            else:
                fit[key].append(index)
    return fit, out


def view(record: dict[str, Any], labels: list[str], copy: float, out: dict[tuple[str, int], str]) -> Table:
    """One problem and product: microseconds and ratios of each contender."""
    us, spread = record["us"], record["spread"]
    limit = max(us["dense"], record["bytes"] / copy * 1e6)
    key = f"{record['problem']} {record['op']}"
    table = Table(title=f"{key}: limit {limit:.0f} us, torch {us['torch']:.0f} us", title_justify="left")
    for column in ("variant", "us", "spread", "dense/us", "limit/us", "torch/us", "first/us"):
        table.add_column(column, justify="left" if column == "variant" else "right")
    first = next((us[str(index)] for index in range(len(labels)) if str(index) in us), None)
    for name in us:
        label = labels[int(name)] if name.isdigit() else name
        row = [f"{us[name]:.1f}", f"{spread[name]:.1%}"]
        row += [f"{top / us[name]:.3f}" for top in (us["dense"], limit, us["torch"])]
        table.add_row(label, *row, f"{first / us[name]:.3f}" if first and name.isdigit() else "")
    for (where, index), why in out.items():
        if where == key:
            table.add_row(labels[index], f"[red]{why}[/red]")
    for index, why in record["wrong"].items():
        table.add_row(labels[int(index)], f"[red]{why}[/red]")
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tree", action="append", default=[], help="FOLDER or NAME=FOLDER with cupy_gmm/, kernels/ or both; this tree"
    )
    parser.add_argument("--config", action="append", default=[], help='tuning point to force; "auto" chooses')
    parser.add_argument(
        "--set", action="append", default=[], help="module.NAME=value, such as _heuristics.PANEL_COLUMNS=1024"
    )
    choice.add_options(parser, ("named", "replayed"))
    parser.add_argument("--op", action="append", choices=OPS, help="forward when left out")
    parser.add_argument("--offsets", action="store_true", help="build the schedule in every timed call")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--limit", type=float, default=90, help="seconds that the check of one variant may take")
    parser.add_argument("--time-limit", type=float, default=400, help="seconds that all timing may take")
    parser.add_argument("--jobs", type=int, default=6, help="checks at a time")
    parser.add_argument("--out", type=pathlib.Path, help="where to write the JSON records")
    args = parser.parse_args()
    try:
        variants = trees.variants(args.tree, args.config, args.set)
        problems = [dataclasses.asdict(problem) for problem in choice.of(args)]
    except ValueError as error:
        parser.error(str(error))
    job = {
        "variants": [dataclasses.asdict(variant) for variant in variants],
        "problems": problems, "ops": args.op or ["forward"], "offsets": args.offsets, "rounds": args.rounds,
        "device": "cuda",
    }  # fmt: skip
    labels = [variant.label for variant in variants]
    fit, out = checked(job, args.limit, args.jobs)
    records, ended = child(args.time_limit, "time", json.dumps(job), json.dumps(fit))
    console, copy = Console(width=150), records[0]["copy_bytes_per_s"] if records else 1.0
    for record in records[1:]:
        console.print(view(record, labels, copy, out))
    missing = [f"{labels[index]} on {key}: {why}" for (key, index), why in out.items()]
    console.print(f"copy {copy / 1e12:.2f} TB/s", *(["out:", *missing] if missing else []), sep="\n", markup=False)
    if ended:
        console.print(f"timing: {ended}", markup=False)
    if args.out:
        document = {"labels": labels, "copy_bytes_per_s": copy, "out": missing, "ended": ended, "records": records[1:]}
        args.out.write_text(json.dumps(document, indent=1) + "\n")
    return int(bool(ended or missing))


if __name__ == "__main__":
    one_gpu()
    sys.exit(main())
