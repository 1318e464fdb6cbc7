"""Times the grouped products against their roofs and against PyTorch: `python -m bench.products`.

Roofs: `dense`, one cuBLAS product of the same FLOPs (weight gradient: cuBLAS batched over groups of rows / G rows), and
`bytes`, every operand moved once at the bandwidth of a large copy, both in the same run; the limit is the larger one.
"""

import argparse
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import cupy
import torch
from rich.console import Console
from rich.table import Table

import cupy_gmm
from bench import cublas, facts, timing, work
from bench.shapes import Problem, chosen
from cupy_gmm import _call, _config, ops


def ours(found: work.Work, configs: list[str | None]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Our calls: choosing by itself with a Schedule and with offsets, then every forced tuning point."""
    out = found.poisoned()
    schedule = ops.make_schedule(found.offs, found.problem.rows)
    yield "ours", lambda: work.call_of(ops, found, schedule, out=out)
    yield "ours+schedule", lambda: work.call_of(ops, found, found.offs, out=out)
    for config in configs:
        yield f"ours:{config}", lambda config=config: work.call_of(ops, found, found.offs, out=out, config=config)


def measure(problem: Problem, op: str, bandwidth: float, configs: list[str | None], rounds: int) -> dict[str, Any]:
    """One record of the table."""
    found = work.make(problem, op)
    contenders = {"dense": cublas.dense(found), "torch": cublas.grouped(found)} | dict(ours(found, configs))
    error = float(found.error(contenders["ours+schedule"]()))
    times = timing.medians(timing.interleaved(contenders, rounds))
    bytes_us = work.moved_bytes(problem, op) / bandwidth * 1e6
    chosen = next(plan.config.name for plan in _call.plans.values() if plan.problem.rows == problem.rows)
    record = {
        "problem": problem.name, "op": op, "dtype": "bfloat16", "groups": problem.groups, "rows": problem.rows,
        "k": problem.k, "n": problem.n, "dense_us": times["dense"], "bytes_us": bytes_us,
        "limit_us": max(times["dense"], bytes_us), "ours_us": times["ours"], "ours_schedule_us": times["ours+schedule"],
        "torch_us": times["torch"], "config": chosen, "worst_error": error,
    }  # fmt: skip
    record["forced_us"] = {name.removeprefix("ours:"): us for name, us in times.items() if name.startswith("ours:")}
    _call.plans.clear()
    return record


def table(records: list[dict[str, Any]]) -> Table:
    """The printed form of the records."""
    view = Table(title="microseconds (median); ratios above 1 mean ours is faster")
    for column in (
        "problem",
        "op",
        "dense",
        "bytes",
        "ours",
        "+schedule",
        "torch",
        "dense/ours",
        "limit/ours",
        "torch/ours",
    ):
        view.add_column(column, justify="left" if column in ("problem", "op") else "right")
    view.add_column("config (forced: us)")
    for r in records:
        forced = ", ".join(f"{name}: {us:.0f}" for name, us in r["forced_us"].items())
        view.add_row(
            r["problem"], r["op"], f"{r['dense_us']:.0f}", f"{r['bytes_us']:.0f}", f"{r['ours_us']:.0f}",
            f"{r['ours_schedule_us']:.0f}", f"{r['torch_us']:.0f}", f"{r['dense_us'] / r['ours_us']:.3f}",
            f"{r['limit_us'] / r['ours_us']:.3f}", f"{r['torch_us'] / r['ours_us']:.3f}",
            r["config"] + (f" ({forced})" if forced else ""),
        )  # fmt: skip
    return view


def host_costs() -> dict[str, float]:
    """Host microseconds of one warm `grouped_mm` call from CuPy arrays; the device finishes sooner."""
    import ml_dtypes

    x = cupy.ones((64, 64), dtype=ml_dtypes.bfloat16)
    w = cupy.ones((4, 64, 64), dtype=ml_dtypes.bfloat16)
    offs = cupy.asarray([16, 32, 48, 64], dtype=cupy.int32)
    schedule = cupy_gmm.make_schedule(offs, 64)
    out = cupy_gmm.grouped_mm(x, w, schedule)
    return {
        "host_neither_us": timing.host_micros(lambda: cupy_gmm.grouped_mm(x, w, offs)),
        "host_schedule_us": timing.host_micros(lambda: cupy_gmm.grouped_mm(x, w, schedule)),
        "host_schedule_out_us": timing.host_micros(lambda: cupy_gmm.grouped_mm(x, w, schedule, out=out)),
        "host_make_schedule_us": timing.host_micros(lambda: cupy_gmm.make_schedule(offs, 64, out=schedule)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problem", action="append", help="name of a problem; all when left out")
    parser.add_argument("--counts", action="append", default=[], help="file of recorded counts to replay as well")
    parser.add_argument("--op", action="append", choices=work.OPS, help="all when left out")
    parser.add_argument("--forced", action="store_true", help="also time every tuning point that can run the call")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=pathlib.Path, help="where to write the JSON records")
    parser.add_argument("--commit", help="where there is no git: the commit of the tree")
    args = parser.parse_args()
    timing.heat(timing.FIRST_HOT_SECONDS)
    bandwidth = timing.copy_bandwidth()
    records = []
    for problem in chosen(args.problem, args.counts):
        for op in args.op or work.OPS:
            kind = _config.WGRAD if op == "weight-gradient" else _config.GROUPED_MM
            configs = [c.name for c in _config.configs_of(kind) if c.vectorised] if args.forced else []
            records.append(measure(problem, op, bandwidth, configs, args.rounds))  # type: ignore[arg-type]
            torch.cuda.empty_cache()
    Console(width=200).print(table(records))
    host = host_costs()
    print({name: round(us, 1) for name, us in host.items()}, f"copy {bandwidth / 1e12:.2f} TB/s")
    if args.out:
        document = {"run": facts.run(args.commit) | {"copy_bytes_per_s": bandwidth} | host, "records": records}
        args.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
