"""The grouped products in NumPy: one plain product a group. Oracle of the tests and CPU path of `ops`.

Called by `ops` (arrays on the CPU) and by the tests; knows nothing of devices or kernels. Nothing here checks
its arguments: `ops` does that. Operands are bf16 (`ml_dtypes`), fp16 or fp32 arrays of any strides.

Only rows and weights of non-empty groups are read, so NaN or Inf anywhere else is harmless; every element of
`out` is written exactly once (an accumulating weight gradient leaves the bytes of empty groups alone).
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = [
    "HEADER_WORDS", "capacity", "clamp_offsets", "error_bound", "exact64", "exact64_wgrad",
    "grouped_mm", "grouped_mm_wgrad", "schedule", "status",
]  # fmt: skip

Array = NDArray[Any]
Bounds = NDArray[np.int64]

# Words before the bounds in a schedule table.
HEADER_WORDS = 16

NEGATIVE, DECREASING, BEYOND_ROWS = 1, 2, 4

# A BLAS picks its inner loop, and with it the order of the sum, from the row count. Cutting every group into
# blocks of this many rows (the last one padded with zeros) keeps a row's bits independent of how many rows
# share its group.
_ROWS_PER_CALL = 32

# Largest relative error of one rounding, and half the smallest positive number, by output type.
_ROUNDING = {"float32": (0.0, 2.0**-150), "float16": (2.0**-11, 2.0**-25), "bfloat16": (2.0**-8, 2.0**-134)}


def clamp_offsets(offs: ArrayLike, rows: int) -> Bounds:
    """Effective group bounds: `end_g = min(rows, max(0, offs[0..g]))`, whatever integers `offs` holds.

    Args:
        offs: (G,) end row of each group, any integer type.
        rows: rows of the operand, >= 0.

    Returns:
        (G + 1,) int64, non-decreasing, from 0; group g owns rows `bounds[g]` to `bounds[g + 1] - 1`.

    Source:
        Twin of the clamp in `kernels/schedule.cu`.
    """
    ends = np.asarray(offs).astype(np.int64)
    bounds = np.zeros(ends.size + 1, np.int64)
    np.maximum.accumulate(np.clip(ends, 0, rows), out=bounds[1:])
    return bounds


def status(offs: ArrayLike, rows: int) -> int:
    """What is malformed in `offs`: 1 a negative offset, 2 a decreasing one, 4 one beyond `rows`; 0 when fine.

    Args:
        offs: (G,) end row of each group, any integer type.
        rows: rows of the operand.

    Returns:
        The bits, or'ed.
    """
    ends = np.asarray(offs).astype(np.int64)
    found = (ends < 0).any(), (ends[1:] < ends[:-1]).any(), (ends > rows).any()
    return sum(bit for bit, seen in zip((NEGATIVE, DECREASING, BEYOND_ROWS), found, strict=True) if seen)


def grouped_mm(x: Array, w: Array, bounds: Bounds, out: Array, group_offset: int = 0) -> None:
    """`out[rows of g] = x[rows of g] @ w[g - group_offset]`; exact +0 in all rows without local weights.

    Args:
        x: (rows, K).
        w: (G_local, K, N), the groups from `group_offset` on.
        bounds: (G + 1,) from `clamp_offsets`.
        out: (rows, N), any non-overlapping strides; overwritten.
        group_offset: global id of `w[0]`.

    Numerics:
        Products and sums in float32, one rounding to the type of `out`. A row's bits depend on its own values
        and its weights alone.
    """
    groups = len(bounds) - 1
    low = min(max(group_offset, 0), groups)
    high = min(max(group_offset + len(w), low), groups)
    out[: bounds[low]] = 0
    out[bounds[high] :] = 0
    with np.errstate(all="ignore"):
        for group in low + np.flatnonzero(np.diff(bounds[low : high + 1])):
            rows = slice(bounds[group], bounds[group + 1])
            out[rows] = _blockwise(x[rows], w[group - group_offset])


def grouped_mm_wgrad(
    x: Array, dy: Array, bounds: Bounds, out: Array, accumulate: bool = False, group_offset: int = 0
) -> None:
    """`out[g - group_offset] = x[rows of g].T @ dy[rows of g]`; zeros for groups without rows.

    Args:
        x: (rows, K).
        dy: (rows, N).
        bounds: (G + 1,) from `clamp_offsets`.
        out: (G_local, K, N), any non-overlapping strides.
        accumulate: add to `out` instead; the bytes of groups without rows stay as they are.
        group_offset: global id of `out[0]`.

    Numerics:
        Products, sums and the addition to `out` in float32, one rounding to the type of `out`.
    """
    groups = len(bounds) - 1
    lengths = np.zeros(len(out), np.int64)
    low, high = max(group_offset, 0), min(group_offset + len(out), groups)
    if low < high:
        lengths[low - group_offset : high - group_offset] = np.diff(bounds[low : high + 1])
    if not accumulate:
        for local in np.flatnonzero(lengths == 0):
            out[local] = 0
    with np.errstate(all="ignore"):
        for local in np.flatnonzero(lengths):
            start = bounds[local + group_offset]
            rows = slice(start, start + lengths[local])
            total = _float32(x[rows]).T @ _float32(dy[rows])
            total += _float32(out[local]) if accumulate else np.float32(0)
            out[local] = total


def _float32(array: Array) -> NDArray[np.float32]:
    return array.astype(np.float32)


def _blockwise(x: Array, w: Array) -> NDArray[np.float32]:
    """`x @ w` in float32, `_ROWS_PER_CALL` rows at a time."""
    rows, k = x.shape
    blocks = -(-rows // _ROWS_PER_CALL)
    padded = np.zeros((blocks * _ROWS_PER_CALL, k), np.float32)
    padded[:rows] = x
    product = np.matmul(padded.reshape(blocks, _ROWS_PER_CALL, k), _float32(w))
    product = product.reshape(blocks * _ROWS_PER_CALL, w.shape[1])[:rows]
    # A sum that starts at +0 is never -0; a BLAS may return -0 where all products are.
    product += np.float32(0)
    return product


def capacity(rows: int, groups: int, split: int) -> int:
    """Row blocks that a schedule table of this shape has room for.

    Args:
        rows: rows of the operand.
        groups: groups in `offs`.
        split: most rows of a block of a group that has several.

    Returns:
        A bound on the number of blocks, whatever `offs` holds.
    """
    return rows // split + groups + 2


def schedule(
    offs: ArrayLike, rows: int, group_offset: int, num_groups: int | None, height: int, split: int, granule: int,
    by_height: bool,
) -> NDArray[np.int32]:  # fmt: skip
    """The device's schedule table, built by the host.

    Args:
        offs: (G,) end row of each group, any integers.
        rows: rows of the operand.
        group_offset: global id of the first local group.
        num_groups: local groups, or None when not known.
        height, split, granule, by_height: a `BlockShape`; the first two are multiples of `granule`.

    Returns:
        int32 words as documented in `kernels/params.cuh`; words past the last block are 0.

    Source:
        Twin of `kernels/schedule.cu`.
    """
    bounds = clamp_offsets(offs, rows)
    groups = len(bounds) - 1
    lengths = np.diff(bounds)
    used = int(bounds[-1])
    order = np.argsort(-lengths, kind="stable")
    counts = -(-lengths // np.where(lengths > height, split, height))
    is_long = lengths * np.count_nonzero(lengths) >= used
    granules = -(-lengths // granule)
    highest = -(-granules // np.maximum(counts, 1))  # block of each group, in granules
    walked = np.lexsort((-lengths, -highest, ~is_long)) if by_height else np.arange(groups)
    of_groups = _group_blocks(bounds, walked, counts, granules, group_offset, num_groups, granule)
    blocks = np.concatenate([of_groups, _tail_blocks(used, rows, height, granule)])
    first = HEADER_WORDS + -(-(2 * groups + 1) // 4) * 4
    table = np.zeros(first + 4 * capacity(rows, groups, split), np.int32)
    long_blocks = int(counts[is_long].sum() if by_height else counts.sum())
    table[:9] = (len(blocks), status(offs, rows), used, group_offset, groups, rows, height, granule, long_blocks)
    if long_blocks < len(blocks):
        table[9:10].view(np.uint32)[0] = -(-(long_blocks << 32) // len(blocks))
    table[HEADER_WORDS : HEADER_WORDS + groups + 1] = bounds
    table[HEADER_WORDS + groups + 1 : HEADER_WORDS + 2 * groups + 1] = order
    table[first : first + 4 * len(blocks)] = blocks.ravel()
    return table


def _group_blocks(
    bounds: Bounds, walked: NDArray[np.int64], counts: NDArray[np.int64], granules: NDArray[np.int64],
    group_offset: int, num_groups: int | None, granule: int,
) -> NDArray[np.int64]:  # fmt: skip
    """Blocks of the groups `walked`, `counts` of each: granules spread evenly, the higher blocks first. (blocks, 4)."""
    owner = np.repeat(walked, counts[walked])
    index = np.arange(len(owner)) - np.repeat(np.cumsum(counts[walked]) - counts[walked], counts[walked])
    # Divisor 1 stands in for groups without blocks; no block refers to them.
    share, longer = np.divmod(granules, np.maximum(counts, 1))
    first = bounds[owner] + granule * (index * share[owner] + np.minimum(index, longer[owner]))
    end = np.minimum(first + granule * (share[owner] + (index < longer[owner])), bounds[owner + 1])
    local = owner - group_offset
    known = (local >= 0) & (local < (2**31 - 1 if num_groups is None else num_groups))
    return _records(np.where(known, local, -1), first, end, granule)


def _tail_blocks(used: int, rows: int, height: int, granule: int) -> NDArray[np.int64]:
    """Blocks of the rows that no group owns. (blocks, 4)."""
    first = np.arange(used, rows, height, dtype=np.int64)
    return _records(np.full(len(first), -1), first, np.minimum(first + height, rows), granule)


def _records(group: Array, first: Array, end: Array, granule: int) -> NDArray[np.int64]:
    return np.stack([group, first, end, -(-(end - first) // granule) * granule], axis=1).astype(np.int64)


def exact64(
    x: Array, w: Array, bounds: Bounds, group_offset: int = 0
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Forward product in float64 from the exact inputs, and the same with absolute values.

    Args:
        x: (rows, K).
        w: (G_local, K, N).
        bounds: (G + 1,) from `clamp_offsets`.
        group_offset: global id of `w[0]`.

    Returns:
        (rows, N) value and magnitude, float64, zero in rows that no local group owns.
    """
    value = np.zeros((x.shape[0], w.shape[2]), np.float64)
    magnitude = np.zeros_like(value)
    for local, rows in _used(bounds, len(w), group_offset):
        a, b = x[rows].astype(np.float64), w[local].astype(np.float64)
        value[rows], magnitude[rows] = a @ b, np.abs(a) @ np.abs(b)
    return value, magnitude


def exact64_wgrad(
    x: Array, dy: Array, bounds: Bounds, num_groups: int, group_offset: int = 0
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Weight gradient in float64 from the exact inputs, and the same with absolute values.

    Args:
        x: (rows, K).
        dy: (rows, N).
        bounds: (G + 1,) from `clamp_offsets`.
        num_groups: groups to return.
        group_offset: global id of the first returned group.

    Returns:
        (num_groups, K, N) value and magnitude, float64.
    """
    value = np.zeros((num_groups, x.shape[1], dy.shape[1]), np.float64)
    magnitude = np.zeros_like(value)
    for local, rows in _used(bounds, num_groups, group_offset):
        a, b = x[rows].astype(np.float64), dy[rows].astype(np.float64)
        value[local], magnitude[local] = a.T @ b, np.abs(a.T) @ np.abs(b)
    return value, magnitude


def _used(bounds: Bounds, num_groups: int, group_offset: int) -> Iterator[tuple[int, slice]]:
    for local in range(max(0, -group_offset), min(num_groups, len(bounds) - 1 - group_offset)):
        first, end = bounds[local + group_offset : local + group_offset + 2]
        if first < end:
            yield local, slice(first, end)


def error_bound(
    value: NDArray[np.float64], magnitude: NDArray[np.float64], terms: ArrayLike, dtype: str
) -> NDArray[np.float64]:
    """Largest error that a float32 sum of `terms` products with one rounding may have, element by element.

    Args:
        value: float64 result.
        magnitude: float64 sum of absolute products.
        terms: length of the sum; broadcasts against `value`.
        dtype: output type: "float32", "float16" or "bfloat16".

    Returns:
        `4 sqrt(terms) 2^-23 magnitude + u |value| + half the smallest number`, u the type's rounding unit.
    """
    unit, smallest = _ROUNDING[dtype]
    return 4 * np.sqrt(np.asarray(terms, np.float64)) * 2.0**-23 * magnitude + unit * np.abs(value) + smallest
