"""Times the product inside `jax.jit` against what JAX ships and against this library called from CuPy.

    python -m bench.jax_products --problem skewed --out bench/results/jax.json

JAX shows no events, so times are the host's clock around work of at least ten milliseconds, from its start to the end
of the last product, divided by the number of products:

- `ours`: one jitted program with many products in a chain. `optimization_barrier` between them, and one element of each
  result that is kept, so that XLA can neither merge nor drop them; the text of the compiled program must hold them all.
  The schedule is built once, as in a layer. Handlers run ahead of the device, or not at all where XLA replays a command
  buffer: the host costs nothing. In a command buffer the end of one product may lie beside the start of the next, as
  the barrier is gone by then; `XLA_FLAGS=--xla_gpu_enable_command_buffer=` shows whether that matters.
- `ours_schedule`: the same, but sizes depend on the result before, so that each product waits for it and builds a
  schedule.
- `cupy`, `cupy_schedule`: as many `cupy_gmm.grouped_mm` on the same memory, with a Schedule and with end offsets, given
  to a stream without waiting. `ours / cupy` is what JAX adds.
- `pallas`: the Mosaic-GPU kernel that JAX ships, calls of one jitted product given without waiting.
- `ragged_dot`: `jax.lax.ragged_dot`, two calls; it takes tens of milliseconds.

All but the last take turns on a card kept busy, and ratios are medians over rounds of ratios within a round. The last
record is a step of one expert layer as in `examples/model.py`: two products, silu between, and all gradients; steps in
flight. `python -m bench.report FILE` reads the records, too.
"""

import argparse
import json
import os
import pathlib
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

import cupy_gmm.jax
from bench import facts, shapes
from bench.jax_work import HIDDEN, INNER, LAYER_COUNTS, calls_in, chain, distance, layer, length
from bench.shapes import Problem
from cupy_gmm.jax import _handler, _wire

Run = Callable[[], Any]  # enqueues all products of a contender and waits for them

HOT_SECONDS = 0.5
SLOW_CALLS = 2
LAYER_STEPS = 20


def ours(arrays: tuple[Any, ...], products: int) -> dict[str, Run]:
    """Both chains, compiled.

    Raises:
        RuntimeError: XLA merged or dropped products.
    """
    found = {}
    for name, rebuilt in (("ours", False), ("ours_schedule", True)):
        compiled = jax.jit(chain(cupy_gmm.jax.ragged_dot, products, rebuilt)).lower(*arrays).compile()
        text = compiled.as_text()
        seen = calls_in(text, _wire.PRODUCT_TARGET["grouped_mm"]), calls_in(text, _wire.SCHEDULE_TARGET)
        if jax.default_backend() == "gpu" and seen != (products, products if rebuilt else 1):
            raise RuntimeError(f"{name}: XLA made {seen} products and schedules of a chain of {products}")
        found[name] = lambda compiled=compiled: jax.block_until_ready(compiled(*arrays))
    return found


def from_cupy(arrays: tuple[Any, ...], products: int) -> tuple[dict[str, Run], Any]:
    """The same products from CuPy on the same memory; and where the result lies."""
    import cupy
    import ml_dtypes

    x, w, sizes = (cupy.from_dlpack(each) for each in arrays)
    offs = cupy_gmm.offs_from_sizes(sizes)
    schedule = cupy_gmm.make_schedule(offs, x.shape[0])
    out = cupy.empty((x.shape[0], w.shape[2]), ml_dtypes.bfloat16)

    def run(groups: Any) -> None:
        for _ in range(products):
            cupy_gmm.grouped_mm(x, w, groups, out=out)
        cupy.cuda.get_current_stream().synchronize()

    return {"cupy": lambda: run(schedule), "cupy_schedule": lambda: run(offs)}, out


def in_flight(call: Callable[..., Any], arrays: tuple[Any, ...], calls: int) -> Run:
    def run() -> None:
        for _ in range(calls):
            result = call(*arrays)
        jax.block_until_ready(result)

    return run


def pallas(
    problem: Problem, arrays: tuple[Any, ...], products: int, points: int, out: dict[str, str]
) -> dict[str, Run]:
    """JAX's own kernel in so many shapes of block, those that work."""
    found: dict[str, Run] = {}
    try:
        from bench.peers import Unavailable, jax_gpu, sentence
    except ImportError as error:
        out["pallas"] = f"the peers cannot be imported: {error}"
        return found
    try:
        offered = jax_gpu.mosaic(problem.n)
    except Unavailable as error:
        out["pallas"] = sentence(error)
        return found
    for name, product in list(offered.items())[:points]:
        try:
            call = jax.jit(product).lower(*arrays).compile()
            jax.block_until_ready(call(*arrays))
        except Exception as error:
            out[f"pallas:{name}"] = sentence(error)
            continue
        found[f"pallas:{name}"] = in_flight(call, arrays, products)
    return found


def micros(run: Run, products: int) -> float:
    began = time.perf_counter()
    run()
    return (time.perf_counter() - began) / products * 1e6


def in_turns(runs: Mapping[str, Run], products: int, rounds: int) -> dict[str, list[float]]:
    """Microseconds of a product in each round, by contender; the card is warm."""
    for run in runs.values():
        for _ in range(3):  # XLA records a command buffer in the first ones
            run()
    end = time.monotonic() + HOT_SECONDS
    while time.monotonic() < end:
        next(iter(runs.values()))()
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds):
        names = list(runs)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            samples[name].append(micros(runs[name], products))
    return samples


def over(samples: Mapping[str, list[float]], top: str, bottom: str) -> float:
    """Median over rounds of one contender's time over another's."""
    return statistics.median(a / b for a, b in zip(samples[top], samples[bottom], strict=True))


def measure(problem: Problem, rounds: int, points: int) -> dict[str, Any]:
    """The record of one problem."""
    began, out = time.monotonic(), {}
    keys = jax.random.split(jax.random.key(0))
    x = jax.random.normal(keys[0], (problem.rows, problem.k), jnp.bfloat16)
    w = jax.random.normal(keys[1], (problem.groups, problem.k, problem.n), jnp.bfloat16)
    arrays = jax.block_until_ready((x, w, jnp.array(problem.counts, jnp.int32)))
    products = length(problem)
    runs = ours(arrays, products)
    other, result = from_cupy(arrays, products)
    runs |= other | pallas(problem, arrays, products, points, out)
    lax = jax.jit(jax.lax.ragged_dot)
    wanted, got = lax(*arrays), runs["ours"]()[0]
    runs["cupy"]()
    errors = {"ours": distance(got, wanted), "same bits as cupy": bool((as_words(got) == as_words(result)).all())}
    samples = in_turns(runs, products, rounds)
    samples["ragged_dot"] = [micros(in_flight(lax, arrays, SLOW_CALLS), SLOW_CALLS)]
    us = {name: statistics.median(found) for name, found in samples.items()}
    record = {
        "problem": problem.name, "op": "forward", "dtype": "bfloat16", "groups": problem.groups, "rows": problem.rows,
        "k": problem.k, "n": problem.n, "config": config(), "products": products,
        "ours_over_cupy": over(samples, "ours", "cupy"),
        "ours_schedule_over_cupy_schedule": over(samples, "ours_schedule", "cupy_schedule"),
    }  # fmt: skip
    if best := min((name for name in us if name.startswith("pallas:")), key=lambda name: us[name], default=None):
        record |= {"pallas_us": us[best], "pallas_config": best.removeprefix("pallas:")}
    record |= {f"{name}_us": each for name, each in us.items() if ":" not in name}
    spread = {name: round((max(each) - min(each)) / us[name], 4) for name, each in samples.items()}
    return record | {"spread": spread, "errors": errors, "out": out, "seconds": round(time.monotonic() - began, 2)}


def config() -> str:
    """The tuning point of the product that was prepared last."""
    plans = [launch._plan for launch in _handler._ready.values() if isinstance(launch, _handler.Product)]
    return plans[-1].config.name if plans else ""


def as_words(array: Any) -> Any:
    """The bits of a bfloat16 array of JAX or CuPy, for CuPy."""
    import cupy

    return (array if isinstance(array, cupy.ndarray) else cupy.from_dlpack(array)).view(np.uint16)


def measure_layer(rounds: int) -> dict[str, Any]:
    """The record of a training step of the layer."""
    began, experts, rows = time.monotonic(), len(LAYER_COUNTS), sum(LAYER_COUNTS)
    extents = (rows, HIDDEN), (experts, HIDDEN, 2 * INNER), (experts, INNER, HIDDEN)
    keys = jax.random.split(jax.random.key(1), 3)
    arrays = tuple(jax.random.normal(key, shape, jnp.bfloat16) / 4 for key, shape in zip(keys, extents, strict=True))
    arrays = jax.block_until_ready((*arrays, jnp.array(LAYER_COUNTS, jnp.int32)))
    ours, lax = layer(cupy_gmm.jax.ragged_dot), layer(jax.lax.ragged_dot)
    found, wanted = (jax.tree.leaves(function(*arrays)) for function in (ours, lax))
    errors = {"ours": max(distance(one, other) for one, other in zip(found, wanted, strict=True))}
    samples = in_turns({"ours": in_flight(ours, arrays, LAYER_STEPS)}, LAYER_STEPS, rounds)
    before = time.perf_counter()
    results = [ours(*arrays) for _ in range(LAYER_STEPS)]
    host = (time.perf_counter() - before) / LAYER_STEPS * 1e6
    jax.block_until_ready(results)
    return {
        "problem": "layer", "op": "forward and backward", "dtype": "bfloat16", "groups": experts, "rows": rows,
        "k": HIDDEN, "n": INNER, "config": "", "products": 6,
        "ours_us": statistics.median(samples["ours"]), "host_us": host,
        "ragged_dot_us": micros(in_flight(lax, arrays, SLOW_CALLS), SLOW_CALLS), "errors": errors,
        "seconds": round(time.monotonic() - began, 2),
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
        numbers += [
            r[f"{peer}_us"] / r["ours_us"] if r.get(f"{peer}_us") else None for peer in ("ragged_dot", "pallas")
        ]
        view.add_row(
            r["problem"], r["op"], *(f"{r[f'{name}_us']:.1f}" if r.get(f"{name}_us") else "" for name in names),
            *("" if each is None else f"{each:.3f}" for each in numbers),
            {True: "same", False: "[red]differ[/red]", None: ""}[r["errors"].get("same bits as cupy")],
        )  # fmt: skip
    return view


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = [*(problem.name for problem in shapes.PROBLEMS), "layer"]
    options.add_argument("--problem", action="append", choices=known, help="all when left out")
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--points", type=int, default=1, help="shapes of block to try with pallas, at most 3")
    options.add_argument(
        "--out", type=pathlib.Path, help="where to write the JSON record; rewritten after each problem"
    )
    options.add_argument("--commit", help="where there is no git: the commit of the tree")
    args = options.parse_args()
    console, began = Console(width=200), time.monotonic()
    document: dict[str, Any] = {"run": facts.run(args.commit), "records": []}
    chosen = args.problem or known
    works = [
        lambda each=each: measure(each, args.rounds, args.points) for each in shapes.PROBLEMS if each.name in chosen
    ]
    if "layer" in chosen:
        works.append(lambda: measure_layer(args.rounds))
    for work in works:
        document["records"].append(work())
        jax.clear_caches()  # and the memory of its programs
        document["run"]["seconds"] = round(time.monotonic() - began, 1)
        if args.out is not None:
            args.out.write_text(json.dumps(document, indent=1) + "\n")
        console.print(json.dumps(document["records"][-1]), markup=False, highlight=False)
    console.print(table(document["records"]))


if __name__ == "__main__":
    main()
