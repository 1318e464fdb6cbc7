"""`counts`: describe and plot recorded histograms; the arithmetic is in `cupy_gmm.counts`."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..counts import SETS, Histogram, Machine, describe, rank_rows, scale, tile
from . import source
from .output import Json, emit, table

# Of a file with more histograms than this, the tables show only the worst, the middle and the best.
_MANY = 12
_DEFAULT = Machine()


def counts(
    files: Annotated[
        list[str] | None,
        typer.Argument(
            help='JSON: {"counts": [3, 0, 5]}, a bare list, or a list of either, one a step; an .npz of steps and '
            f"layers; or a count set that ships: {', '.join(SETS)}, the default."
        ),
    ] = None,
    steps: Annotated[
        list[int] | None, typer.Option("--step", help="Of a count set: this training step; give it several times.")
    ] = None,
    layers: Annotated[
        list[int] | None, typer.Option("--layer", help="Of a count set: this layer; give it several times.")
    ] = None,
    k: Annotated[int | None, typer.Option(help="Reduction length; default: the file's, else 4096.")] = None,
    n: Annotated[int | None, typer.Option(help="Columns of the output; default: the file's, else 2048.")] = None,
    rows: Annotated[
        int | None, typer.Option(help="Scale each histogram to this many rows (largest remainder).")
    ] = None,
    sms: Annotated[int, typer.Option(help="SMs of the GPU: so many tiles make a wave.")] = _DEFAULT.sms,
    tile_m: Annotated[
        list[int] | None, typer.Option(help="Tile height; give it several times. Default 64, 128 and 256.")
    ] = None,
    tile_n: Annotated[int, typer.Option(help="Tile width.")] = 128,
    ranks: Annotated[int, typer.Option(help="Also say how uneven the load is over this many GPUs.")] = 1,
    tflops: Annotated[float, typer.Option(help="Model: TFLOP/s of a dense product.")] = _DEFAULT.tflops,
    bandwidth: Annotated[float, typer.Option(help="Model: memory, TB/s.")] = _DEFAULT.bandwidth_tb_s,
    l2_bandwidth: Annotated[float, typer.Option(help="Model: L2 to all SMs, TB/s.")] = _DEFAULT.l2_tb_s,
    plot: Annotated[Path | None, typer.Option(help="Write a picture: .svg or .png.")] = None,
    every: Annotated[
        bool,
        typer.Option("--all", help="Show every histogram of a long file, not only worst, middle and best."),
    ] = False,
    json: Json = False,
) -> None:
    """Say what uneven expert counts cost: useful rows, tiles, waves, predicted time.

    An expert's rows are cut into blocks of the tile's height, and its last block is computed whole:
    **useful** is the share of computed rows that are real. A GPU runs one tile an SM at a time, so the
    tiles come in **waves**, and all wait for the last one. Times are relative to the same rows spread
    evenly, by tiles and by whole waves.

    The predicted time is a simple model (`cupy_gmm.counts.tile` documents it), good for comparing tile
    heights; measure before you decide.

    With no file it shows a few histograms of **moe-example**, counts that were recorded while the language
    model of `examples/` trained; `--step` and `--layer` pick others. They are called NAME-sSTEP-lLAYER.
    """
    machine = Machine(sms, tflops, bandwidth, l2_bandwidth)
    heights = tile_m or [64, 128, 256]
    reports: list[dict[str, Any]] = []
    for path in files or SETS[:1]:
        found = []
        for item in source.histograms(path, steps, layers):
            values = item.counts if rows is None else scale(item.counts, rows)
            depth, width = (_first(k, item.k, 4096), _first(n, item.n, 2048))
            found.append(_report(item, values, depth, width, heights, tile_n, machine))
            busiest = max(rank_rows(values, ranks)) * ranks / sum(values) if any(values) else 1.0
            found[-1] |= {"ranks": ranks, "busiest_rank_over_mean": busiest}
        reports += [dict(each, file=path) for each in found]
    document: dict[str, Any] = {"machine": machine, "histograms": reports}
    if plot is not None:
        from . import figures

        document["picture"] = figures.save(figures.histograms(reports), plot)
    emit(document, json, lambda console: _draw(console, document, every))


def _report(
    item: Histogram,
    values: tuple[int, ...],
    k: int,
    n: int,
    heights: list[int],
    tile_n: int,
    machine: Machine,
) -> dict[str, Any]:
    return {
        "name": item.name,
        "k": k,
        "n": n,
        "counts": values,
        "skew": describe(values),
        "tilings": [tile(values, k=k, n=n, tile_m=m, tile_n=tile_n, machine=machine) for m in heights],
    }


def _worst_middle_best(reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    by_waste = sorted(reports, key=lambda each: each["tilings"][0].useful)
    return [by_waste[0], by_waste[len(by_waste) // 2], by_waste[-1]]


def _first(*values: int | None) -> int:
    return next(value for value in values if value is not None)


def _draw(console: Console, document: dict[str, Any], every: bool) -> None:
    machine, reports, notes = document["machine"], [], []
    for file in dict.fromkeys(each["file"] for each in document["histograms"]):
        found = [each for each in document["histograms"] if each["file"] == file]
        if len(found) > _MANY and not every:
            notes.append(f"{file}: the worst, middle and best of {len(found)} are shown; --all shows all.")
            found = _worst_middle_best(found)
        if file in SETS:
            notes.append(source.told(file))
        reports += found
    if "picture" in document:
        notes.append(f"Picture: {document['picture']}")
    for drawn in (_skews(reports), _tiles(reports, machine), _loops(reports, machine)):
        console.print(drawn)
    for note in notes:
        console.print(note, markup=False)


def _skews(reports: list[dict[str, Any]]) -> Table:
    columns = "histogram|experts|rows|empty|min|mean|max|max/mean|Gini|effective\nexperts".split("|")
    caption = "Gini: 0 all equal, 1 one has all. Effective experts: so many equal ones would spread as widely."
    ranks = reports[0]["ranks"]
    if ranks > 1:
        columns.append(f"busiest of\n{ranks} GPUs/mean")
    out = table("How uneven", *columns, caption=caption)
    for each in reports:
        skew = each["skew"]
        cells = [
            escape(each["name"]), str(skew.groups), f"{skew.rows:,}", str(skew.empty), f"{skew.smallest:,}",
            f"{skew.mean:,.1f}", f"{skew.largest:,}", f"{skew.max_over_mean:.2f}", f"{skew.gini:.3f}",
            f"{skew.effective_groups:.1f}",
        ]  # fmt: skip
        out.add_row(*cells, *([f"{each['busiest_rank_over_mean']:.2f}"] if ranks > 1 else []))
    return out


def _tiles(reports: list[dict[str, Any]], machine: Machine) -> Table:
    columns = (
        "histogram|tile\nheight|row\nblocks|tiles|waves|whole\nwaves|computed\nrows|useful|time by\ntiles|"
        "time by\nwaves|predicted\nus"
    )
    caption = (
        "Times by tiles and by whole waves: against the same rows spread evenly, same tile.\n"
        f"Predicted: a model, {machine.tflops:g} TFLOP/s, {machine.bandwidth_tb_s:g} TB/s from memory, "
        f"{machine.l2_tb_s:g} TB/s from L2; * the fastest by it."
    )
    width = reports[0]["tilings"][0].tile_n
    out = table(f"Cut into tiles, {width} columns wide, on {machine.sms} SMs", *columns.split("|"), caption=caption)
    for each in reports:
        fastest = min(tiling.predicted_us for tiling in each["tilings"])
        for index, tiling in enumerate(each["tilings"]):
            star = "*" if tiling.predicted_us == fastest and len(each["tilings"]) > 1 else " "
            out.add_row(
                "" if index else escape(each["name"]), str(tiling.tile_m), f"{tiling.row_blocks:,}",
                f"{tiling.tiles:,}", f"{tiling.waves:,.1f}", f"{tiling.whole_waves:,}",
                f"{tiling.computed_rows:,}", f"{tiling.useful:.0%}", f"{tiling.relative_time_by_tiles:.2f}x",
                f"{tiling.relative_time_by_whole_waves:.2f}x", f"{tiling.predicted_us:,.0f} {star}",
            )  # fmt: skip
        out.add_section()
    return out


def _loops(reports: list[dict[str, Any]], machine: Machine) -> Table:
    columns = f"histogram|K|N|GFLOP|ms at\n{machine.tflops:g} TFLOP/s|launches|whole\nwaves|SMs of the\nsmallest"
    first = reports[0]["tilings"][0]
    caption = f"Waves and SMs: tiles of {first.tile_m} x {first.tile_n}; each launch waits for its last wave."
    out = table("The work, and a loop of one launch an expert", *columns.split("|"), caption=caption)
    for each in reports:
        first = each["tilings"][0]
        filled = min(first.loop_smallest_launch, machine.sms)
        out.add_row(
            escape(each["name"]), str(each["k"]), str(each["n"]), f"{first.flop / 1e9:,.4g}",
            f"{first.flop_us / 1e3:.3g}", f"{first.loop_launches:,}", f"{first.loop_whole_waves:,}",
            f"{filled} of {machine.sms}",
        )  # fmt: skip
    return out
