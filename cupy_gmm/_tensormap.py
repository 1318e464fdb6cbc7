"""Tensor maps: what Hopper's copy engine must know of an operand. Encoded once an address, then cached."""

import ctypes
from dataclasses import dataclass

from . import _device, _recent
from ._config import (
    ELEMENT_BYTES,
    GROUPED_MM,
    TILE_K,
    VECTOR_BYTES,
    HopperRowsConfig,
    PingpongConfig,
    WgmmaConfig,
)
from ._problem import Problem
from ._variants import K_MAJOR, MN_MAJOR

MAP_BYTES = 128
ADDRESS_BYTES = 8  # of a map, in front
PINGPONG_NARROW = 128  # columns of a narrow tile; kNarrow in sm90/config.cuh
MAX_STRIDE_BYTES = 1 << 40
MAX_RAGGED_STRIDE_BYTES = 1 << 34
RAGGED = 1 << 30  # kRagged; RAGGED * 2^34 = 2^64


@dataclass(frozen=True, slots=True)
class MapShape:
    """A tensor map without its address. Innermost axis first; the innermost stride is one element.

    Attributes:
        dtype: "bfloat16" or "float16".
        extents: Elements along each axis.
        strides: Bytes between neighbours along every axis but the innermost.
        box: Elements that one copy takes along each axis.
    """

    dtype: str
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]

    def encode(self, address: int) -> bytes:
        """The 128 bytes of a CUtensorMap.

        Raises:
            CompileError: The driver refuses it, with CUDA's name for the reason.
        """
        api = _device.driver()
        kinds = api.CUtensorMapDataType
        kind = (
            kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
            if self.dtype == "bfloat16"
            else kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16
        )
        rank = len(self.extents)
        # perf: no L2 promotion: it makes no difference
        # (bench/notes/0003-hopper-forward.md).
        encoded = _device.check(
            api.cuTensorMapEncodeTiled(
                kind,
                rank,
                address,
                [api.cuuint64_t(extent) for extent in self.extents],
                [api.cuuint64_t(stride) for stride in self.strides],
                [api.cuuint32_t(extent) for extent in self.box],
                [api.cuuint32_t(1)] * rank,
                api.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
                api.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
                api.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_NONE,
                api.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            ),
            f"encoding a tensor map of {self}",
        )
        return ctypes.string_at(encoded.getPtr(), MAP_BYTES)


class Side:
    """The tensor maps of one array: encoded once an address, then found.

    The driver takes some microseconds a map, and an array of x has sixteen. A map begins with its address, and so one
    that was encoded becomes one of another address by writing that in front: if the driver's second answer says so.
    """

    __slots__ = ("_known", "_patches", "_shapes", "_tails")

    def __init__(self, shapes: tuple[MapShape, ...]) -> None:
        self._shapes = shapes
        self._known: dict[int, bytes] = {}
        self._tails: tuple[bytes, ...] = ()  # of the first maps, behind the address
        self._patches: bool | None = None  # whether that is all of the difference; None until two were encoded

    def __len__(self) -> int:
        return len(self._shapes)

    def encoded(self, address: int) -> bytes:
        """The maps of the array at `address`, one after the other."""
        return self._known.get(address) or self._encode(address)

    def _encode(self, address: int) -> bytes:
        head = address.to_bytes(ADDRESS_BYTES, "little")
        patched = b"".join(head + tail for tail in self._tails)
        made = patched if self._patches else b"".join(shape.encode(address) for shape in self._shapes)
        if not self._tails:
            starts = range(ADDRESS_BYTES, len(made), MAP_BYTES)
            self._tails = tuple(made[start : start + MAP_BYTES - ADDRESS_BYTES] for start in starts)
        elif self._patches is None:
            self._patches = made == patched
        _recent.remember(self._known, address, made)
        return made


class Maps:
    """The tensor maps of one plan."""

    __slots__ = ("_a", "_absent", "_b", "_c", "_left_first")

    def __init__(
        self,
        a_shapes: tuple[MapShape, ...],
        b_shapes: tuple[MapShape, ...],
        c_shapes: tuple[MapShape, ...] = (),
        left_first: bool = False,
        absent: int = 0,
    ) -> None:
        """`absent`: maps of the result that the kernel's parameters have room for, and which are not there."""
        self._a = Side(a_shapes)
        self._b = Side(b_shapes)
        self._c = Side(c_shapes)
        self._left_first = left_first
        self._absent = bytes(absent * MAP_BYTES)

    @property
    def nbytes(self) -> int:
        """Length of what `encoded` gives."""
        return MAP_BYTES * (len(self._a) + len(self._b) + len(self._c)) + len(self._absent)

    def encoded(self, a: int, b: int, c: int) -> bytes:
        """Maps of the operands at `a` and `b` and the result at `c`, in the order of the kernel's parameters."""
        left, right = self._a.encoded(a), self._b.encoded(b)
        both = left + right if self._left_first else right + left
        return both + (self._c.encoded(c) if len(self._c) else self._absent)


def maps(problem: Problem, config: WgmmaConfig) -> Maps:
    """What the kernel of `config` needs to know of the operands of `problem`."""
    return _forward_maps(problem, config) if isinstance(config, HopperRowsConfig) else _wgrad_maps(problem, config)


def _forward_maps(problem: Problem, config: HopperRowsConfig) -> Maps:
    """Boxes of w and x for `sm90/grouped_mm.cuh`: w for narrow and wide tiles, x for 16, 32, ... rows."""
    dtype = problem.dtype
    k, n, groups = problem.k, problem.n, problem.groups
    group_stride, k_stride, n_stride = (
        _stride(extent, stride) for extent, stride in zip((groups, k, n), problem.b_strides, strict=True)
    )
    x_stride = _stride(problem.rows, problem.a_strides[0])
    tokens = range(16, 256 + 1, 16)
    x_shapes = tuple(MapShape(dtype, (k, problem.rows), (x_stride,), (TILE_K, rows)) for rows in tokens)
    widths = config.columns // 2, config.columns
    if problem.b_layout == K_MAJOR:
        strides = n_stride, group_stride
        w_shapes = tuple(MapShape(dtype, (k, n, groups), strides, (TILE_K, width, 1)) for width in widths)
    elif whole_column_blocks(problem):
        extents, blocked = (64, k, n // 64, groups), (k_stride, 64 * ELEMENT_BYTES, group_stride)
        w_shapes = tuple(MapShape(dtype, extents, blocked, (64, TILE_K, width // 64, 1)) for width in widths)
    else:
        w_shapes = (MapShape(dtype, (n, k, groups), (k_stride, group_stride), (64, TILE_K, 1)),) * 2
    y_shapes = (_ragged(problem.out_dtype, problem.rows, n, problem.c_strides[1]),) if can_store(problem) else ()
    return Maps(x_shapes, w_shapes, y_shapes, absent=0 if y_shapes else 1)


def can_store(problem: Problem) -> bool:
    """Whether the copy engine can write the result: it writes 16 bytes at a time, also where a row ends earlier."""
    if not problem.vector_store or problem.n % (VECTOR_BYTES // ELEMENT_BYTES) != 0:
        return False
    group, row = (stride * ELEMENT_BYTES for stride in problem.c_strides[:2])
    if problem.op == GROUPED_MM:
        walked = problem.rows <= 1 or 0 < row < MAX_RAGGED_STRIDE_BYTES
        return problem.out_dtype == problem.dtype and problem.rows < RAGGED and walked
    steps = ((problem.groups, group), (problem.k, 16 * row))  # boxes count sixteens of rows
    return problem.out_dtype in ("bfloat16", "float16") and all(
        extent <= 1 or 0 < step < MAX_STRIDE_BYTES for extent, step in steps
    )


def whole_column_blocks(problem: Problem) -> bool:
    """Whether one box can take several blocks of 64 columns: else the last one would leave its row."""
    if problem.op == GROUPED_MM:
        return problem.b_layout == MN_MAJOR and problem.n % 64 == 0
    return problem.k % 64 == 0 and problem.n % 64 == 0


def _wgrad_maps(problem: Problem, config: PingpongConfig) -> Maps:
    """Boxes of x, dy and the result for `sm90/grouped_mm_wgrad_pingpong.cuh`; of the latter two for either width."""
    widths = (config.n, PINGPONG_NARROW)
    whole = whole_column_blocks(problem)
    dtype, rows = problem.dtype, problem.rows
    x_shape = _ragged_blocks(dtype, rows, problem.k, problem.a_strides[0], config.m if whole else 0)
    dy_shapes = (
        _ragged_blocks(dtype, rows, problem.n, problem.b_strides[1], width if whole else 0) for width in widths
    )
    if not can_store(problem):
        return Maps((x_shape,), tuple(dy_shapes), left_first=True, absent=2)
    k, n = problem.k, problem.n
    group, row, _ = problem.c_strides
    steps, next_group = (_stride(k, row), 64 * ELEMENT_BYTES), _stride(problem.groups, group)
    if whole:  # eight of every sixteen rows of half a tile, and all of its columns
        extents, strides = (64, 16, k // 16, n // 64, problem.groups), (steps[0], 16 * steps[0], steps[1], next_group)
        c_shapes = [MapShape(problem.out_dtype, extents, strides, (64, 8, 4, width // 64, 1)) for width in widths]
    else:  # eight rows of 64 columns
        c_shapes = [MapShape(problem.out_dtype, (n, k, 1, problem.groups), (*steps, next_group), (64, 8, 1, 1))] * 2
    return Maps((x_shape,), tuple(dy_shapes), tuple(c_shapes), left_first=True)


def _ragged_blocks(dtype: str, rows: int, columns: int, stride: int, width: int) -> MapShape:
    """As `_ragged`, but the last axis counts blocks of 64 columns, of which a box takes `width` columns; 0: the first
    axis counts all columns, and a box takes 64.
    """
    pitch = _stride(rows, stride)
    inner, blocks = (64, columns // 64) if width else (columns, 1)
    return MapShape(
        dtype,
        (inner, RAGGED, rows + 1, RAGGED + 1, blocks),
        (pitch, pitch, (1 << 34) - pitch, 64 * ELEMENT_BYTES),
        (64, TILE_K, 1, 1, max(width // 64, 1)),
    )


def _ragged(dtype: str, rows: int, columns: int, stride: int) -> MapShape:
    """Boxes of 64 columns by 64 rows that end at a row named by the coordinates.

    With `pitch` bytes a row, coordinates (column, RAGGED - (end - row), end, RAGGED) have the address
    base + pitch * (RAGGED - end + row + end) + RAGGED * (2^34 - pitch) = base + pitch * row modulo 2^64, and the
    second one is out of bounds from row `end` on.
    """
    pitch = _stride(rows, stride)
    return MapShape(
        dtype, (columns, RAGGED, rows + 1, RAGGED + 1), (pitch, pitch, (1 << 34) - pitch), (64, TILE_K, 1, 1)
    )


def why_impossible(problem: Problem) -> str | None:
    """Says why the copy engine cannot read the operands of `problem`, or None when it can."""
    if problem.any_stride:
        return "it needs 16-byte aligned bases and pitches"
    if 0 in (problem.rows, problem.k, problem.n, problem.groups):
        return "it cannot describe an empty operand"
    wgrad = problem.op != GROUPED_MM
    extents = (
        (problem.rows, 1, problem.rows, problem.n) if wgrad else (problem.rows, problem.groups, problem.k, problem.n)
    )
    limit = MAX_RAGGED_STRIDE_BYTES if wgrad else MAX_STRIDE_BYTES
    strides = (problem.a_strides[0], *problem.b_strides)
    for extent, stride in zip(extents, strides, strict=True):
        if extent > 1 and not 0 < stride * ELEMENT_BYTES < limit:
            return f"it needs strides above 0 and below {limit} bytes"
    if wgrad and problem.rows >= RAGGED:
        return f"it ends groups at a row of at most {RAGGED}"
    return None


def _stride(extent: int, stride: int) -> int:
    """Bytes of a stride; any legal value for an axis that is never walked."""
    return stride * ELEMENT_BYTES if extent > 1 else 16
