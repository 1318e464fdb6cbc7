"""Predicts what bounds Hopper's forward kernel on a problem: `python -m bench.queue_model`; needs no GPU.

The tickets of `kernels/sm90/row_queue.cuh` are handed to as many CTAs as there are SMs. A tile takes the longest of its
products on the tensor cores, of its bytes at the rate of whoever loads them, and of all its bytes at the rate of both,
and a store that nothing hides. That the L2 serves all SMs at these rates at once is assumed; it does not serve all of
them at the highest. Printed is the time of the products, spread evenly, over that of the launch: limit /
ours, where the limit is a dense product. `bench/notes/0008-hopper-forward-memory.md` compares it with measured numbers.
"""

import argparse
import dataclasses
import heapq
from collections.abc import Iterator

import numpy as np
from rich.console import Console
from rich.table import Table

from bench import shapes
from bench.shapes import Problem
from cupy_gmm import _config, _heuristics, _table, reference

FMA_PER_CLOCK = 2048  # of the tensor cores of an SM, bf16
TILE_K = 64
STORE_CLOCKS = 1200, 8  # of a tile: in all, and for each token of 256 columns
SPLIT_PER_CTA = 1  # kSplitPerCta
NUM_BLOCKS, LONG_BLOCKS = 0, 8  # words of the table's header: kNumBlocks, kLongBlocks


@dataclasses.dataclass(frozen=True, slots=True)
class Loads:
    """Who loads what, at how many bytes a clock and SM (`python -m bench.ingest`).

    Attributes:
        engine: Of the copy engine.
        threads: Of cp.async.
        both: Of the two together.
        tokens_by_threads: Whether threads copy the tokens.
        short: Up to so many tokens of a wide tile, threads copy half of its weights too.
    """

    engine: float = 53.6
    threads: float = 70.0
    both: float = 90.0
    tokens_by_threads: bool = False
    short: int = 0

    def clocks(self, tokens: int, columns: int, wide: bool) -> float:
        """Of one stage: 64 k of `columns` weights and `tokens` tokens."""
        weights, lines = columns * 2 * TILE_K, tokens * 2 * TILE_K
        copied = lines if self.tokens_by_threads else 0
        copied += weights // 2 if wide and tokens <= self.short else 0
        engine = weights + lines - copied
        return max(engine / self.engine, copied / self.threads, (weights + lines) / self.both)


def tiles(problem: Problem, ctas: int) -> Iterator[list[tuple[int, int]]]:
    """(tokens, columns) of the tiles of each ticket, in the order in which they are handed out."""
    config = next(each for each in _config.configs_of(_config.GROUPED_MM) if isinstance(each, _config.HopperRowsConfig))
    shape, narrow = _heuristics.HOPPER_BLOCKS, config.columns // 2
    table = reference.schedule(np.cumsum(problem.counts), problem.rows, 0, problem.groups, *shape)
    extents = _table.table_shape(problem.groups, problem.rows, shape)
    first = extents.words - 4 * extents.max_blocks
    blocks, longs = table[first : first + 4 * table[NUM_BLOCKS]].reshape(-1, 4), int(table[LONG_BLOCKS])
    panel = _heuristics.panel_tiles(problem.n, config.columns)
    panels = -(-problem.n // (panel * config.columns))
    strips, long_strips = len(blocks) * panels, longs * panels
    whole = strips * panel - SPLIT_PER_CTA * ctas
    for strip in range(strips):
        before = strip * long_strips // strips
        is_long = (strip + 1) * long_strips // strips > before
        nth, among, start = (before, longs, 0) if is_long else (strip - before, len(blocks) - longs, longs)
        rows = int(blocks[start + nth % among][3])
        for column in range(panel):
            left = problem.n - (nth // among * panel + column) * config.columns
            halves = [(rows, narrow) for half in range(2) if left > half * narrow]
            if strip * panel + column >= whole:
                yield from ([half] for half in halves)
            elif rows > config.wide_tokens:
                yield halves
            elif left > 0:
                yield [(rows, config.columns)]


def efficiency(problem: Problem, loads: Loads, ctas: int = 132) -> float:
    """Clocks of all products, spread evenly, over those of the launch."""
    free = [0.0] * ctas
    steps = -(-problem.k // TILE_K)
    for ticket in tiles(problem, ctas):
        clocks = heapq.heappop(free)
        for tokens, columns in ticket:
            products = tokens * columns * TILE_K / FMA_PER_CLOCK
            stage = max(products, loads.clocks(tokens, columns, columns > 128))
            clocks += steps * stage + STORE_CLOCKS[0] + STORE_CLOCKS[1] * tokens * columns / 256
        heapq.heappush(free, clocks)
    return sum(problem.counts) * problem.k * problem.n / FMA_PER_CLOCK / ctas / max(free)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problem", action="append", choices=[each.name for each in shapes.PROBLEMS])
    parser.add_argument("--ctas", type=int, default=132)
    parser.add_argument("--engine", type=float, default=Loads().engine, help="bytes a clock of the copy engine")
    parser.add_argument("--short", type=int, default=96, help="most tokens of a tile that gets weights by threads")
    args = parser.parse_args()
    ways = {
        "all by the engine": Loads(args.engine),
        "tokens by threads": Loads(args.engine, tokens_by_threads=True),
        "and half of a short tile's weights": Loads(args.engine, tokens_by_threads=True, short=args.short),
    }
    table = Table(title="time of the products / time of the launch")
    for column in ("problem", *ways):
        table.add_column(column, justify="left" if column == "problem" else "right")
    for name in args.problem or [each.name for each in shapes.PROBLEMS if "decode" not in each.name]:
        row = [f"{efficiency(shapes.problem(name), loads, args.ctas):.3f}" for loads in ways.values()]
        table.add_row(name, *row)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
