"""Which tuning point a call gets, from what the host knows without asking the device. Pure; golden-tested.

The row counts of single groups are on the device; the host knows their mean, rows / groups.
"""

from typing import NamedTuple

from ._config import CONFIGS, HOPPER, RESERVED_SHARED_BYTES, Config, configs_of
from .errors import ArgumentError


class BlockShape(NamedTuple):
    """How a schedule cuts groups into row blocks.

    Attributes:
        height: Most rows of a block; a group of at most so many stays whole.
        split: Most rows of a block of a longer group.
        granule: Blocks of one group differ by at most so many rows.
        by_height: Blocks of groups no shorter than the mean stand first, then those of the others, the highest of
            each first. Otherwise blocks stand in the order of their groups' ids.
    """

    height: int
    split: int
    granule: int
    by_height: bool


# (mean rows a group up to, shape) of the portable path. A tile's work is skipped 16 rows a warp at a time, two warps
# along the rows.
# perf: bench/notes/0001-portable-forward.md
PORTABLE = ((24, BlockShape(16, 16, 16, False)), (96, BlockShape(64, 64, 32, False)))
TALLEST = BlockShape(128, 128, 32, False)

# wgmma takes any multiple of 8 tokens at no extra cost; the accumulators of 256 columns allow 208 of them.
# perf: bench/notes/0006-hopper-wide-tiles.md
HOPPER_BLOCKS = BlockShape(256, 208, 16, True)

# Columns that are walked together through all row blocks, so that their weights stay in L2.
# perf: bench/notes/0001-portable-forward.md
PANEL_COLUMNS = 2048

# A weight gradient whose tiles number fewer than this per group splits long groups into so many pieces in all.
# perf: bench/notes/0002-portable-weight-gradient.md
SPLIT_TILES = 256
SHORTEST_PIECE = 1024
MOST_PIECES = 4 * SPLIT_TILES // 3  # tiles of all pieces: a group makes at most four thirds of what its rows would fill


def block_shape(rows: int, groups: int, arch: str) -> BlockShape:
    """The row blocks of a schedule: fixed by rows, groups and architecture alone, so that all products over the same
    rows share it.

    Args:
        rows: Rows of x.
        groups: Groups in `offs`.
        arch: Architecture of the device, "sm_90"; anything else on the CPU.
    """
    return HOPPER_BLOCKS if arch == HOPPER else portable_block_shape(rows, groups)


def portable_block_shape(rows: int, groups: int) -> BlockShape:
    """The row blocks of the portable kernels, whose tiles are as high as the blocks."""
    mean = rows / max(groups, 1)
    for most, shape in PORTABLE:
        if mean <= most:
            return shape
    return TALLEST


def choose_forward(
    rows: int, groups: int, n: int, any_stride: bool, copy_engine: bool, arch: str, smem_limit: int
) -> Config:
    """The tuning point of a forward product or input gradient.

    Args:
        rows: Rows of x.
        groups: Groups in `offs`.
        n: Columns of y.
        any_stride: An operand has no 16-byte access.
        copy_engine: Hopper's copy engine can read the operands.
        arch: Architecture of the device.
        smem_limit: Shared memory bytes that one CTA may use.
    """
    if any_stride:
        return CONFIGS["any-128x64"]
    if arch == HOPPER and copy_engine:
        return CONFIGS["hopper-256x208"]
    height = portable_block_shape(rows, groups).height
    if height <= 16:
        return CONFIGS["16x128"]
    if height <= 64:
        return CONFIGS["64x128"]
    narrow, wide = CONFIGS["128x128"], CONFIGS["128x256"]
    # Wide tiles read each row of x half as often, and narrow outputs would leave most of one empty; but two CTAs on an
    # SM are better still.
    # perf: bench/notes/0001-portable-forward.md
    both_fit = 2 * narrow.shared_bytes + RESERVED_SHARED_BYTES <= smem_limit
    if n > 128 and not both_fit and wide.why_illegal(arch, smem_limit, False) is None:
        return wide
    return narrow


def choose_wgrad(k: int, n: int, any_stride: bool, copy_engine: bool, arch: str) -> Config:
    """The tuning point of a weight gradient of (k, n) matrices. Arguments as in `choose_forward`."""
    if any_stride:
        return CONFIGS["wgrad-any-64x64"]
    if arch == HOPPER and copy_engine:
        return CONFIGS["hopper-wgrad-pingpong-128x192"]
    return CONFIGS["wgrad-64x64"] if k <= 64 or n <= 64 else CONFIGS["wgrad-128x128"]


def forced(name: object, op: str) -> Config:
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


def panel_tiles(n: int, tile_n: int) -> int:
    """Column tiles of one panel: panels of nearly the same width.

    Args:
        n: Columns of the result.
        tile_n: Columns of a tile.
    """
    tiles = max(1, -(-n // tile_n))
    panels = -(-tiles // max(1, PANEL_COLUMNS // tile_n))
    return -(-tiles // panels)
