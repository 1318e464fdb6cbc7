"""Which tuning point a call gets, from what the host knows without asking the device. Pure; golden-tested.

The row counts of single groups are on the device; the host knows their mean, rows / groups.
"""

from ._config import CONFIGS, GROUPED_MM, WGRAD, TileConfig, configs_of
from .errors import ArgumentError

# (mean rows a group up to, block height, granule). A block is as high as its tile; blocks of one group differ by at
# most one granule, and a tile's work is skipped 16 rows a warp at a time, two warps along the rows.
# perf: bench/notes/0001-portable-forward.md
HEIGHTS = ((24, 16, 16), (96, 64, 32))
TALLEST = (128, 32)

# Columns that are walked together through all row blocks, so that their weights stay in L2.
# perf: bench/notes/0001-portable-forward.md
PANEL_COLUMNS = 2048

# A weight gradient whose tiles number fewer than this per group splits long groups into so many pieces in all.
# perf: bench/notes/0002-portable-weight-gradient.md
SPLIT_TILES = 256
SHORTEST_PIECE = 1024


def block_height(rows: int, groups: int) -> tuple[int, int]:
    """(height, granule) of the row blocks of a schedule: fixed by rows and groups alone, so that all products share it.

    Args:
        rows: Rows of x.
        groups: Groups in `offs`.
    """
    mean = rows / max(groups, 1)
    for most, height, granule in HEIGHTS:
        if mean <= most:
            return height, granule
    return TALLEST


def granule_of(height: int) -> int:
    """Granule of a given block height."""
    for _, known, granule in HEIGHTS:
        if known == height:
            return granule
    return TALLEST[1] if height >= 32 else 16


def choose_forward(height: int, n: int, needs_any_stride: bool, smem_limit: int) -> TileConfig:
    """The tuning point of a forward product or input gradient.

    Args:
        height: Rows of the schedule's highest block.
        n: Columns of y.
        needs_any_stride: An operand has no 16-byte access.
        smem_limit: Shared memory bytes that one CTA may use.
    """
    if needs_any_stride:
        return CONFIGS["any-128x64"]
    if height <= 16:
        return CONFIGS["16x128"]
    if height <= 64:
        return CONFIGS["64x128"]
    wide = CONFIGS["128x256"]
    # Wide tiles read each row of x half as often; narrow outputs would leave most of one empty.
    if n > 128 and wide.why_illegal(smem_limit, False, height) is None:
        return wide
    return CONFIGS["128x128"]


def choose_wgrad(k: int, n: int, needs_any_stride: bool) -> TileConfig:
    """The tuning point of a weight gradient of (k, n) matrices."""
    if needs_any_stride:
        return CONFIGS["wgrad-any-64x64"]
    return CONFIGS["wgrad-64x64"] if k <= 64 or n <= 64 else CONFIGS["wgrad-128x128"]


def forced(name: object, op: str) -> TileConfig:
    """The shipped point called `name`.

    Raises:
        ArgumentError: No such point for this operation; those that exist are named.
    """
    names = ", ".join(f'"{config.name}"' for config in configs_of(op))
    config = CONFIGS.get(name) if isinstance(name, str) else None
    if config is None or config.op != op:
        raise ArgumentError(f"`config` is {name!r}: expected one of {names}, or None to let {op} choose.")
    return config


def split_chunk(rows: int, tiles_per_group: int) -> int:
    """Rows of one piece when a long group's weight gradient is split; `rows` or more means never.

    Fixed by the shapes alone, so that the bits do not depend on the device.

    Args:
        rows: Rows of x.
        tiles_per_group: Output tiles of one group.
    """
    if tiles_per_group >= SPLIT_TILES:
        return max(rows, 1)
    ideal = -(-rows * tiles_per_group // SPLIT_TILES)
    return max(SHORTEST_PIECE, -(-ideal // 64) * 64)


def panel_tiles(tile_n: int) -> int:
    """Column tiles of one panel."""
    return max(1, PANEL_COLUMNS // tile_n)


__all__ = [
    "GROUPED_MM",
    "WGRAD",
    "block_height",
    "choose_forward",
    "choose_wgrad",
    "forced",
    "granule_of",
    "panel_tiles",
    "split_chunk",
]
