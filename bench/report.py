"""The table and the verdict of a measured run: `python -m bench.report bench/results/FILE.json`.

`bench.products` prints with it as well. It reads records only: no GPU, no torch.
"""

import argparse
import dataclasses
import json
import pathlib
import statistics
from collections.abc import Callable, Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

from bench import choice
from bench.shapes import PROBLEMS

Record = dict[str, Any]
PEERS = ("torch", "loop", "pallas", "quack", "ragged_dot")
NAMED = tuple(each.name for each in PROBLEMS)
UNEVEN = tuple(each.name for each in PROBLEMS if len(set(each.counts)) > 1)
DECODE_ROWS = 1024  # at most as many rows: the bytes of the weights are all that counts
LEVEL = 0.99  # "not slower" in one run
FACTS = {"device": "", "driver": "driver", "nvrtc": "NVRTC", "commit": "commit", "kernels": "kernels"}
OURS = ("ours", "ours_schedule")  # with a Schedule made before; building the table in every call


def ratio(record: Record, top: str, bottom: str = "ours") -> float | None:
    """Time of one contender over another's; None where one has none."""
    over, under = record.get(f"{top}_us"), record.get(f"{bottom}_us")
    return over / under if over and under else None


def ratios(records: Iterable[Record], top: str, bottom: str = "ours") -> dict[str, float]:
    """The ratio by problem, where there is one."""
    found = {record["problem"]: ratio(record, top, bottom) for record in records}
    return {name: each for name, each in found.items() if each is not None}


def geomean(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.geometric_mean(found) if found else None


def of(records: Iterable[Record], op: str, names: Iterable[str] | None = None) -> list[Record]:
    chosen = None if names is None else set(names)
    return [each for each in records if each["op"] == op and (chosen is None or each["problem"] in chosen)]


# ---- the verdict


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """One number that a run is judged by.

    Attributes:
        text: What it is.
        bar: What it must reach.
        values: The number in the two ways to call us (`OURS`); None where it was not measured.
        least: Whether the bar is a lower bound.
        where: The problem that decides, where it is an extreme.
    """

    text: str
    bar: float
    values: tuple[float | None, float | None]
    least: bool = True
    where: str = ""

    @property
    def met(self) -> bool | None:
        value = self.values[0]
        return None if value is None else value >= self.bar if self.least else value <= self.bar


def _line(text: str, bar: float, number: Callable[[str], float | None], least: bool = True, where: str = "") -> Line:
    return Line(text, bar, (number(OURS[0]), number(OURS[1])), least, where)


def _extreme(text: str, bar: float, found: Callable[[str], dict[str, float]]) -> Line:
    """The worst of a set of problems, by name."""
    with_schedule = found(OURS[0])
    where = min(with_schedule, key=lambda name: with_schedule[name]) if with_schedule else ""
    return _line(text, bar, lambda ours: min(found(ours).values(), default=None), where=where)


def _peers(records: list[Record], text: str) -> list[Line]:
    """The worst ratio to each peer that was timed."""
    timed = [peer for peer in PEERS if any(record.get(f"{peer}_us") for record in records)]
    return [
        _extreme(f"{text}: {peer} / ours, each", LEVEL, lambda ours, peer=peer: ratios(records, peer, ours))
        for peer in timed
    ]


def decode_fraction(records: Iterable[Record], ours: str = "ours") -> dict[str, float]:
    """Share of the copy bandwidth that decode sizes reach."""
    small = [record for record in records if record["rows"] <= DECODE_ROWS]
    return ratios(small, "bytes", ours)


def verdict(records: list[Record]) -> list[Line]:
    """Every number that closes the forward product and the weight gradient, on the named problems."""
    forward, named_uneven = of(records, "forward", NAMED), of(records, "forward", UNEVEN)
    gradient = of(records, "weight-gradient", NAMED)
    us = {record["problem"]: record for record in forward}

    def skewed(ours: str) -> float | None:
        both = [us.get(name, {}).get(f"{ours}_us") for name in ("skewed", "balanced")]
        return both[0] / both[1] if all(both) else None

    return [
        _line("forward: limit / ours, geometric mean", 0.92, lambda o: geomean(ratios(forward, "limit", o).values())),
        _extreme("forward: limit / ours, each", 0.80, lambda o: ratios(forward, "limit", o)),
        _line(
            "forward: torch / ours on uneven counts, geometric mean",
            1.40,
            lambda o: geomean(ratios(named_uneven, "torch", o).values()),
        ),
        *_peers(forward, "forward"),
        _line("forward: skewed / balanced", 1.10, skewed, least=False),
        _extreme("forward: decode, share of the copy bandwidth", 0.93, lambda o: decode_fraction(forward, o)),
        _line(
            "weight gradient: torch / ours, geometric mean",
            1.50,
            lambda o: geomean(ratios(gradient, "torch", o).values()),
        ),
        _extreme("weight gradient: torch / ours, each", 1.30, lambda o: ratios(gradient, "torch", o)),
        *_peers(gradient, "weight gradient"),
    ]


def verdict_view(records: list[Record]) -> Table:
    view = Table(title="verdict (first number: with a Schedule; second: table built in every call)")
    for column in ("number", "bar", "found", "with offsets", ""):
        view.add_column(column, justify="left" if column in ("number", "") else "right")
    for line in verdict(records):
        word = {None: "not measured", True: "met", False: "[red]missed[/red]"}[line.met]
        numbers = ["" if value is None else f"{value:.3f}" for value in line.values]
        bar = f"{'>=' if line.least else '<='} {line.bar:.2f}"
        view.add_row(line.text + (f" ({line.where})" if line.where else ""), bar, *numbers, word)
    return view


def summary_view(records: list[Record]) -> Table:
    """Geometric mean and minimum of limit / ours and torch / ours, by product and set of problems."""
    recorded = {each.name for each in choice.recorded()}
    replayed = {record["problem"] for record in records} - recorded.union(NAMED)
    sets = {"named": NAMED, "named, uneven": UNEVEN, "recorded": recorded, "replayed": replayed}
    view = Table(title="geometric mean (minimum)")
    for column in ("product", "problems", "limit / ours", "torch / ours", "best peer / ours"):
        view.add_column(column, justify="left" if column in ("product", "problems") else "right")
    for op in dict.fromkeys(record["op"] for record in records):
        for label, names in sets.items():
            chosen = of(records, op, names)
            if not chosen:
                continue
            best = [min(each) for each in (list(peer_ratios(record).values()) for record in chosen) if each]
            cells = [list(ratios(chosen, top).values()) for top in ("limit", "torch")] + [best]
            numbers = [f"{geomean(cell):.3f} ({min(cell):.3f})" if cell else "" for cell in cells]
            view.add_row(op, f"{label} ({len(chosen)})", *numbers)
    return view


# ---- the table


def peer_ratios(record: Record) -> dict[str, float]:
    """Time of each peer over ours."""
    found = {peer: ratio(record, peer) for peer in PEERS}
    return {peer: each for peer, each in found.items() if each is not None}


def table(records: list[Record]) -> Table:
    """One row a problem and product: roofs, peers, ours, ratios, what was chosen, the card's clock."""
    peers = [peer for peer in PEERS if any(f"{peer}_us" in record for record in records)]
    view = Table(title="microseconds (median); ratios above 1 mean that ours is faster")
    left = ("problem", "op", "config")
    for column in (
        "problem", "op", "dense", "bytes", *peers, "ours", "+table", "limit/ours", "torch/ours", "peer/ours", "config",
        "MHz", "W",
    ):  # fmt: skip
        view.add_column(column, justify="left" if column in left else "right", no_wrap=column in left)
    for r in records:
        micros = [r.get(f"{name}_us") for name in ("dense", "bytes", *peers, "ours", "ours_schedule")]
        best = peer_ratios(r)
        numbers = [ratio(r, "limit"), ratio(r, "torch"), min(best.values(), default=None)]
        forced = [f"{name}: {us:.0f}" for name, us in r.get("forced_us", {}).items()]
        view.add_row(
            r["problem"], r["op"],
            *("" if us is None else f"{us:.0f}" for us in micros),
            *("" if each is None else f"{each:.3f}" for each in numbers),
            "\n".join([r["config"] or "", *forced]),
            *(f"{r[name]:.0f}" if r.get(name) else "" for name in ("sm_mhz", "watts")),
        )  # fmt: skip
    return view


def absences(records: list[Record]) -> list[str]:
    """Who took no part, or came out wrong, and where."""
    where: dict[tuple[str, str], list[str]] = {}
    for record in records:
        for name, reason in record.get("out", {}).items():
            where.setdefault((name, reason), []).append(f"{record['problem']} {record['op']}")
    several = {
        key: places if len(places) < 4 else [*places[:2], f"{len(places) - 2} more"] for key, places in where.items()
    }
    return [f"{name}: {reason} ({', '.join(places)})" for (name, reason), places in several.items()]


def show(document: dict[str, Any], console: Console) -> None:
    """Prints all of a document."""
    records, run = document["records"], document["run"]
    console.print(table(records))
    for text in absences(records):
        console.print(f"  without {text}", markup=False, highlight=False)
    console.print(summary_view(records))
    console.print(verdict_view(records))
    copy = run.get("copy_bytes_per_s")
    facts = [f"{word} {run[name]}" for name, word in FACTS.items() if run.get(name)]
    console.print(", ".join(facts + ([f"copy {copy / 1e12:.2f} TB/s"] if copy else [])), markup=False)
    host = {name: f"{us:.1f}" for name, us in run.items() if name.startswith("host_")}
    if host:
        console.print(", ".join(f"{name} {us}" for name, us in host.items()), markup=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=pathlib.Path, nargs="+", help="JSON of a run; records of several are joined")
    parser.add_argument("--width", type=int, default=200)
    args = parser.parse_args()
    documents = [json.loads(path.read_text()) for path in args.file]
    document = documents[0] | {"records": [record for each in documents for record in each["records"]]}
    show(document, Console(width=args.width))


if __name__ == "__main__":
    main()
