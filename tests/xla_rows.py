"""What stands in for the kernels of routing.cu and activation.cu: NumPy on the memory that their parameters name.

Used by `xla`. The structs are read here as the kernels declare them, apart from `cupy_gmm._rowwise`, which fills them.
"""

import struct
from typing import Any

import numpy as np

from cupy_gmm import _routing_host
from tests.backends import DTYPES
from tests.memory import at

ROUTE = struct.Struct("<Q2q5Q6i")
MOVE = struct.Struct("<3Q" + "Q2q" * 4 + "Qq6i")
SILU = struct.Struct("<" + "Q2q" * 3 + "2q2i")
ACCESS_BYTES = 16
BARE = {"wide": np.dtype(np.uint16), "2_bytes": np.dtype(np.uint16), "4_bytes": np.dtype(np.uint32)}
WEIGHTS = ("float32", "bfloat16", "float16")


def perform(symbol: str, params: bytes) -> None:
    """Does to memory what the kernel does."""
    if symbol.startswith("route_"):
        _route(symbol, params)
    elif symbol.startswith("silu_"):
        _silu(symbol, params)
    else:
        _move(symbol, params)


def _kind(symbol: str) -> tuple[np.dtype, int]:
    """dtype of the elements, and how many make one access."""
    if symbol.startswith("permute_rows_"):
        dtype = BARE[symbol.removeprefix("permute_rows_")]
    else:
        dtype = np.dtype(DTYPES[symbol.split("_")[-2]])
    return dtype, ACCESS_BYTES // dtype.itemsize if symbol.endswith("_wide") else 1


def _matrix(fields: tuple[int, int, int], rows: int, width: int, dtype: np.dtype, each: int) -> np.ndarray:
    """A struct Rows: `pitch`, `step` and `width` count accesses of `each` elements."""
    pointer, pitch, step = fields
    assert each == 1 or step == 1, "an access of 16 bytes is of neighbours"
    assert pointer % (each * dtype.itemsize) == 0, "misaligned"
    return at(pointer, (rows, width * each), dtype, (pitch * each, step))


def _route(symbol: str, params: bytes) -> None:
    ids, *strides, order, inverse, offs, counts, partials, assignments, slots, experts, chunk, chunks, wide = (
        ROUTE.unpack(params)
    )
    given = at(ids, (assignments // slots, slots), np.int64 if wide else np.int32, tuple(strides))
    flat = np.where((given >= 0) & (given < experts), given, experts).reshape(-1)
    total = at(counts, (experts,), np.int32)
    if symbol == "route_count":
        sums = at(partials, (chunks, experts + 1), np.int32)
        for number in range(chunks):
            sums[number] = np.bincount(flat[number * chunk : (number + 1) * chunk], minlength=experts + 1)
        assert chunks * chunk >= assignments > (chunks - 1) * chunk
        return
    if symbol == "route_scan":
        sums = at(partials, (chunks, experts + 1), np.int32)
        total[:] = sums.sum(0)[:experts]
        sums[:] = np.cumsum(sums, 0) - sums
        return
    if symbol == "route_place":
        assert np.array_equal(total, np.bincount(flat, minlength=experts + 1)[:experts]), "launched out of order"
    else:
        assert symbol == "route_single"
        assert partials == 0
    places = (at(each, (assignments,), np.int32) for each in (order, inverse))
    _routing_host.route(given, experts, *places, at(offs, (experts,), np.int32), total)


def _move(symbol: str, params: bytes) -> None:
    order, inverse, offs, *words = MOVE.unpack(params)
    source, target, grad, weights = (tuple(words[first : first + 3]) for first in (0, 3, 6, 9))
    d_weights, width, tokens, slots, experts, _, weight_type, _ = words[12:]
    dtype, each = _kind(symbol)
    count = tokens * slots
    rows = _routing_host.live_rows(
        at(order, (count,), np.int32), at(inverse, (count,), np.int32), at(offs, (experts,), np.int32)
    )
    rates: Any = None
    if weights[0]:
        rates = at(weights[0], (tokens, slots), DTYPES[WEIGHTS[weight_type]], weights[1:])
    shape = {"permute": (tokens, count), "combine": (count, tokens)}[symbol.split("_")[0]]
    if "_backward_" in symbol:
        dy, y, d_y = (
            _matrix(*each_of, width, dtype, each) for each_of in ((grad, tokens), (source, count), (target, count))
        )
        _routing_host.combine_backward(dy, y, rows, rates, d_y, at(d_weights, (tokens, slots), np.float32))
        return
    read, written = (_matrix(fields, n, width, dtype, each) for fields, n in zip((source, target), shape, strict=True))
    if symbol.startswith("permute_rows_"):
        assert rates is None
        _routing_host.permute(read, rows, written)
    else:
        _routing_host.combine(read, rows, rates, written)


def _silu(symbol: str, params: bytes) -> None:
    *words, rows, inner, _, _ = SILU.unpack(params)
    gate_up, dh, target = (tuple(words[first : first + 3]) for first in (0, 3, 6))
    dtype, each = _kind(symbol)
    both = _matrix(gate_up, rows, 2 * inner, dtype, each)
    if symbol.startswith("silu_mul_backward_"):
        _routing_host.silu_mul_backward(
            both, _matrix(dh, rows, inner, dtype, each), _matrix(target, rows, 2 * inner, dtype, each)
        )
    else:
        assert dh == (0, 0, 0)
        _routing_host.silu_mul(both, _matrix(target, rows, inner, dtype, each))
