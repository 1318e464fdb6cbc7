"""Plan: everything about a call that does not change while shapes, strides and options stay: one look-up when warm."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import _compile, _device, _heuristics, _launch, _tensormap
from ._config import GROUPED_MM, RESERVED_SHARED_BYTES, Config, HopperRowsConfig, WgmmaConfig, configs_of
from ._params import (
    ACCUMULATE,
    BOX_STORE,
    OUTPUT_TYPES,
    PARAMS_FACTS,
    TICKET_BYTES,
    TICKET_WORDS,
    VECTOR_STORE,
    WHOLE_COLUMN_BLOCKS,
    params_struct,
)
from ._problem import Problem
from ._table import TableShape, table_shape, whole
from ._variants import STRIDED, Variant, layouts
from .errors import ArgumentError, UnsupportedError

MAX_TICKETS = 0x7FFFFFFF
REGISTERS_PER_SM = 65536
THREADS_PER_SM = 1536  # the smallest limit among the portable architectures


@dataclass(frozen=True, slots=True)
class Plan:
    """One product, ready but for addresses.

    Attributes:
        idle: There is nothing to compute, and so nothing to launch.
        launch: To be called with (stream, a, b, c, table, tickets, partials, status): the CUDA handle of the stream,
            and the addresses of x, of w or dy, of the result, of the schedule, of `zeroed_words` that are zero, of
            `partial_bytes` of scratch, and of the word that findings go to or 0.
        zeroed_words: int32 words that must be zero at launch: the ticket counter and, for splits, arrivals.
        zeroed_bytes: Their place in the scratch, rounded up.
        partial_bytes: Scratch for the accumulators of split groups.
    """

    problem: Problem
    config: Config
    table: TableShape
    idle: bool
    launch: _launch.Launcher
    zeroed_words: int
    zeroed_bytes: int
    partial_bytes: int

    @property
    def restores(self) -> bool:
        """Whether the kernel leaves its counters as it found them, so that they may be those of the Schedule."""
        return isinstance(self.config, WgmmaConfig)

    @property
    def counters(self) -> int:
        """Where a Schedule's table has the counters of this product, in bytes from its beginning."""
        return TICKET_BYTES if isinstance(self.config, HopperRowsConfig) else self.table.nbytes


def build(problem: Problem, groups: int, table: TableShape | None, config: str | None, device: int) -> Plan:
    """Chooses, compiles and loads the kernel of `problem`.

    Args:
        problem: The call.
        groups: Length of `offs`.
        table: That of the Schedule that the caller made, or None when one is made for this call.
        config: Name of a forced tuning point.
        device: CUDA ordinal.

    Raises:
        ArgumentError: The forced point cannot run this call.
        UnsupportedError: More tiles than tickets.
        CompileError: The kernel could not be made.
    """
    facts = _device.info(device)
    chosen = _choose(problem, groups, config, facts)
    if table is None:
        table = _own_table(problem, groups, chosen)
    tiles = _tiles(problem, chosen)
    tickets = _tickets(problem, table, chosen, tiles)
    chunk, slots = _pieces(problem, tiles)
    if tickets + slots * tiles >= MAX_TICKETS:
        raise UnsupportedError(f"the call has {tickets} output tiles, more than {MAX_TICKETS}: split it into several.")
    boxes = isinstance(chosen, HopperRowsConfig) and _tensormap.can_store(problem)
    variant = Variant(chosen, problem.dtype, *_layouts(problem, chosen), boxes)
    zeroed, partial_bytes = _scratch(chosen, tiles, slots)
    function, registers = _load(variant, device)
    resident = resident_ctas(chosen, registers, facts.smem_per_sm)
    grid = min(tickets + slots * tiles, resident * facts.sm_count)
    kernel = _launch.Kernel(function.handle, (grid, 1, 1), chosen.threads, chosen.shared_bytes)
    pack = _packer(problem, chosen, _facts(problem, table, chosen, chunk, slots))
    return Plan(
        problem=problem,
        config=chosen,
        table=table,
        idle=grid == 0,
        launch=_launch.Launcher(kernel, pack),
        zeroed_words=zeroed,
        zeroed_bytes=whole(zeroed * 4),
        partial_bytes=partial_bytes,
    )


def most_scratch(problem: Problem, config: str | None) -> int:
    """Bytes of tickets and partial sums that a launch of `problem` needs at most, whatever the device.

    Args:
        problem: The call.
        config: Name of a forced tuning point.

    Raises:
        ArgumentError: No such point for this operation.
    """
    points = configs_of(problem.op) if config is None else [_heuristics.forced(config, problem.op)]
    most = 0
    for point in points:
        tiles = _tiles(problem, point)
        zeroed, partial_bytes = _scratch(point, tiles, _pieces(problem, tiles)[1])
        most = max(most, whole(zeroed * 4) + partial_bytes)
    return most


def _pieces(problem: Problem, tiles: int) -> tuple[int, int]:
    """Rows of a piece of a split group, and how many pieces there can be.

    A group is split from one and a half pieces on, and so makes at most four thirds of what its rows would fill.
    """
    chunk = _heuristics.split_chunk(problem.rows, tiles) if problem.op != GROUPED_MM else 0
    return chunk, 4 * problem.rows // (3 * chunk) if 0 < chunk < problem.rows else 0


def _scratch(config: Config, tiles: int, slots: int) -> tuple[int, int]:
    """Words that must be zero at launch, and bytes of partial sums."""
    return TICKET_WORDS + slots * tiles * config.consumers, slots * tiles * config.tile_m * config.tile_n * 4


@functools.cache
def _load(variant: Variant, device: int) -> tuple[Any, int]:
    """The kernel on the device and the registers of its threads; the disk is asked once, not once a plan."""
    facts = _device.info(device)
    cubin = _compile.compile_source(variant.text(), variant.config.target(facts.arch), variant.symbol)
    function = _compile.load(cubin, device).function(variant.symbol, variant.config.shared_bytes)
    return function, cubin.resources[variant.symbol].registers


_device.forget_in_child(_load.cache_clear)


def _own_table(problem: Problem, groups: int, config: Config) -> TableShape:
    """The table of a call that makes its own: blocks as high as the tiles at most."""
    if isinstance(config, WgmmaConfig):
        blocks = _heuristics.HOPPER_BLOCKS
    else:
        blocks = _heuristics.portable_block_shape(problem.rows, groups)
        if problem.op == GROUPED_MM and blocks.height > config.tile_m:
            height = config.tile_m
            blocks = blocks._replace(height=height, split=height, granule=min(blocks.granule, height))
    return table_shape(groups, problem.rows, blocks)


def resident_ctas(config: Config, registers: int, smem_per_sm: int) -> int:
    """CTAs of `config` that fit one SM at a time."""
    by_registers = REGISTERS_PER_SM // (-(-registers // 8) * 8 * config.threads)
    by_shared = smem_per_sm // (config.shared_bytes + RESERVED_SHARED_BYTES)
    return max(1, min(by_registers, by_shared, THREADS_PER_SM // config.threads))


def _choose(problem: Problem, groups: int, config: str | None, facts: _device.Device) -> Config:
    impossible = _tensormap.why_impossible(problem)
    if config is not None:
        forced = _heuristics.forced(config, problem.op)
        reason = forced.why_illegal(facts.arch, facts.smem_per_block_optin, problem.any_stride)
        if isinstance(forced, WgmmaConfig) and impossible:
            reason = reason or f"its operands come through the copy engine, and {impossible}"
        if reason is not None:
            raise ArgumentError(
                f'`config` is "{config}", which cannot run this call: {reason}; pass None to let it choose.'
            )
        return forced
    if problem.op == GROUPED_MM:
        return _heuristics.choose_forward(
            problem.rows,
            groups,
            problem.n,
            problem.any_stride,
            impossible is None,
            facts.arch,
            facts.smem_per_block_optin,
        )
    return _heuristics.choose_wgrad(problem.k, problem.n, problem.any_stride, impossible is None, facts.arch)


def _layouts(problem: Problem, config: Config) -> tuple[str, str]:
    """Operand layouts to compile for: those of the problem, or element loads for all."""
    if not config.vectorised:
        return STRIDED, STRIDED
    return next(pair for pair in layouts(config) if pair[1] == problem.b_layout)


def _tiles(problem: Problem, config: Config) -> int:
    """Column tiles of y, or tiles of one group's weight gradient."""
    columns = -(-problem.n // config.tile_n)
    return columns if problem.op == GROUPED_MM else columns * -(-problem.k // config.tile_m)


def _tickets(problem: Problem, table: TableShape, config: Config, tiles: int) -> int:
    """Most tickets that a launch hands out before it splits groups."""
    if problem.op != GROUPED_MM:
        return tiles * problem.groups
    if isinstance(config, HopperRowsConfig):  # whole panels, of which the last may reach past n; tiles come in halves
        panel = _heuristics.panel_tiles(problem.n, config.tile_n)
        return 2 * -(-tiles // panel) * panel * table.max_blocks
    return tiles * table.max_blocks * -(-table.blocks.height // config.tile_m)


def _packer(problem: Problem, config: Config, facts: bytes) -> Callable[..., bytes]:
    """From the addresses of a launch to the kernel's argument; `facts` is the part of Params behind the pointers."""
    maps = _tensormap.maps(problem, config) if isinstance(config, WgmmaConfig) else None
    pack = params_struct(0 if maps is None else maps.nbytes).pack

    def packed(a: int, b: int, c: int, table: int, tickets: int, partials: int, status: int) -> bytes:
        encoded = b"" if maps is None else maps.encoded(a, b, c)
        return pack(encoded, a, b, c, table, tickets, status, partials, facts)

    return packed


def _facts(problem: Problem, table: TableShape, config: Config, chunk: int, slots: int) -> bytes:
    flags = (VECTOR_STORE if problem.vector_store else 0) | (ACCUMULATE if problem.accumulate else 0)
    flags |= WHOLE_COLUMN_BLOCKS if _tensormap.whole_column_blocks(problem) else 0
    flags |= BOX_STORE if _tensormap.can_store(problem) else 0
    return PARAMS_FACTS.pack(
        *problem.a_strides,
        *problem.b_strides,
        *problem.c_strides,
        problem.rows,
        problem.k,
        problem.n,
        problem.groups,
        table.groups,
        table.max_blocks,
        table.blocks.height,
        _heuristics.panel_tiles(problem.n, config.tile_n),
        max(chunk, 1),
        OUTPUT_TYPES[problem.out_dtype],
        flags,
        slots,
    )
