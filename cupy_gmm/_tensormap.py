"""Tensor maps: what Hopper's copy engine must know of an operand. Encoded once an address, then cached."""

import ctypes
from dataclasses import dataclass

from . import _device
from ._config import ELEMENT_BYTES, GROUPED_MM, TILE_K, VECTOR_BYTES, HopperRowsConfig, WgmmaConfig
from ._problem import Problem
from ._variants import K_MAJOR, MN_MAJOR

MAP_BYTES = 128
ADDRESS_BYTES = 8  # of a map, in front
MAX_KEPT = 1024  # addresses a plan remembers
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
        if len(self._known) >= MAX_KEPT:
            self._known.clear()
        head = address.to_bytes(ADDRESS_BYTES, "little")
        patched = b"".join(head + tail for tail in self._tails)
        made = patched if self._patches else b"".join(shape.encode(address) for shape in self._shapes)
        if not self._tails:
            starts = range(ADDRESS_BYTES, len(made), MAP_BYTES)
            self._tails = tuple(made[start : start + MAP_BYTES - ADDRESS_BYTES] for start in starts)
        elif self._patches is None:
            self._patches = made == patched
        self._known[address] = made
        return made


class Maps:
    """The tensor maps of one plan."""

    __slots__ = ("_a", "_b", "_c")

    def __init__(
        self, a_shapes: tuple[MapShape, ...], b_shapes: tuple[MapShape, ...], c_shapes: tuple[MapShape, ...] | None
    ) -> None:
        self._a = Side(a_shapes)
        self._b = Side(b_shapes)
        self._c = None if c_shapes is None else Side(c_shapes)  # no shapes: the copy engine cannot write the result

    @property
    def nbytes(self) -> int:
        """Length of what `encoded` gives."""
        return MAP_BYTES * (len(self._a) + len(self._b) + (0 if self._c is None else 1))

    def encoded(self, a: int, b: int, c: int) -> bytes:
        """Maps of the operands at `a` and `b` and the result at `c`, in the order of the kernel's parameters."""
        if self._c is None:
            return self._a.encoded(a) + self._b.encoded(b)
        result = self._c.encoded(c) if len(self._c) else bytes(MAP_BYTES)
        return self._b.encoded(b) + self._a.encoded(a) + result


def maps(problem: Problem, config: WgmmaConfig) -> Maps:
    """What the kernel of `config` needs to know of the operands of `problem`."""
    return _forward_maps(problem, config) if isinstance(config, HopperRowsConfig) else _wgrad_maps(problem)


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
    return Maps(x_shapes, w_shapes, y_shapes)


def can_store(problem: Problem) -> bool:
    """Whether the copy engine can write the rows of y: it writes 16 bytes at a time, also where a row ends earlier."""
    stride = problem.c_strides[1] * ELEMENT_BYTES
    return (
        problem.op == GROUPED_MM
        and problem.out_dtype == problem.dtype
        and problem.vector_store
        and problem.n % (VECTOR_BYTES // ELEMENT_BYTES) == 0
        and problem.rows < RAGGED
        and (problem.rows <= 1 or 0 < stride < MAX_RAGGED_STRIDE_BYTES)
    )


def whole_column_blocks(problem: Problem) -> bool:
    """Whether one box can take several blocks of 64 columns of the weights: else the last one would leave its row."""
    return problem.op == GROUPED_MM and problem.b_layout == MN_MAJOR and problem.n % 64 == 0


def _wgrad_maps(problem: Problem) -> Maps:
    """Ragged boxes of x and dy for `sm90/grouped_mm_wgrad.cuh`."""
    x_shape = _ragged(problem.dtype, problem.rows, problem.k, problem.a_strides[0])
    dy_shape = _ragged(problem.dtype, problem.rows, problem.n, problem.b_strides[1])
    return Maps((x_shape,), (dy_shape,), None)


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
