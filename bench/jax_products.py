"""Times the product inside `jax.jit` against what JAX ships and against this library called from CuPy.

    python -m bench.jax_products --problem skewed --out bench/results/jax.json

Times are those of the device, between events on the stream of each (`bench/jax_clock.py`): of many products in a row,
divided by their number, each into a result of its own.

- `ours`: one jitted program, its schedule built once, as in a layer. Between the events are the schedule and the
  products and no other launch; the text of the compiled program must hold them all. In a command buffer the end of one
  product may lie beside the start of the next; `XLA_FLAGS=--xla_gpu_enable_command_buffer=` shows whether that matters.
- `ours_schedule`: the same from end offsets that depend on the result before, so that each builds a schedule.
- `cupy`, `cupy_schedule`: the same launches from `cupy_gmm.grouped_mm` on the same operands, into as many results.
  `ours / cupy` is what JAX adds.
- `pallas`: the Mosaic-GPU kernel that JAX ships, as many calls of one jitted product given without waiting.
- `ragged_dot`: `jax.lax.ragged_dot`, one call; it takes tens of milliseconds. Compiled with cuBLAS's kernels alone: XLA
  would compile and time its own for a quarter of a minute, a problem. `--autotune` lets it, `--no-lax` leaves it out.

All but the last take turns in an order drawn anew in each round, behind the same large product, on a card that was
loaded for a second first. Ratios are medians over rounds of ratios within a round; a spread is half the distance
between the quartiles, as a share of the median. `--kernels` adds what the profiler says of single kernels, where it
may. The first record is a step of one expert layer as in `examples/model.py`: two products, silu between, and all
gradients; steps in flight, what XLA launches besides among them. The largest problems come last. `python -m
bench.report FILE` reads the records, too.
"""

import argparse
import dataclasses
import functools
import json
import os
import pathlib
import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import cupy_gmm.jax
from bench import facts, one_gpu, shapes
from bench.jax_clock import Clock, Pair, kernels
from bench.jax_contenders import as_words, from_cupy, last_of, of_lax, pallas, programs
from bench.jax_work import HIDDEN, INNER, LAYER_COUNTS, distance, layer, length
from bench.shapes import Problem
from cupy_gmm.jax import _handler

Run = Callable[[], Pair]  # enqueues all products of a contender between two events

WARM_RUNS = 3  # XLA records a command buffer in the first ones
LAYER_STEPS = 10
LOADS = 2  # large products before each run: 3 ms, in which the host gets ahead


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """How the records are made: see the options of the same names."""

    clock: Clock
    heat: Callable[[float], None]
    rounds: int = 15
    points: int = 1
    lax: bool = True
    autotune: bool = False
    kernels: bool = False


def in_turns(runs: Mapping[str, Run], each: int, settings: Settings) -> dict[str, list[float]]:
    """Microseconds of a product in each round, by contender."""
    for run in runs.values():
        for _ in range(WARM_RUNS):
            run()
    settings.heat(1.0)
    pairs: dict[str, list[Pair]] = {name: [] for name in runs}
    order, shuffled = list(runs), random.Random(0)
    for _ in range(settings.rounds):
        shuffled.shuffle(order)
        for name in order:
            pairs[name].append(runs[name]())
    return {name: settings.clock.micros(found, each) for name, found in pairs.items()}


def ratio(samples: Mapping[str, list[float]], top: str, bottom: str) -> dict[str, float]:
    """Median over rounds of one contender's time over another's, and its spread; nothing where one has none."""
    if not samples.get(top) or not samples.get(bottom):
        return {}
    found = [a / b for a, b in zip(samples[top], samples[bottom], strict=True)]
    name = f"{top}_over_{bottom}"
    return {name: statistics.median(found), f"{name}_spread": spread(found)}


def spread(found: list[float]) -> float:
    """Half the distance between the quartiles, as a share of the median."""
    if len(found) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(found, n=4)
    return round((high - low) / 2 / middle, 4)


def measure(problem: Problem, settings: Settings) -> dict[str, Any]:
    """The record of one problem."""
    began, out, clock = time.monotonic(), dict[str, str](), settings.clock
    keys = jax.random.split(jax.random.key(0))
    x = jax.random.normal(keys[0], (problem.rows, problem.k), jnp.bfloat16)
    w = jax.random.normal(keys[1], (problem.groups, problem.k, problem.n), jnp.bfloat16)
    arrays = jax.block_until_ready((x, w, jnp.array(problem.counts, jnp.int32)))
    products = length(problem)
    compiled = programs(arrays, products, clock, out)
    others, result = from_cupy(arrays, products)
    runs: dict[str, Run] = {name: functools.partial(clock.inside, run) for name, run in compiled.items()}
    runs |= {name: functools.partial(clock.outside, run) for name, run in others.items()}
    for name, call in pallas(problem, arrays, settings.points, out).items():
        runs[name] = functools.partial(clock.in_flight, call, products)
    samples = in_turns(runs, products, settings)
    got = last_of(clock, compiled["ours"]) if "ours" in compiled else None
    errors: dict[str, Any] = (
        {} if got is None else {"same bits as cupy": bool((as_words(got) == as_words(result)).all())}
    )
    if settings.lax:
        call = of_lax(jax.jit(jax.lax.ragged_dot), arrays, settings.autotune, out)
        samples["ragged_dot"] = clock.micros([clock.in_flight(call, 1)], 1)
        if got is not None:
            errors["ours"] = distance(got, call())
    us = {name: statistics.median(found) for name, found in samples.items()}
    record = {
        "problem": problem.name, "op": "forward", "dtype": "bfloat16", "groups": problem.groups, "rows": problem.rows,
        "k": problem.k, "n": problem.n, "config": config(), "products": products,
        **ratio(samples, "ours", "cupy"), **ratio(samples, "ours_schedule", "cupy_schedule"),
    }  # fmt: skip
    if best := min((name for name in us if name.startswith("pallas:")), key=lambda name: us[name], default=None):
        record |= {"pallas_us": us[best], "pallas_config": best.removeprefix("pallas:")}
    record |= {f"{name}_us": each for name, each in us.items() if ":" not in name}
    if settings.kernels:
        record |= of_kernels({name: runs[name] for name in ("ours", "cupy") if name in runs}, products, clock)
    spreads = {name: spread(found) for name, found in samples.items()}
    return record | {"spread": spreads, "errors": errors, "out": out, "seconds": round(time.monotonic() - began, 2)}


def of_kernels(runs: Mapping[str, Run], products: int, clock: Clock) -> dict[str, float]:
    """Microseconds of a kernel of the product as the profiler sees it, by contender; nothing where it sees none."""
    record = {}
    for name, run in runs.items():
        found = kernels(lambda run=run: clock.micros([run()], 1), "grouped_mm")
        if len(found) == products:
            record[f"{name}_kernel_us"] = statistics.median(found)
    return record


def config() -> str:
    """The tuning point of the product that was prepared last."""
    plans = [launch._plan for launch in _handler._ready.values() if isinstance(launch, _handler.Product)]
    return plans[-1].config.name if plans else ""


def measure_layer(settings: Settings) -> dict[str, Any]:
    """The record of a training step of the layer."""
    began, experts, rows = time.monotonic(), len(LAYER_COUNTS), sum(LAYER_COUNTS)
    clock, out = settings.clock, dict[str, str]()
    extents = (rows, HIDDEN), (experts, HIDDEN, 2 * INNER), (experts, INNER, HIDDEN)
    keys = jax.random.split(jax.random.key(1), 3)
    arrays = tuple(jax.random.normal(key, shape, jnp.bfloat16) / 4 for key, shape in zip(keys, extents, strict=True))
    arrays = jax.block_until_ready((*arrays, jnp.array(LAYER_COUNTS, jnp.int32)))
    step = functools.partial(layer(cupy_gmm.jax.ragged_dot), *arrays)
    runs: dict[str, Run] = {"ours": lambda: clock.in_flight(step, LAYER_STEPS)}
    errors: dict[str, float] = {}
    if settings.lax:
        other = of_lax(layer(jax.lax.ragged_dot), arrays, settings.autotune, out)
        errors["ours"] = max(distance(*each) for each in zip(*map(jax.tree.leaves, (step(), other())), strict=True))
        runs["ragged_dot"] = lambda: clock.in_flight(other, LAYER_STEPS)
    samples = in_turns(runs, LAYER_STEPS, settings)
    before = time.perf_counter()
    results = [step() for _ in range(LAYER_STEPS)]
    host = (time.perf_counter() - before) / LAYER_STEPS * 1e6
    jax.block_until_ready(results)
    return {
        "problem": "layer", "op": "forward and backward", "dtype": "bfloat16", "groups": experts, "rows": rows,
        "k": HIDDEN, "n": INNER, "config": "", "products": 6, "host_us": host,
        **{f"{name}_us": statistics.median(found) for name, found in samples.items()},
        **ratio(samples, "ragged_dot", "ours"), "spread": {name: spread(found) for name, found in samples.items()},
        "errors": errors, "out": out, "seconds": round(time.monotonic() - began, 2),
    }  # fmt: skip


def table(records: list[dict[str, Any]]) -> Table:
    """One row a record; ratios above 1 mean that ours takes longer than CuPy's, or that the peer is slower."""
    view = Table(title="microseconds a product or step (median)")
    names = "ragged_dot", "pallas", "ours", "cupy", "ours_schedule", "cupy_schedule"
    ratios = "ours/cupy", "+schedule", "lax/ours", "pallas/ours"
    for column in ("problem", "op", *names, *ratios, "bits"):
        view.add_column(column, justify="left" if column in ("problem", "op", "bits") else "right")
    for r in records:
        numbers = [r.get("ours_over_cupy"), r.get("ours_schedule_over_cupy_schedule")]
        spreads = [r.get("ours_over_cupy_spread"), r.get("ours_schedule_over_cupy_schedule_spread"), None, None]
        numbers += [
            r[f"{peer}_us"] / r["ours_us"] if r.get(f"{peer}_us") and r.get("ours_us") else None
            for peer in ("ragged_dot", "pallas")
        ]
        view.add_row(
            r["problem"], r["op"], *(f"{r[f'{name}_us']:.1f}" if r.get(f"{name}_us") else "" for name in names),
            *("" if each is None else f"{each:.3f}" + ("" if wide is None else f" ± {wide:.3f}")
              for each, wide in zip(numbers, spreads, strict=True)),
            {True: "same", False: "[red]differ[/red]", None: ""}[r["errors"].get("same bits as cupy")],
        )  # fmt: skip
    return view


def cost(problem: Problem) -> int:
    """What a product computes: the order of the problems, so that the long ones come last."""
    return problem.rows * problem.k * problem.n


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = ["layer", *(problem.name for problem in sorted(shapes.PROBLEMS, key=cost))]
    options.add_argument("--problem", action="append", choices=known, help="all when left out")
    options.add_argument("--rounds", type=int, default=15)
    options.add_argument("--points", type=int, default=1, help="shapes of block to try with pallas, at most 3; 0: none")
    options.add_argument("--no-lax", dest="lax", action="store_false", help="without jax.lax.ragged_dot")
    options.add_argument("--autotune", action="store_true", help="let XLA time kernels of its own for ragged_dot")
    options.add_argument(
        "--kernels", action="store_true", help="what the profiler says of single kernels, where it may"
    )
    options.add_argument(
        "--out", type=pathlib.Path, help="where to write the JSON record; rewritten after each problem"
    )
    options.add_argument("--commit", help="where there is no git: the commit of the tree")
    args = options.parse_args()
    import cupy

    from bench import timing  # imports torch

    def load() -> None:
        for _ in range(LOADS):
            timing.load()

    console, began = Console(width=200), time.monotonic()
    document: dict[str, Any] = {"run": facts.run(args.commit), "records": []}
    clock = Clock(cupy.cuda.runtime, load)
    settings = Settings(clock, timing.heat, args.rounds, args.points, args.lax, args.autotune, args.kernels)
    timing.heat(timing.FIRST_HOT_SECONDS)
    for name in [name for name in known if name in (args.problem or known)]:
        record = measure_layer(settings) if name == "layer" else measure(shapes.problem(name), settings)
        document["records"].append(record)
        jax.clear_caches()  # and the memory of its programs
        cupy.get_default_memory_pool().free_all_blocks()
        document["run"]["seconds"] = round(time.monotonic() - began, 1)
        if args.out is not None:
            args.out.write_text(json.dumps(document, indent=1) + "\n")
        console.print(json.dumps(record), markup=False, highlight=False)
    console.print(table(document["records"]))


if __name__ == "__main__":
    one_gpu()
    main()
