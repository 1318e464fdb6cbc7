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
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import cupy_gmm
from bench import facts, timing
from bench.shapes import PROBLEMS, Problem, replays
from cupy_gmm import _call, _config, ops

OPS = ("forward", "input-gradient", "weight-gradient")


def operands(problem: Problem, op: str) -> dict[str, torch.Tensor]:
    """Random bf16 operands and the offsets of a problem."""
    generator = torch.Generator("cuda").manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, generator=generator)

    offs = torch.tensor(np.cumsum(problem.counts), dtype=torch.int32, device="cuda")
    x = random(problem.rows, problem.k)
    if op == "weight-gradient":
        return {"x": x, "dy": random(problem.rows, problem.n), "offs": offs}
    if op == "forward":
        return {"x": x, "w": random(problem.groups, problem.k, problem.n), "offs": offs}
    return {"x": x, "w": random(problem.groups, problem.n, problem.k).mT, "offs": offs}


def moved_bytes(problem: Problem, op: str) -> int:
    """Bytes that must cross the memory bus: rows once, each used weight once (weight gradient: every dw once)."""
    rows = 2 * problem.rows * (problem.k + problem.n)
    used = problem.groups if op == "weight-gradient" else sum(1 for count in problem.counts if count)
    return rows + 2 * used * problem.k * problem.n


def dense(problem: Problem, op: str) -> Callable[[], Any]:
    """cuBLAS at the same FLOPs."""
    if op == "weight-gradient":
        mean = max(1, problem.rows // problem.groups)
        a = torch.randn(problem.groups, problem.k, mean, device="cuda", dtype=torch.bfloat16)
        b = torch.randn(problem.groups, mean, problem.n, device="cuda", dtype=torch.bfloat16)
        out = torch.empty(problem.groups, problem.k, problem.n, device="cuda", dtype=torch.bfloat16)
        return lambda: torch.bmm(a, b, out=out)
    a = torch.randn(problem.rows, problem.k, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(problem.k, problem.n, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(problem.rows, problem.n, device="cuda", dtype=torch.bfloat16)
    return lambda: torch.mm(a, b, out=out)


def peer(found: dict[str, torch.Tensor], op: str) -> Callable[[], Any]:
    """torch's grouped product."""
    grouped = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
    if op == "weight-gradient":
        return lambda: grouped(found["x"].t(), found["dy"], offs=found["offs"])
    return lambda: grouped(found["x"], found["w"], offs=found["offs"])


def ours(found: dict[str, torch.Tensor], op: str, configs: list[str | None]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Our calls: choosing by itself with offsets and with a Schedule, then every forced tuning point."""
    x, offs, rows = found["x"], found["offs"], found["x"].shape[0]
    call, other = (ops.grouped_mm_wgrad, found["dy"]) if op == "weight-gradient" else (ops.grouped_mm, found["w"])
    out = call(x, other, offs)
    schedule = ops.make_schedule(offs, rows)
    yield "ours", lambda: call(x, other, schedule, out=out)
    yield "ours+schedule", lambda: call(x, other, offs, out=out)
    for config in configs:
        yield f"ours:{config}", lambda config=config: call(x, other, offs, out=out, config=config)


def worst_ratio(found: dict[str, torch.Tensor], problem: Problem, op: str) -> float:
    """Largest |error| / bound of our result on these operands, against float32 products of each group."""
    x, offs = found["x"], np.cumsum(problem.counts)
    worst = 0.0
    result = (
        ops.grouped_mm_wgrad(x, found["dy"], found["offs"])
        if op == "weight-gradient"
        else ops.grouped_mm(x, found["w"], found["offs"])
    )
    start = 0
    for group, end in enumerate(offs):
        rows = slice(start, int(end))
        start = int(end)
        if op == "weight-gradient":
            a, b, got, terms = (
                x[rows].T.float(),
                found["dy"][rows].float(),
                result[group],
                problem.counts[group],
            )
        else:
            a, b, got, terms = x[rows].float(), found["w"][group].float(), result[rows], problem.k
        want = a @ b
        # The reference carries float32 rounding of its own, hence twice the accumulation term.
        bound = 8 * max(terms, 1) ** 0.5 * 2.0**-23 * (a.abs() @ b.abs()) + 2.0**-8 * want.abs() + 1e-30
        if got.numel():
            worst = max(worst, float(((got.float() - want).abs() / bound).max()))
    return worst


def measure(problem: Problem, op: str, bandwidth: float, configs: list[str | None], rounds: int) -> dict[str, Any]:
    """One record of the table."""
    found = operands(problem, op)
    error = worst_ratio(found, problem, op)
    contenders = {"dense": dense(problem, op), "torch": peer(found, op)} | dict(ours(found, op, configs))
    times = timing.interleaved(contenders, rounds)
    bytes_us = moved_bytes(problem, op) / bandwidth * 1e6
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
    parser.add_argument("--op", action="append", choices=OPS, help="all when left out")
    parser.add_argument("--forced", action="store_true", help="also time every tuning point that can run the call")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=pathlib.Path, help="where to write the JSON records")
    parser.add_argument("--commit", help="where there is no git: the commit of the tree")
    args = parser.parse_args()
    timing.heat()
    bandwidth = timing.copy_bandwidth()
    records = []
    problems = [each for each in PROBLEMS if not args.problem or each.name in args.problem]
    for problem in problems + [each for path in args.counts for each in replays(path)]:
        for op in args.op or OPS:
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
