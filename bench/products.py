"""Times the grouped products against their roofs and against peers: `python -m bench.products`.

Roofs: `dense`, one cuBLAS product of the same FLOPs (weight gradient: cuBLAS batched over groups of rows / G rows), and
`bytes`, every operand moved once at the bandwidth of a large copy, both in the same run; the limit is the larger one.
All contenders of a row take turns on one hot card (`bench.timing`). Ours is timed only where its result is right.

    python -m bench.products                                    named problems, and the recorded counts that ship
    python -m bench.products --group named                      without the latter
    python -m bench.products --group replayed --counts FOLDER   every count file, scaled to --rows on every --shape
"""

import argparse
import json
import pathlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from rich.console import Console

import cupy_gmm
from bench import choice, facts, one_gpu, peers, report, timing, work
from bench.clocks import Clocks
from bench.peers import Peer, cublas
from cupy_gmm import _call, _config, ops

SLOW_ROUNDS = 3


def ours(found: work.Work, out: torch.Tensor, forced: bool) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Our calls: choosing by itself with a Schedule and with offsets, then every tuning point if `forced`."""
    schedule = ops.make_schedule(found.offs, found.problem.rows)
    yield "ours", lambda: work.call_of(ops, found, schedule, out=out)
    yield "ours_schedule", lambda: work.call_of(ops, found, found.offs, out=out)
    kind = _config.WGRAD if found.is_wgrad else _config.GROUPED_MM
    for config in _config.configs_of(kind) if forced else []:
        if config.vectorised:
            name = config.name
            yield f"ours:{name}", lambda name=name: work.call_of(ops, found, found.offs, out=out, config=name)


def judged(found: work.Work, forced: bool) -> peers.Gathered:
    """Our calls that are right, each on an output that was NaN all over."""
    kept, out = peers.Gathered(), found.poisoned()
    for name, call in ours(found, out, forced):
        try:
            out.fill_(torch.nan)
            error = float(found.error(call()))
        except Exception as failure:
            kept.out[name] = peers.sentence(failure)
            continue
        kept.errors[name] = error
        if error <= 1:
            kept.calls[name] = call
        else:
            kept.out[name] = f"wrong: error over bound {error:.3g}"
    return kept


def config_of(found: work.Work) -> str | None:
    """Name of the tuning point that the library chose."""
    op = _config.WGRAD if found.is_wgrad else _config.GROUPED_MM
    plans = [plan for plan in _call.plans.values() if plan.problem.op == op]
    return plans[0].config.name if plans else None


def slow_times(found: work.Work, wanted: list[Peer]) -> tuple[peers.Gathered, dict[str, float]]:
    """Peers so slow that they would let the card cool: apart, in few rounds."""
    gathered = peers.gather(found, wanted)
    if not gathered.calls:
        return gathered, {}
    return gathered, timing.interleaved(gathered.calls, SLOW_ROUNDS, seconds=0, warmup=0).medians()


def measure(
    found: work.Work, bandwidth: float, wanted: list[Peer], forced: bool, rounds: int
) -> tuple[dict[str, Any], tuple[float, float]]:
    """One record of the table, and when its rounds were."""
    problem, began = found.problem, time.monotonic()
    own = judged(found, forced)
    config = config_of(found)
    others = peers.gather(found, [peer for peer in wanted if not peer.slow])
    contenders = {"dense": cublas.dense(found)} | own.calls | others.calls
    way = next((peer.crossing for peer in wanted if peer.crossing and peer.name in peers.names(others.calls)), None)
    if way is not None:
        contenders["crossing"] = way(found)
    prepared = time.monotonic()
    times = timing.interleaved(contenders, rounds)
    timed = time.monotonic()
    slow, slow_us = slow_times(found, [peer for peer in wanted if peer.slow])
    us = times.medians()
    bytes_us = work.moved_bytes(problem, found.op) / bandwidth * 1e6
    record: dict[str, Any] = {
        "problem": problem.name, "op": found.op, "dtype": "bfloat16", "groups": problem.groups, "rows": problem.rows,
        "k": problem.k, "n": problem.n, "dense_us": us["dense"], "bytes_us": bytes_us,
        "limit_us": max(us["dense"], bytes_us), "ours_us": us.get("ours"),
        "ours_schedule_us": us.get("ours_schedule"), "config": config,
    }  # fmt: skip
    record |= peers.concluded(wanted, us | slow_us)
    record["forced_us"] = {name.removeprefix("ours:"): each for name, each in us.items() if name.startswith("ours:")}
    record |= {"crossing_us": us["crossing"]} if way else {}
    record["spread"] = {name: round(times.spread(name), 4) for name in ("dense", "ours", "torch") if name in us}
    record["errors"] = own.errors | others.errors | slow.errors
    record["out"] = own.out | others.out | slow.out
    seconds = {"prepare": prepared - began, "rounds": timed - prepared, "slow": time.monotonic() - timed}
    record["seconds"] = {name: round(each, 2) for name, each in seconds.items()}
    _call.plans.clear()
    return record, times.window


def host_costs() -> dict[str, float]:
    """Host microseconds of one warm `grouped_mm` call from CuPy arrays; the device finishes sooner."""
    import cupy
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


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    choice.add_options(found, choice.GROUPS)
    found.add_argument("--list", action="store_true", help="print the problems and stop; needs no GPU")
    found.add_argument("--op", action="append", choices=work.OPS, help="all when left out")
    found.add_argument("--peer", action="append", choices=[*peers.registry(), "none"], help="by default all fast ones")
    found.add_argument("--forced", action="store_true", help="also time every tuning point that can run the call")
    found.add_argument("--rounds", type=int, default=20)
    found.add_argument("--out", type=pathlib.Path, help="where to write the JSON records; rewritten after each")
    found.add_argument("--commit", help="where there is no git: the commit of the tree")
    return found


def main() -> None:
    options = parser()
    args = options.parse_args()
    known = peers.registry()
    wanted = [known[name] for name in args.peer or peers.DEFAULT if name != "none"]
    try:
        problems = choice.of(args)
    except ValueError as error:
        options.error(str(error))
    if args.list:
        for each in problems:
            print(f"{each.name}: {each.groups} groups, {each.rows} rows, K = {each.k}, N = {each.n}")
        return
    console, began = Console(width=200), time.monotonic()
    timing.heat(timing.FIRST_HOT_SECONDS)
    bandwidth = timing.copy_bandwidth()
    document: dict[str, Any] = {"run": facts.run(args.commit) | {"copy_bytes_per_s": bandwidth}, "records": []}
    windows: list[tuple[float, float]] = []
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    with Clocks(f"GPU-{uuid.removeprefix('GPU-')}") as clocks:
        for problem in problems:
            for op in args.op or work.OPS:
                record, window = measure(work.make(problem, op), bandwidth, wanted, args.forced, args.rounds)
                torch.cuda.empty_cache()
                document["records"].append(record)
                windows.append(window)
                # Samples may come late: what a record lacks is looked for again.
                for each, when in zip(document["records"], windows, strict=True):
                    if "sm_mhz" not in each:
                        each |= clocks.during(when)
                write(document, args.out)
                console.print(
                    f"{time.monotonic() - began:6.1f} s  {problem.name} {op} {record['seconds']}", markup=False
                )
    document["run"] |= host_costs() | {"seconds": round(time.monotonic() - began, 1)}
    write(document, args.out)
    report.show(document, console)


def write(document: dict[str, Any], path: pathlib.Path | None) -> None:
    if path is not None:
        path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    one_gpu()
    main()
