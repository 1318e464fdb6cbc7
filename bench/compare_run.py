"""The processes of `bench.compare` that use the GPU: `check` tries one variant, `time` takes turns among several.

Each prints one JSON line for every problem and product as soon as it has it, so that a process that crashes or is
stopped leaves what it had.
"""

import functools
import json
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

from bench import timing, trees, work
from bench.peers import cublas
from bench.shapes import Problem

REPEATS = 10  # calls of a check whose bits must agree


def put(record: dict[str, Any]) -> None:
    print(json.dumps(record), flush=True)


def works(job: dict[str, Any]) -> Iterator[work.Work]:
    for fields in job["problems"]:
        for op in job["ops"]:
            yield work.make(Problem(**fields), op, job["device"])
            torch.cuda.empty_cache()


def variants(job: dict[str, Any]) -> list[trees.Variant]:
    return [trees.Variant(**fields) for fields in job["variants"]]


def contender(library: ModuleType, found: work.Work, config: str | None, offsets: bool) -> Callable[[Any], Any]:
    """Our call, taking `out`; with a Schedule made before, or building the table in every call."""
    offs = found.offs if offsets else library.make_schedule(found.offs, found.problem.rows)
    return lambda out: work.call_of(library, found, offs, out=out, config=config)


def check(job: dict[str, Any], index: int) -> None:
    """Runs one variant on poisoned outputs: error over bound, and the same bits in every call."""
    variant = variants(job)[index]
    library = trees.load(variant, "cupy_gmm_variant")
    for found in works(job):
        record: dict[str, Any] = {"problem": found.problem.name, "op": found.op}
        try:
            call = contender(library, found, variant.config, job["offsets"])
            out, again = found.poisoned(), found.poisoned()
            call(out)
            error = found.error(out)
            differs = torch.zeros((), dtype=torch.bool, device=out.device)
            for _ in range(REPEATS):
                again.fill_(torch.nan)
                call(again)
                differs |= (again.view(torch.int16) != out.view(torch.int16)).any()
            record["error"] = float(error)
            if not record["error"] <= 1:
                record["why"] = f"wrong: error over bound {record['error']:.3g}"
            elif bool(differs):
                record["why"] = "not the same bits in every call"
        except Exception as error:
            record["why"] = f"{type(error).__name__}: {error}"[:400]
        put(record)


def time(job: dict[str, Any], fit: dict[str, list[int]]) -> None:
    """Times the variants that passed, by problem and product, interleaved with dense and torch."""
    everything = variants(job)
    used = sorted({index for indices in fit.values() for index in indices})
    libraries = {index: trees.load(everything[index], f"cupy_gmm_variant{index}") for index in used}
    timing.heat(timing.FIRST_HOT_SECONDS)
    put({"copy_bytes_per_s": timing.copy_bandwidth()})
    for found in works(job):
        key = f"{found.problem.name} {found.op}"
        contenders = {"dense": cublas.dense(found), "torch": cublas.grouped(found)}
        out, wrong = found.poisoned(), {}
        for index in fit.get(key, []):
            call = contender(libraries[index], found, everything[index].config, job["offsets"])
            out.fill_(torch.nan)
            call(out)
            error = float(found.error(out))
            if error <= 1:
                contenders[str(index)] = functools.partial(call, out)
            else:
                wrong[index] = f"wrong beside the others: error over bound {error:.3g}"
        times = timing.interleaved(contenders, job["rounds"])
        put(
            {
                "problem": found.problem.name,
                "op": found.op,
                "bytes": work.moved_bytes(found.problem, found.op),
                "us": times.medians(),
                "spread": {name: times.spread(name) for name in contenders},
                "wrong": wrong,
            }
        )


def main() -> None:
    task, job = sys.argv[1], json.loads(sys.argv[2])
    if task == "check":
        check(job, int(sys.argv[3]))
    else:
        time(job, json.loads(sys.argv[3]))


if __name__ == "__main__":
    main()
