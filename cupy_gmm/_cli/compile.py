"""`compile`: fill the kernel cache ahead of time; needs NVRTC, and no GPU."""

import dataclasses
import os
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Annotated, Any

import typer
from rich.console import Console

from .. import _cache, _compile, _device, _env, _nvrtc, _variants
from ..errors import ArgumentError, CompileError
from .output import Json, emit, mark, progress, table


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What one compile gave: the worst of its kernels in each column, or the error."""

    name: str
    arch: str
    kernels: int = 0
    registers: int = 0
    spill_bytes: int = 0
    static_smem: int = 0
    cubin_bytes: int = 0
    seconds: float = 0.0
    error: str | None = None


def compile_kernels(
    arch: Annotated[
        list[str] | None,
        typer.Option(help="Such as sm_90; give it several times. Default: the GPUs here, else all that ship."),
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Compiles at a time; default: as many as cores.")] = None,
    json: Json = False,
) -> None:
    """Compile every kernel for given architectures and keep the results, so that no first call has to wait.

    Works without a GPU: while a container image is built, or on a login node. What the cache holds already
    is only read. Prints the registers of each kernel and its spills, which are to be 0. Exit code 1 if one
    does not compile.
    """
    wanted = list(dict.fromkeys(arch or _default()))
    if unknown := [each for each in wanted if each.removesuffix("a") not in _device.PORTABLE]:
        raise ArgumentError(f"`--arch` is {unknown[0]!r}: expected one of {', '.join(_device.PORTABLE)}")
    nvrtc, started = _nvrtc.version(), time.perf_counter()
    work = [item for each in wanted for item in _variants.sources(each.removesuffix("a"))]
    outcomes = []
    with ThreadPoolExecutor(jobs or os.cpu_count()) as pool, progress("compiling", len(work)) as advance:
        for future in as_completed([pool.submit(_one, *item) for item in work]):
            outcomes.append(future.result())
            advance(f"{outcomes[-1].name} for {outcomes[-1].arch}")
    order = {(name, each): index for index, (name, _, each) in enumerate(work)}
    outcomes.sort(key=lambda each: order[each.name, each.arch])
    document = {
        "nvrtc": nvrtc,
        "cache": _env.cache_dir(),
        "cache_problem": _cache.problem(),
        "seconds": time.perf_counter() - started,
        "variants": outcomes,
        "ok": all(each.error is None for each in outcomes),
    }
    emit(document, json, lambda console: _draw(console, document))
    if not document["ok"]:
        raise typer.Exit(1)


def _default() -> list[str]:
    return [_device.info(ordinal).arch for ordinal in range(_device.count())] or list(_device.PORTABLE)


def _one(name: str, text: str, arch: str) -> Outcome:
    started = time.perf_counter()
    try:
        cubin = _compile.compile_source(text, arch, name)
    except CompileError as error:
        return Outcome(name, arch, error=str(error))
    found = cubin.resources.values()
    return Outcome(
        name,
        arch,
        kernels=len(found),
        registers=max((each.registers for each in found), default=0),
        spill_bytes=sum(each.spill_bytes for each in found),
        static_smem=max((each.static_smem for each in found), default=0),
        cubin_bytes=len(cubin.image),
        seconds=time.perf_counter() - started,
    )


def _draw(console: Console, document: dict[str, Any]) -> None:
    outcomes = document["variants"]
    columns = "variant|arch|kernels|registers|spilled\nbytes|static\nshared|cubin KB|s|".split("|")
    caption = "Registers, static shared memory: the largest of the variant's kernels. 0.0 s: it was in the cache."
    rows = table(f"Kernels, compiled by NVRTC {document['nvrtc']}", *columns, caption=caption)
    for each in outcomes:
        numbers = (each.kernels, each.registers, each.spill_bytes, each.static_smem, each.cubin_bytes >> 10)
        rows.add_row(each.name, each.arch, *map(str, numbers), f"{each.seconds:.1f}", mark(each.error is None))
    console.print(rows)
    for each in outcomes:
        if each.error is not None:
            console.print(f"{each.name} for {each.arch}: {each.error}", markup=False)
    console.print(f"{len(outcomes)} variants in {document['seconds']:.1f} s.")
    if document["cache_problem"] is None:
        console.print(f"Cache: {document['cache']}", markup=False)
    else:
        console.print(f"Nothing was kept: {document['cache_problem']}", markup=False)
