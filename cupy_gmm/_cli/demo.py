"""`demo`: one expert layer on real text, forward and backward, checked number by number, timed and drawn."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape

from .. import _device
from ..counts import SETS, Histogram, Machine, describe, tile
from ..errors import ArgumentError, UnsupportedError
from . import figures, source, step, text
from .output import Json, emit, mark, table

_HEIGHTS = (16, 32, 64, 128, 256)

_ON_CPU = step.Sizes(tokens=4096, hidden=256, inner=512, experts=32, top_k=2)
_ON_GPU = step.Sizes(tokens=8192, hidden=2048, inner=1024, experts=64, top_k=4)


def demo(
    text_file: Annotated[
        Path | None,
        typer.Option("--text", help="Text to route, one token a byte; default: Python's own documentation."),
    ] = None,
    counts_file: Annotated[
        str | None,
        typer.Option(
            "--counts",
            help="Replay these counts, scaled to --tokens: a file as for `counts`, or a count set; "
            f"default {SETS[0]}, where the router does not decide.",
        ),
    ] = None,
    at_step: Annotated[int | None, typer.Option("--step", help="Of a count set: the training step to replay.")] = None,
    layer_number: Annotated[int | None, typer.Option("--layer", help="Of a count set: the layer to replay.")] = None,
    router: Annotated[
        bool, typer.Option("--router", help="Replay nothing: a fixed random router decides, as with --text.")
    ] = False,
    tokens: Annotated[int | None, typer.Option(min=1, help="Default 4096; on a GPU 8192.")] = None,
    hidden: Annotated[int | None, typer.Option(min=1, help="Default 256; on a GPU 2048.")] = None,
    inner: Annotated[int | None, typer.Option(min=1, help="Default 512; on a GPU 1024.")] = None,
    experts: Annotated[
        int | None,
        typer.Option(min=1, help="Default: as recorded, else 32, on a GPU 64. Another number calls for the router."),
    ] = None,
    top_k: Annotated[int | None, typer.Option(min=1, help="Experts a token; default 2; on a GPU 4.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of weights, router and gradient.")] = 0,
    cpu: Annotated[bool, typer.Option("--cpu", help="Use the NumPy path even where there is a GPU.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Where the picture goes, .svg or .png; default demo.svg here.")
    ] = None,
    json: Json = False,
) -> None:
    """Run one expert layer on real text, check every number, time it and draw it.

    Each byte of the text is a token. How many tokens each expert receives is replayed from what was recorded
    while the language model of `examples/` trained: by default one layer at an early step, when one expert had
    six times its share and others a row or none. `--step` and `--layer` pick other counts, `--counts` a file of
    yours. With `--text` or `--router` a fixed random router sends each token to its experts instead: counts as
    uneven as language, one expert kept empty and one with a single row, where other libraries have failed.

    Then `expert_ffn` and `expert_ffn_backward` run in bfloat16, on the GPU where there is one and in NumPy
    elsewhere, and a plain loop over the experts in float64 judges the results element by element. Exit code
    1 if one is wrong.
    """
    on_gpu = not cpu and _device.count() > 0
    if router and (counts_file, at_step, layer_number) != (None, None, None):
        raise ArgumentError("`--router` replays no counts: leave it out, or leave out --counts, --step and --layer")
    recorded = _recorded(counts_file, at_step, layer_number, router or text_file is not None, experts)
    asked = {"tokens": tokens, "hidden": hidden, "inner": inner, "experts": experts, "top_k": top_k}
    if recorded is not None:
        asked["experts"] = len(recorded.counts)
    defaults = _ON_GPU if on_gpu else _ON_CPU
    sizes = dataclasses.replace(defaults, **{name: value for name, value in asked.items() if value is not None})
    letters = text.standard_library() if text_file is None else text.read(text_file)
    if len(letters) < sizes.tokens:
        if tokens is not None:
            raise ArgumentError(f"`--tokens` is {tokens}: expected at most {len(letters)}, the bytes of the text")
        sizes = dataclasses.replace(sizes, tokens=len(letters))
    if sizes.top_k > sizes.experts:
        raise ArgumentError(f"`--top-k` is {sizes.top_k}: expected at most {sizes.experts}, the number of experts")

    xp = _gpu_arrays() if on_gpu else np
    layer = step.make(xp, letters[: sizes.tokens], sizes, None if recorded is None else recorded.counts, seed)
    result = step.run(layer, sizes, on_gpu)
    machine = Machine(sms=_device.info(0).sm_count) if on_gpu else Machine()
    heights = [tile(result["counts"], k=sizes.hidden, n=2 * sizes.inner, tile_m=m, machine=machine) for m in _HEIGHTS]
    document = {
        "name": "text" if recorded is None else recorded.name,
        "device": _device.info(0).name if on_gpu else "the CPU (NumPy)",
        "on_gpu": on_gpu,
        "text": text_file or "the standard library's documentation",
        "replayed": None if recorded is None else counts_file or SETS[0],
        "sizes": sizes,
        "seed": seed,
        "skew": describe(result["counts"]),
        "tilings": heights,
        "ok": all(check["ok"] for check in result["checks"]),
        **result,
    }
    try:
        document["picture"] = figures.save(figures.demo(document), plot or Path("demo.svg"))
    except UnsupportedError as error:
        if plot is not None:
            raise
        document["picture"], document["no_picture"] = None, str(error)
    emit(document, json, lambda console: _draw(console, document))
    if not document["ok"]:
        raise typer.Exit(1)


def _recorded(
    name: str | None, at_step: int | None, layer: int | None, routes: bool, experts: int | None
) -> Histogram | None:
    """The histogram to replay; None where the router decides: if it shall, or if another number of experts is wanted
    than the default set has. `routes`: the router shall where no counts are named."""
    if (at_step is None) != (layer is None):
        raise ArgumentError("`--step` and `--layer` go together: the demo replays one layer at one step")
    named = name is not None or at_step is not None
    if routes and not named:
        return None
    name = name or SETS[0]
    picked = ([at_step], [layer]) if at_step is not None and layer is not None else (None, None)
    found = source.histograms(name, *picked)[0]
    if experts in (None, len(found.counts)):
        return found
    if named:
        raise ArgumentError(f"`--experts` is {experts}: expected {len(found.counts)} as in {name}")
    return None


def _gpu_arrays() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise UnsupportedError(
            "There is a GPU, and CuPy cannot be imported "
            f"({error}): pip install 'cupy-gmm[cuda12]' or [cuda13], or pass --cpu"
        ) from error
    return cupy


def _draw(console: Console, document: dict[str, Any]) -> None:
    sizes, skew, timings = document["sizes"], document["skew"], document["timings"]
    replayed = document["replayed"]
    origin = "chosen by a fixed random router"
    if replayed:
        origin = f"replayed from {document['name']}" + ("" if replayed in SETS else f" of {replayed}")
    console.print(
        f"[bold]One expert layer on {document['device']}[/], bfloat16: {sizes.tokens:,} tokens of "
        f"{escape(str(document['text']))},\nhidden {sizes.hidden}, inner {sizes.inner}, {sizes.experts} experts, "
        f"top {sizes.top_k}; experts {escape(origin)}:\n"
        f"{skew.rows:,} rows, {skew.smallest:,} to {skew.largest:,} an expert, "
        f"mean {skew.mean:,.0f}, {skew.empty} empty, Gini {skew.gini:.2f}."
    )
    if replayed in SETS:
        console.print(source.told(replayed))
    caption = "1 or less is right; rounding to bfloat16 takes most of it, so values just below 1 are normal."
    columns = ("quantity", "shape", "type", "worst error / bound", "")
    checks = table("Against a loop over the experts in float64", *columns, caption=caption)
    for check in document["checks"]:
        ratio = check["worst_error_over_bound"]
        shape = " x ".join(map(str, check["shape"]))
        error = "exact" if ratio is None else f"{ratio:.3f}"
        checks.add_row(check["quantity"], shape, check["dtype"], error, mark(check["ok"]))
    console.print(checks)
    unit, factor = ("TFLOP/s", 1e-9) if document["on_gpu"] else ("GFLOP/s", 1e-6)
    times = table(f"Time ({timings['clock']})", "step", "ms", unit)
    for name, products in (("forward", 1), ("backward", 2)):
        ms = timings[f"{name}_ms"]
        times.add_row(name, f"{ms:.3f}", f"{products * document['flop'] / ms * factor:,.1f}")
    console.print(times)
    console.print(f"First call, compiling or reading the kernel cache included: {timings['first_call_s']:.2f} s.")
    useful = ", ".join(f"{tiling.useful:.0%} at {tiling.tile_m}" for tiling in document["tilings"])
    console.print(f"Computed rows that are real, by tile height: {useful}.")
    console.print(f"Picture: {document['picture'] or document['no_picture']}", markup=False)
    console.print("[green]All checks passed.[/]" if document["ok"] else "[bold red]A check failed.[/]")
