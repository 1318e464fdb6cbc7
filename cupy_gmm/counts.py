"""Expert counts: record, load, scale, replay and describe them; tile and wave arithmetic.

A histogram is the number of rows that each expert received, one whole number a group. Everything here is
host arithmetic in Python integers, so no histogram is too large for it; nothing here knows a device.

A count set holds the histograms of many steps and layers. Those named in `SETS` ship with the package:
`load("moe-example")` gives a few telling histograms of one, `load_set("moe-example")` all of it.
"""

import dataclasses
import math
from typing import Any

import numpy as np

from ._count_sets import SETS, CountSet, load, load_set
from ._histogram import Histogram, Recorder, check, whole
from .errors import ArgumentError

__all__ = [
    "SETS",
    "CountSet",
    "Histogram",
    "Machine",
    "Recorder",
    "Skew",
    "Tiling",
    "balance",
    "check",
    "describe",
    "load",
    "load_set",
    "rank_rows",
    "replay",
    "scale",
    "tile",
]


@dataclasses.dataclass(frozen=True, slots=True)
class Skew:
    """How uneven a histogram is. `gini` is 0 for equal groups and near 1 when one group has all rows;
    `effective_groups` is exp(entropy): how many equal groups would be as spread out as these."""

    groups: int
    rows: int
    empty: int
    smallest: int
    largest: int
    mean: float
    max_over_mean: float
    gini: float
    effective_groups: float


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """What the cost model knows of a GPU; the defaults are one hot H200, as measured.

    `l2_tb_s` is what all SMs together take in from L2, each reading a part of its own (bench/results/ingest-h200.json).
    """

    sms: int = 132
    tflops: float = 650.0
    bandwidth_tb_s: float = 4.3
    l2_tb_s: float = 8.8


@dataclasses.dataclass(frozen=True, slots=True)
class Tiling:
    """A histogram cut into tiles of one shape, and what that is predicted to cost (see `tile`).

    The `loop_` fields are of one launch a group instead: launches, their whole waves, tiles of the smallest.
    """

    tile_m: int
    tile_n: int
    row_blocks: int
    tiles: int
    waves: float
    whole_waves: int
    computed_rows: int
    useful: float
    relative_time_by_tiles: float
    relative_time_by_whole_waves: float
    loop_launches: int
    loop_whole_waves: int
    loop_smallest_launch: int
    flop: int
    flop_us: float
    tile_math_us: float
    tile_load_us: float
    waves_us: float
    bytes_us: float
    predicted_us: float


def scale(counts: Any, rows: int) -> tuple[int, ...]:
    """Scale a histogram to `rows` rows in all, by largest remainder (ties go to the lower index).

    Args:
        counts: as for `check`.
        rows: total of the result, >= 0.

    Returns:
        A histogram with the same number of groups, whose sum is exactly `rows`; an empty group stays empty.

    Raises:
        ArgumentError: `rows` is negative, or there is no row to scale up from.
    """
    values, rows = check(counts), whole("rows", rows, 0)
    total = sum(values)
    if total == 0:
        if rows:
            raise ArgumentError(f"`counts` has no rows in {len(values)} groups: cannot be scaled to {rows} rows")
        return values
    out = [value * rows // total for value in values]
    by_remainder = sorted(range(len(values)), key=lambda g: (-(values[g] * rows % total), g))
    for group in by_remainder[: rows - sum(out)]:
        out[group] += 1
    return tuple(out)


def balance(groups: int, rows: int) -> tuple[int, ...]:
    """Spread `rows` rows over `groups` groups as evenly as whole numbers allow."""
    return scale((1,) * whole("groups", groups, 1), rows)


def replay(counts: Any, top_k: int, *, seed: int = 0) -> np.ndarray:
    """Make expert ids that give exactly these counts: recorded imbalance, any data.

    Each expert's rows lie on consecutive tokens, so that no token meets an expert twice while
    every count is at most the number of tokens; then the tokens are shuffled.

    Args:
        counts: as for `check`; the sum must be a multiple of `top_k`.
        top_k: experts a token goes to, >= 1.
        seed: of the shuffle.

    Returns:
        expert_idx, int32 NumPy array (sum(counts) / top_k, top_k).

    Raises:
        ArgumentError: the sum is no multiple of `top_k`; scale the counts first.
    """
    values, top_k = check(counts), whole("top_k", top_k, 1)
    tokens, rest = divmod(sum(values), top_k)
    if rest:
        raise ArgumentError(
            f"`counts` sum to {sum(values)} rows: expected a multiple of top_k = {top_k}; "
            f"pass `scale(counts, {tokens * top_k})`"
        )
    experts = np.repeat(np.arange(len(values), dtype=np.int32), values).reshape(top_k, tokens).T
    return np.ascontiguousarray(np.random.default_rng(seed).permutation(experts))


def describe(counts: Any) -> Skew:
    """Measure how uneven a histogram is.

    Args:
        counts: as for `check`.

    Returns:
        A `Skew`; with no rows at all it reads as perfectly even.
    """
    values = sorted(check(counts))
    groups, rows = len(values), sum(values)
    mean = rows / groups
    shares = [value / rows for value in values if value]
    ranked = sum(rank * value for rank, value in enumerate(values, start=1))
    return Skew(
        groups=groups,
        rows=rows,
        empty=values.count(0),
        smallest=values[0],
        largest=values[-1],
        mean=mean,
        max_over_mean=values[-1] / mean if rows else 1.0,
        gini=(2 * ranked - (groups + 1) * rows) / (groups * rows) if rows else 0.0,
        effective_groups=math.exp(-sum(share * math.log(share) for share in shares)) if rows else float(groups),
    )


def rank_rows(counts: Any, ranks: int) -> tuple[int, ...]:
    """Rows that each of `ranks` devices receives when experts are dealt out in equal runs of neighbours."""
    values, ranks = check(counts), whole("ranks", ranks, 1)
    out = [0] * ranks
    for group, value in enumerate(values):
        out[group * ranks // len(values)] += value
    return tuple(out)


def tile(counts: Any, *, k: int, n: int, tile_m: int, tile_n: int = 128, machine: Machine | None = None) -> Tiling:
    """Cut a histogram into output tiles of tile_m x tile_n and predict what they cost.

    Group g has ceil(M_g / tile_m) row blocks, each with ceil(n / tile_n) tiles; `sms` tiles make a wave.
    Both relative times are against the same rows spread evenly over the same groups: by tiles (a perfect
    spread over the SMs) and by whole waves (every SM waits for the last tile).
    The predicted time is a model, no measurement: max(whole waves x time of a tile, bytes / bandwidth). A
    tile takes the longer of its products on one SM's share of `tflops` and its operand bytes through one
    SM's share of L2; `bytes` are x and y once and the weights of the groups in use once, 2 an element.

    Args:
        counts: as for `check`.
        k: length of the reduction, >= 0.
        n: columns of the output, >= 0.
        tile_m: rows of a tile, >= 1.
        tile_n: columns of a tile, >= 1.
        machine: what the model knows of the GPU; default an H200.

    Returns:
        A `Tiling`; times in microseconds. Without rows, `useful` and the relative times are 1.

    Raises:
        ArgumentError: an extent that is no whole number in its range, or a rate that is not above 0.
    """
    values, gpu = check(counts), machine or Machine()
    k, n = whole("k", k, 0), whole("n", n, 0)
    tile_m, tile_n, sms = whole("tile_m", tile_m, 1), whole("tile_n", tile_n, 1), whole("sms", gpu.sms, 1)
    for rate in ("tflops", "bandwidth_tb_s", "l2_tb_s"):
        if not getattr(gpu, rate) > 0:
            raise ArgumentError(f"`{rate}` is {getattr(gpu, rate)!r}: expected a number above 0")
    rows, columns = sum(values), -(-n // tile_n)
    group_tiles = [-(-value // tile_m) * columns for value in values]
    tiles = sum(group_tiles)
    even_tiles = sum(-(-value // tile_m) for value in balance(len(values), rows)) * columns
    row_blocks, whole_waves = sum(-(-value // tile_m) for value in values), -(-tiles // sms)
    tile_math_us = 2 * tile_m * tile_n * k / (gpu.tflops / sms * 1e6)
    tile_load_us = 2 * (tile_m + tile_n) * k / (gpu.l2_tb_s / sms * 1e6)
    waves_us = whole_waves * max(tile_math_us, tile_load_us)
    used_weights = sum(value > 0 for value in values) * k * n
    bytes_us = 2 * (rows * (k + n) + used_weights) / (gpu.bandwidth_tb_s * 1e6)
    return Tiling(
        tile_m=tile_m,
        tile_n=tile_n,
        row_blocks=row_blocks,
        tiles=tiles,
        waves=tiles / sms,
        whole_waves=whole_waves,
        computed_rows=row_blocks * tile_m,
        useful=rows / (row_blocks * tile_m) if rows else 1.0,
        relative_time_by_tiles=tiles / even_tiles if even_tiles else 1.0,
        relative_time_by_whole_waves=whole_waves / -(-even_tiles // sms) if even_tiles else 1.0,
        loop_launches=sum(value > 0 for value in values),
        loop_whole_waves=sum(-(-each // sms) for each in group_tiles),
        loop_smallest_launch=min((each for each in group_tiles if each), default=0),
        flop=2 * rows * k * n,
        flop_us=2 * rows * k * n / (gpu.tflops * 1e6),
        tile_math_us=tile_math_us,
        tile_load_us=tile_load_us,
        waves_us=waves_us,
        bytes_us=bytes_us,
        predicted_us=max(waves_us, bytes_us),
    )
