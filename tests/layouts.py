"""What the kernel matrix is made of: group sizes, (K, N) pairs, group counts and array layouts.

Used by every test of the products; knows nothing of the library.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np

# Tile heights around which group sizes are chosen: one below, equal, one above.
HEIGHTS = (64, 128, 256)

# Named points: a full k16 and n8 tile, no multiple of 16, one element, thin, wide, over a tile, row pitch of
# 72 bytes (8-byte aligned only), and no reduction at all.
KN_NAMED = ((64, 64), (72, 40), (1, 1), (128, 8), (40, 200), (264, 136), (36, 36), (0, 16))
# Pairwise distinct primes: an index that is transposed or taken from the wrong extent cannot hide.
KN_PRIMES = ((2, 3), (13, 31), (67, 37), (71, 131), (127, 61), (139, 19), (257, 11), (5, 239))
KN = tuple(pair for both in zip(KN_NAMED, KN_PRIMES, strict=True) for pair in both)
# Enough for layouts with hundreds of groups.
KN_SMALL = ((72, 40), (1, 1), (0, 16), (13, 31), (36, 36), (5, 29))

GROUP_COUNTS = (1, 2, 3, 31, 32, 33, 127, 128, 129, 255, 256, 257, 1023, 1024, 1025, 4096)


@dataclasses.dataclass(frozen=True)
class Groups:
    """Rows of each group, and rows of the operand (more than their sum where there is a tail)."""

    sizes: tuple[int, ...]
    rows: int

    @property
    def offs(self) -> np.ndarray:
        return np.cumsum(self.sizes, dtype=np.int64).astype(np.int32)


def _groups(sizes: Sequence[int], tail: int = 0) -> Groups:
    return Groups(tuple(int(size) for size in sizes), int(sum(sizes)) + tail)


def _zipf(groups: int, rows: int) -> list[int]:
    weight = 1.0 / np.arange(1, groups + 1)
    sizes = np.floor(weight / weight.sum() * rows).astype(int)
    order = np.random.default_rng(7).permutation(groups)
    return list(sizes[order])


def _random_cuts(groups: int, rows: int) -> list[int]:
    cuts = np.sort(np.random.default_rng(11).integers(0, rows + 1, groups - 1))
    return list(np.diff([0, *cuts, rows]))


# Group layouts by name, each a function of the tile height h.
GROUPS: dict[str, Callable[[int], Groups]] = {
    "no-rows": lambda h: _groups([0, 0, 0]),
    "all-zero": lambda h: _groups([0] * 5, tail=37),
    "one-group": lambda h: _groups([h + 3]),
    "all-in-first": lambda h: _groups([97, 0, 0, 0, 0]),
    "all-in-middle": lambda h: _groups([0, 0, 101, 0, 0]),
    "all-in-last": lambda h: _groups([0, 0, 0, 0, 103]),
    "uniform-below": lambda h: _groups([h - 1] * 3),
    "uniform": lambda h: _groups([h] * 3),
    "uniform-above": lambda h: _groups([h + 1] * 3),
    "ones": lambda h: _groups([1] * 33),
    "alternating": lambda h: _groups([0, 1] * 32),
    "first-empty": lambda h: _groups([0, 41, h]),
    "last-empty": lambda h: _groups([h, 43, 0]),
    "three-empty-inside": lambda h: _groups([47, 0, 0, 0, 29]),
    "around-two-tiles": lambda h: _groups([2 * h - 1, 1, 2 * h + 1]),
    "primes": lambda h: _groups([2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 71, 131]),
    "falling-powers": lambda h: _groups([128, 64, 32, 16, 8, 4, 2, 1]),
    "zipf-256": lambda h: _groups(_zipf(256, 2000)),
    "hot-60": lambda h: _groups([11] * 4 + [180] + [17] * 4 + [8]),
    "seven-rows-of-1024": lambda h: _groups(np.bincount([0, 1, 300, 511, 512, 777, 1023], minlength=1024)),
    "tail-of-one": lambda h: _groups([5, 0, 59], tail=1),
    "tail-of-tiles": lambda h: _groups([61, 7], tail=2 * h + 3),
    "random-cuts": lambda h: _groups(_random_cuts(19, 3 * h + 50)),
    "empty-and-tail": lambda h: _groups([0, 0, 1, 0, 73, 0], tail=h),
}  # fmt: skip


def empty_patterns() -> list[Groups]:
    """All 256 choices of which of 8 groups are empty; the sizes are distinct primes, the tail is 3 rows."""
    primes = (3, 17, 5, 23, 2, 11, 19, 7)
    return [_groups([p if bits >> g & 1 else 0 for g, p in enumerate(primes)], tail=3) for bits in range(256)]


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where the elements of an array lie, counted in elements from the first one of its own span."""

    strides: tuple[int, ...]
    first: int
    span: int
    shift_bytes: int = 0


Layout = Callable[[tuple[int, ...]], Placement]


def _place(shape: Sequence[int], strides: Sequence[int], shift_bytes: int = 0) -> Placement:
    """Span and first element that keep every element inside, whatever the signs of the strides."""
    reach = [(n - 1) * s for n, s in zip(shape, strides, strict=True) if n > 0]
    empty = any(n == 0 for n in shape)
    low = 0 if empty else -sum(r for r in reach if r < 0)
    high = 0 if empty else sum(r for r in reach if r > 0)
    return Placement(tuple(strides), low, 0 if empty else low + high + 1, shift_bytes)


def dense(shape: Sequence[int], order: Sequence[int] | None = None, pad: int = 0) -> list[int]:
    """Element strides with the axes stored in `order`, slowest first, the fastest one padded by `pad`."""
    axes = list(range(len(shape))) if order is None else list(order)
    strides, step = [0] * len(shape), 1
    for position, axis in enumerate(reversed(axes)):
        strides[axis] = step
        step *= max(shape[axis], 1) + (pad if position == 0 else 0)
    return strides


def contiguous(shape: tuple[int, ...]) -> Placement:
    return _place(shape, dense(shape))


def padded(elements: int) -> Layout:
    """Rows `elements` further apart than they are long."""
    return lambda shape: _place(shape, dense(shape, pad=elements))


def padded_to_16_bytes(shape: tuple[int, ...]) -> Placement:
    """Pitch a multiple of 16 bytes, whatever the extent (16-bit elements)."""
    return _place(shape, dense(shape, pad=-shape[-1] % 8 + 8))


def shifted(shift_bytes: int) -> Layout:
    """Base address `shift_bytes` past a multiple of 256."""
    return lambda shape: _place(shape, dense(shape), shift_bytes)


def transposed(shape: tuple[int, ...]) -> Placement:
    """The last two axes stored the other way round."""
    order = list(range(len(shape)))
    order[-1], order[-2] = order[-2], order[-1]
    return _place(shape, dense(shape, order))


def transposed_to_16_bytes(shape: tuple[int, ...]) -> Placement:
    """As `transposed`, with a pitch that is a multiple of 16 bytes (16-bit elements)."""
    order = list(range(len(shape)))
    order[-1], order[-2] = order[-2], order[-1]
    return _place(shape, dense(shape, order, pad=-shape[-2] % 8 + 8))


def transposed_shifted(shape: tuple[int, ...]) -> Placement:
    """As `transposed`, at an odd element offset and an odd pitch."""
    order = list(range(len(shape)))
    order[-1], order[-2] = order[-2], order[-1]
    return _place(shape, dense(shape, order, pad=1), 2)


def first_axis_fastest(shape: tuple[int, ...]) -> Placement:
    return _place(shape, dense(shape, [*range(1, len(shape)), 0]))


def first_axis_middle(shape: tuple[int, ...]) -> Placement:
    return _place(shape, dense(shape, [1, 0, 2] if len(shape) == 3 else [0, 1]))


def broadcast(shape: tuple[int, ...]) -> Placement:
    """Stride 0 over the first axis."""
    return _place(shape, [0, *dense(shape[1:])])


def odd_unit_stride(shape: tuple[int, ...]) -> Placement:
    """An axis of one element carries a stride that means nothing."""
    strides = dense(shape)
    return _place(shape, [12347 if n == 1 else s for n, s in zip(shape, strides, strict=True)])


def reversed_first(shape: tuple[int, ...]) -> Placement:
    strides = dense(shape)
    return _place(shape, [-strides[0], *strides[1:]])


def reversed_last(shape: tuple[int, ...]) -> Placement:
    strides = dense(shape)
    return _place(shape, [*strides[:-1], -strides[-1]])


def step_two(shape: tuple[int, ...]) -> Placement:
    """Every second element of the last axis."""
    return _place(shape, [2 * s for s in dense(shape)])


# Layouts whose elements all lie at different addresses: fit for outputs as well.
LAYOUTS: dict[str, Layout] = {
    "contiguous": contiguous,
    "pitch-plus-7": padded(7),
    "pitch-16-bytes": padded_to_16_bytes,
    "pitch-plus-1": padded(1),
    "off-2-bytes": shifted(2),
    "off-4-bytes": shifted(4),
    "off-8-bytes": shifted(8),
    "off-16-bytes": shifted(16),
    "transposed": transposed,
    "transposed-odd": transposed_shifted,
    "transposed-16-bytes": transposed_to_16_bytes,
    "first-axis-fastest": first_axis_fastest,
    "first-axis-middle": first_axis_middle,
    "odd-unit-stride": odd_unit_stride,
    "reversed-first": reversed_first,
    "reversed-last": reversed_last,
    "step-two": step_two,
}
INPUT_LAYOUTS: dict[str, Layout] = {**LAYOUTS, "broadcast": broadcast}


def elements(shape: Sequence[int]) -> int:
    return math.prod(shape)
