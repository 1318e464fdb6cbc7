"""The row-block table of a schedule: its extents, and the launch that fills it. Used by `_plan` and `_schedule`."""

import functools
from dataclasses import dataclass

from . import _device, _launch
from ._heuristics import MOST_PIECES, BlockShape
from ._params import SCHEDULE_FACTS, SCHEDULE_PARAMS, TICKET_WORDS

UNIT = "schedule.cu"
THREADS = 512  # kScheduleThreads
MAX_SHARED_GROUPS = 8192  # more groups take one CTA and global memory
GROUPS_PER_CTA = 64  # a warp ranks four
COUNTER_WORDS = TICKET_WORDS + MOST_PIECES  # of a weight gradient; behind a Schedule's table, from `nbytes` on


@dataclass(frozen=True, slots=True)
class TableShape:
    """What a schedule's table is made for."""

    groups: int
    rows: int
    blocks: BlockShape
    max_blocks: int
    words: int
    nbytes: int  # of the table, rounded up so that what follows in one allocation is aligned


@functools.lru_cache(4096)
def table_shape(groups: int, rows: int, blocks: BlockShape) -> TableShape:
    """The table for `groups` offsets over `rows` rows in blocks of this shape.

    Source:
        kernels/params.cuh.
    """
    max_blocks = rows // blocks.split + groups + 2
    words = 16 + -(-(2 * groups + 1) // 4) * 4 + 4 * max_blocks
    return TableShape(groups, rows, blocks, max_blocks, words, whole(words * 4))


def whole(nbytes: int) -> int:
    """Rounded up to the alignment of an allocation's parts."""
    return -(-nbytes // 256) * 256


def shared_bytes(groups: int, blocks: BlockShape) -> int:
    """Shared memory of `schedule_shared`: bounds in whole 16-byte reads; by height, two words a group besides."""
    return 4 * (-(-(groups + 1) // 4) * 4 + (2 * groups if blocks.by_height else 0))


def fill(
    shape: TableShape, stride: int, wide: bool, group_offset: int, num_groups: int, zeroed_words: int, device: int,
    sizes: bool = False,
) -> _launch.Launcher:  # fmt: skip
    """What fills a table from one kind of offsets, made once.

    Args:
        shape: Of the table.
        stride: Elements between neighbouring offsets.
        wide: Whether the offsets are int64.
        group_offset: That of the host.
        num_groups: Groups with local weights, or UNKNOWN_GROUPS.
        zeroed_words: int32 words that the kernel zeroes besides.
        device: CUDA ordinal.
        sizes: Whether the size of each group comes in place of its end offset.

    Returns:
        To be called with (stream, offs, group_offset, table, zeroed): the CUDA handle of the stream, and the addresses
        of the offsets, of the group offset (0 where the host knows it), of the table, and of the words to zero or 0.
    """
    facts = stride, wide, group_offset, num_groups, zeroed_words, device, sizes
    return _fill(shape.groups, shape.rows, shape.blocks, *facts)


@functools.lru_cache(4096)
def _fill(
    groups: int, rows: int, blocks: BlockShape, stride: int, wide: bool, group_offset: int, num_groups: int,
    zeroed_words: int, device: int, sizes: bool,
) -> _launch.Launcher:  # fmt: skip
    shape = table_shape(groups, rows, blocks)
    facts = SCHEDULE_FACTS.pack(
        stride if groups > 1 else 0,
        groups,
        rows,
        blocks.height,
        blocks.split,
        blocks.granule,
        group_offset,
        num_groups,
        shape.max_blocks,
        zeroed_words,
        wide,
        blocks.by_height,
        sizes,
    )

    def pack(*addresses: int) -> bytes:
        return SCHEDULE_PARAMS.pack(*addresses, facts)

    if groups > MAX_SHARED_GROUPS:
        function = _launch.unit_function(UNIT, "schedule_global", device)
        return _launch.Launcher(_launch.Kernel(function.handle, (1, 1, 1), THREADS, 0), pack)
    function = _launch.unit_function(UNIT, "schedule_shared", device, shared_bytes(MAX_SHARED_GROUPS, blocks))
    work = max(shape.max_blocks // (4 * THREADS), groups // GROUPS_PER_CTA)
    kernel = _launch.Kernel(function.handle, (1 + work, 1, 1), THREADS, shared_bytes(groups, blocks))
    return _launch.Launcher(kernel, pack)


_device.forget_in_child(_fill.cache_clear)
