"""The pictures of the command line, with matplotlib: counts and tiles, and what the demo found.

Called by the command files, which import it only when a picture is wanted. An SVG follows the reader's
light or dark theme where the viewer knows the media query, and is a light picture elsewhere.
"""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError, UnsupportedError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SUFFIXES = (".svg", ".png")
# Blue, vermilion, green, amber, purple, cyan, of Okabe and Ito's palette, each readable on white and on
# near black.
_COLOURS = ("#2a7fc1", "#d55e00", "#009e73", "#c98a00", "#b0639b", "#3a9fc9")
# So many histograms have a colour, or a colour and a dash, of their own.
_FEW = 2 * len(_COLOURS)
_INK, _FAINT, _PAPER = "#1f2328", "#d1d9e0", "#ffffff"
_DARK = {_INK: "#e6edf3", _FAINT: "#3d444d", _PAPER: "#0d1117"}


def save(figure: "Figure", path: Path) -> Path:
    """Write the figure as .svg or .png; return the full path.

    Raises:
        ArgumentError: another ending, or a folder that cannot be written.
    """
    suffix = path.suffix.lower()
    if suffix not in _SUFFIXES:
        raise ArgumentError(f"The picture {path} has the ending {suffix or 'of no format'!r}: use .svg or .png")
    import matplotlib

    buffer, metadata = io.BytesIO(), {"Date": None, "Creator": "cupy_gmm"} if suffix == ".svg" else {}
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "cupy_gmm"}):
        figure.savefig(buffer, format=suffix[1:], dpi=150, metadata=metadata)
    data = _follow_theme(buffer.getvalue()) if suffix == ".svg" else buffer.getvalue()
    try:
        path.write_bytes(data)
    except OSError as error:
        raise ArgumentError(f"The picture {path} cannot be written: {error.strerror}; name another place") from error
    return path.resolve()


def histograms(reports: Sequence[dict[str, Any]]) -> "Figure":
    """Rows of each expert, sorted and relative to the mean, beside the useful rows of each tile height.

    A few histograms have a colour each; of many, such as the steps of a training run, the spread is drawn.
    """
    figure, (left, right) = _canvas(f"Rows per expert: {len(reports)} histogram{'s' * (len(reports) > 1)}", 2)
    many = len(reports) > _FEW
    widths = {each["skew"].groups for each in reports}
    for index, each in enumerate(reports):
        mean = each["skew"].mean or 1.0
        ordered = sorted((count / mean for count in each["counts"]), reverse=True)
        spots = [(i + 0.5) * 100 / len(ordered) for i in range(len(ordered))]
        if many:
            left.plot(spots, ordered, color=_COLOURS[0], linewidth=0.8, alpha=0.35)
            continue
        dash = ("-", "--")[index // len(_COLOURS)]
        dots = {"marker": "o", "markersize": 2.5} if len(ordered) <= 64 else {}
        colour = _COLOURS[index % len(_COLOURS)]
        left.plot(spots, ordered, dash, color=colour, linewidth=1.8, label=each["name"], **dots)
    left.set_yscale("symlog", linthresh=0.1, linscale=0.4)
    left.yaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    top = 1.5 * max(each["skew"].max_over_mean for each in reports)
    left.set(xlim=(0, 100), ylim=(0, top))
    steps = [10.0**power * step for power in range(-1, 6) for step in (1, 2, 5)]
    left.set_yticks([0, *(step for step in steps if step < top)], minor=False)
    left.minorticks_off()
    _mean_line(left, 1, "mean")
    size = f"of {widths.pop()} experts" if len(widths) == 1 else "of experts"
    _label(left, "Busiest experts first", f"share {size}, %", "rows of the expert / mean (log scale)")
    if many:
        _useful_spread(right, reports)
        return figure
    _useful(right, reports)
    legend = {"loc": "outside lower center", "frameon": False, "labelcolor": _INK, "fontsize": 9}
    figure.legend(*left.get_legend_handles_labels(), ncols=min(len(reports), 4), **legend)
    return figure


def demo(document: dict[str, Any]) -> "Figure":
    """Rows of each expert, what tiles make of them, and each quantity's worst error against its bound."""
    skew, counts = document["skew"], document["counts"]
    title = f"One expert layer on {document['device']}: {skew.rows:,} rows to {skew.groups} experts"
    title += f", counts of {document['name']}" if document["replayed"] else ""
    figure, (left, middle, right) = _canvas(title, 3)
    left.bar(range(len(counts)), counts, width=0.85, color=_COLOURS[0])
    _mean_line(left, skew.mean, f"mean {skew.mean:,.0f}")
    left.set_xlim(-0.6, len(counts) - 0.4)
    left.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    empties = f"{skew.empty} empty, " if skew.empty else ""
    _label(left, f"Uneven: {empties}max / mean {skew.max_over_mean:.1f}", "expert", "rows")
    _useful(middle, [document])
    _errors(right, [each for each in document["checks"] if each["worst_error_over_bound"] is not None])
    return figure


def _errors(axes: "Axes", checks: Sequence[dict[str, Any]]) -> None:
    values = [min(each["worst_error_over_bound"], 2.0) for each in checks]
    colours = [_COLOURS[2] if each["ok"] else _COLOURS[1] for each in checks]
    axes.barh([each["quantity"] for each in checks], values, color=colours, height=0.6)
    for index, each in enumerate(checks):
        text = f"{each['worst_error_over_bound']:.3f}"
        axes.text(max(values[index], 1) + 0.03, index, text, color=_INK, va="center", fontsize=8.5)
    axes.axvline(1, color=_COLOURS[1], linewidth=1.2)
    axes.set_xlim(0, max(1.0, *values) + 0.25)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    wrong = sum(not each["ok"] for each in checks)
    verdict = f"{wrong} of {len(checks)} beyond the bound" if wrong else "every error within its bound"
    _label(axes, f"Checked: {verdict}", "worst error / bound  (right of the line is wrong)", "")


def _mean_line(axes: "Axes", height: float, text: str) -> None:
    axes.axhline(height, color=_INK, linewidth=0.9, linestyle=":")
    box = {"facecolor": _PAPER, "edgecolor": "none", "pad": 1.2, "alpha": 0.85}
    # In axes coordinates across, so that it stands at the right edge whatever the scale.
    across = axes.get_yaxis_transform()
    axes.text(0.995, height, text, transform=across, color=_INK, ha="right", va="bottom", fontsize=8, bbox=box)


def _useful(axes: "Axes", reports: Sequence[dict[str, Any]]) -> None:
    width = 0.8 / len(reports)
    for index, each in enumerate(reports):
        shares = [100 * tiling.useful for tiling in each["tilings"]]
        spots = [i + (index - (len(reports) - 1) / 2) * width for i in range(len(shares))]
        colour, alpha = _COLOURS[index % len(_COLOURS)], 0.6 ** (index // len(_COLOURS))
        bars = axes.bar(spots, shares, width=width * 0.92, color=colour, alpha=alpha)
        if len(reports) <= 3:
            axes.bar_label(bars, [f"{share:.0f} %" for share in shares], fontsize=8, color=_INK, padding=2)
    _useful_axes(axes, reports, "What a tile height wastes")


def _useful_spread(axes: "Axes", reports: Sequence[dict[str, Any]]) -> None:
    shares = [sorted(100 * each["tilings"][i].useful for each in reports) for i in range(len(reports[0]["tilings"]))]
    middles = [each[len(each) // 2] for each in shares]
    below = [middle - each[0] for middle, each in zip(middles, shares, strict=True)]
    above = [each[-1] - middle for middle, each in zip(middles, shares, strict=True)]
    axes.bar(range(len(shares)), middles, width=0.6, color=_COLOURS[0])
    axes.errorbar(range(len(shares)), middles, (below, above), fmt="none", ecolor=_INK, capsize=5)
    _useful_axes(axes, reports, "What a tile height wastes: median, worst and best")


def _useful_axes(axes: "Axes", reports: Sequence[dict[str, Any]], title: str) -> None:
    heights = [str(tiling.tile_m) for tiling in reports[0]["tilings"]]
    axes.set_xticks(range(len(heights)), heights)
    axes.set_ylim(0, 112)
    axes.set_yticks(range(0, 101, 20))
    axes.grid(axis="x", visible=False)
    _label(axes, title, "tile height, rows", "computed rows that are real, %")


def _label(axes: "Axes", title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=10.5, loc="left", color=_INK)
    axes.set_xlabel(x, fontsize=9, color=_INK)
    axes.set_ylabel(y, fontsize=9, color=_INK)


def _canvas(title: str, panels: int) -> tuple["Figure", Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnsupportedError("A picture needs matplotlib: pip install 'cupy-gmm[cli]'") from error
    figure = Figure(figsize=(5.2 * panels, 4.4), layout="constrained", facecolor=_PAPER)
    figure.suptitle(title, fontsize=12.5, x=0.01, ha="left", color=_INK, weight="bold")
    axes = figure.subplots(1, panels)
    for each in axes:
        each.set_facecolor(_PAPER)
        each.set_axisbelow(True)
        each.grid(color=_FAINT, linewidth=0.7)
        each.tick_params(colors=_INK, labelsize=8.5, length=3)
        each.spines[["top", "right"]].set_visible(False)
        each.spines[["left", "bottom"]].set_color(_INK)
    return figure, axes


def _follow_theme(svg: bytes) -> bytes:
    """Add a style sheet that swaps ink, grid and paper on a dark page; colours elsewhere stay as they are."""
    rules = "".join(
        f'[style*="{kind}: {light}"]{{{kind}:{dark} !important}}'
        for light, dark in _DARK.items()
        for kind in ("fill", "stroke")
    )
    style = f"<style>@media (prefers-color-scheme: dark){{{rules}}}</style>".encode()
    start = svg.index(b">", svg.index(b"<svg")) + 1
    return svg[:start] + style + svg[start:]
