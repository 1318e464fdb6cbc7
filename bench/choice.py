"""Which problems a run takes: those of `bench/shapes.py`, recorded counts that ship, and files of counts, scaled.

The benchmark and the comparison of trees share these options; the report tells the groups apart.
"""

import argparse
import pathlib
from collections.abc import Iterable, Sequence

from bench.shapes import PROBLEMS, Problem
from cupy_gmm.counts import SETS, Histogram, load, scale

GROUPS = ("named", "recorded", "replayed")
# What the recorded set is replayed on, beside the extents of the model it is of: (k, n), and rows.
RECORDED_SHAPE, RECORDED_ROWS = (2048, 2048), (16384, 65536)
# What files of counts are replayed on.
SHAPES, ROWS = ((2048, 2048), (4096, 2048)), (16384, 65536)
MANY = 64  # histograms of one file: more is a whole training run, which nobody means to time


def replayed(histogram: Histogram, rows: int, k: int, n: int) -> Problem:
    """A histogram as a problem, scaled to so many rows."""
    counts = scale(histogram.counts, rows)
    return Problem(f"{histogram.name}-{rows}x{k}x{n}", len(counts), k, n, rows, counts)


def recorded() -> list[Problem]:
    """The telling histograms of the set that ships: as recorded, and scaled to the size of a larger model."""
    found = []
    for each in load(SETS[0]):
        assert each.k is not None, each
        assert each.n is not None, each
        found.append(replayed(each, sum(each.counts), each.k, each.n))
        found += [replayed(each, rows, *RECORDED_SHAPE) for rows in RECORDED_ROWS]
    return found


def histograms(source: str) -> list[Histogram]:
    """Those of a file, of all JSON files of a folder, or the telling ones of a set that ships.

    Raises:
        ValueError: There are none, or far too many.
    """
    folder = pathlib.Path(source)
    if source in SETS or not folder.is_dir():
        found = load(source)
        if len(found) > MANY:
            raise ValueError(f"{source} has {len(found)} histograms, of which at most {MANY} can be timed in a run")
        return found
    files = sorted(folder.glob("*.json"))
    if not files:
        raise ValueError(f"{source} has no JSON files: expected a folder with files of counts, or one such file")
    return [each for path in files for each in histograms(str(path))]


def chosen(
    names: Iterable[str] | None = None,
    counts: Iterable[str] = (),
    groups: Sequence[str] = GROUPS,
    rows: Iterable[int] = ROWS,
    shapes: Iterable[tuple[int, int]] = SHAPES,
) -> list[Problem]:
    """Problems by name, from any group; with no names, all of `groups`.

    Args:
        names: Which to take.
        counts: Sources of the group "replayed": see `histograms`.
        groups: Some of `GROUPS`.
        rows: To how many the group "replayed" is scaled.
        shapes: (k, n) of the group "replayed".

    Raises:
        ValueError: No such problem, two of one name, or nothing to replay.
    """
    sizes = [(total, k, n) for k, n in shapes for total in rows]
    replays = [replayed(each, *size) for source in counts for each in histograms(source) for size in sizes]
    by_name: dict[str, Problem] = {}
    everything = {"named": PROBLEMS, "recorded": recorded(), "replayed": replays}
    for problem in (each for group in everything.values() for each in group):
        if by_name.setdefault(problem.name, problem) != problem:
            raise ValueError(f"two problems are called {problem.name}: give the histograms names of their own")
    if unknown := [name for name in names or () if name not in by_name]:
        raise ValueError(f"no problem is called {', '.join(unknown)}; there are {', '.join(by_name)}")
    wanted = set(names or (each.name for group in groups for each in everything[group]))
    if not wanted:
        raise ValueError("nothing to time: the group replayed takes its counts from --counts, a file or a folder")
    return [each for name, each in by_name.items() if name in wanted]


# ---- the options of a command


def shape(text: str) -> tuple[int, int]:
    """KxN, as 4096x2048."""
    k, n = text.split("x")
    return int(k), int(n)


def add_options(parser: argparse.ArgumentParser, groups: Sequence[str]) -> None:
    """Options for `of`; `groups` are what is taken by default."""
    add = parser.add_argument
    add("--problem", action="append", help="name of a problem, of any group; otherwise all of --group")
    add("--group", action="append", choices=GROUPS, help=f"problems to take; by default {', '.join(groups)}")
    add(
        "--counts", action="append", default=[],
        help="recorded counts to replay: a file, a folder of JSON files, or the name of a count set",
    )  # fmt: skip
    add("--rows", action="append", type=int, help=f"scale them to so many rows; by default {_words(ROWS)}")
    add("--shape", action="append", type=shape, metavar="KxN", help=f"of them; by default {_words(SHAPES)}")
    parser.set_defaults(default_groups=groups)


def of(args: argparse.Namespace) -> list[Problem]:
    """What the options ask for; raises as `chosen` and `load` do, whose errors are `ValueError` too."""
    groups = args.group or args.default_groups
    return chosen(args.problem, args.counts, groups, args.rows or ROWS, args.shape or SHAPES)


def _words(values: Iterable[int | tuple[int, int]]) -> str:
    return " and ".join("x".join(map(str, each)) if isinstance(each, tuple) else str(each) for each in values)
