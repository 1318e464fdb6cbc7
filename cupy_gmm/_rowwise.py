"""Launches of `routing.cu` and `activation.cu`: parameter bytes, launch shapes, 16-byte or element accesses.

Called by `routing` and `moe` with checked views of one device, which run them at once, and by the face for JAX, which
keeps them. Launch shapes follow from array shapes and alignment alone, so that the bits of a result and the size of
scratch do not depend on the device.
"""

import struct
from collections.abc import Sequence
from typing import NamedTuple

from . import _launch
from ._arrays import Site, View

__all__ = [
    "ITEM_BYTES", "MAX_EXPERTS", "MAX_ROWS", "Launch", "combine", "combine_backward", "permute", "route",
    "route_scratch", "run", "run_route", "silu_mul", "silu_mul_backward",
]  # fmt: skip

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
MAX_EXPERTS = 8192  # the counters of one block fit the shared memory that every device gives
MAX_ROWS = 2**31 - 1  # indices of assignments are int32

# Mirrors of the structs in route.cuh, routing.cu and activation.cu, whose sizes are asserted there.
_ROUTE_PARAMS = struct.Struct("<Q2q5Q6i")
_MOVE_PARAMS = struct.Struct("<3Q" + "Q2q" * 4 + "Qq6i")
_SILU_PARAMS = struct.Struct("<" + "Q2q" * 3 + "2q2i")
assert (_ROUTE_PARAMS.size, _MOVE_PARAMS.size, _SILU_PARAMS.size) == (88, 160, 96)

_SINGLE_THREADS = 1024
_SINGLE_ASSIGNMENTS = 4096  # of one block: four a thread
_CHUNK_THREADS = 256
_ROUND = 4 * _CHUNK_THREADS  # assignments that a block places at once
_SCAN_THREADS = 1024
_SCAN_BUCKETS = 32
_ROW_THREADS = 256
_WARPS = _ROW_THREADS // 32
_ACCESS_BYTES = 16
_WEIGHT_TYPES = {"float32": 0, "bfloat16": 1, "float16": 2}

# A thread makes four accesses, the batch of permute, where there is work for all; one where there is not.
_FEW_ACCESSES = 2**18
_ACCESSES_OF_A_THREAD = 4
_ENOUGH_BLOCKS = 2048  # cut columns no further

_NOTHING = (0, 0, 0)


def _chunks(assignments: int, experts: int) -> tuple[int, int]:
    """Assignments of one block, and blocks. The histograms of all blocks stay near 4 MB."""
    most = max(128, min(1024, 2**20 // (experts + 1)))
    chunk = max(1, -(-assignments // (most * _ROUND))) * _ROUND
    return chunk, -(-assignments // chunk)


class Launch(NamedTuple):
    """A launch, ready but for its device and stream."""

    unit: str  # file in `kernels/`
    symbol: str
    grid: int | tuple[int, int]  # blocks, or blocks of rows and blocks of columns
    block: int  # threads
    shared: int  # dynamic shared memory, bytes
    params: bytes


def run(site: Site, launches: Sequence[Launch], scratch: View | None = None) -> None:
    """Launches on the stream of `site`, whose device must be current, and gives the scratch back."""
    for unit, symbol, grid, block, shared, params in launches:
        _launch.launch(_launch.unit_function(unit, symbol, site.device), grid, block, shared, site, params)
    site.hold([scratch])


def run_route(site: Site, ids: View, outputs: Sequence[View]) -> None:
    """`route` with scratch of the site."""
    nbytes = route_scratch(ids.shape, outputs[2].shape[0])
    scratch = site.scratch(nbytes) if nbytes else None
    run(site, route(ids, outputs, 0 if scratch is None else scratch.ptr), scratch)


def route_scratch(shape: tuple[int, ...], experts: int) -> int:
    """Bytes that `route` counts in, for ids of this shape."""
    assignments = shape[0] * shape[1]
    return 0 if assignments <= _SINGLE_ASSIGNMENTS else 4 * _chunks(assignments, experts)[1] * (experts + 1)


def route(ids: View, outputs: Sequence[View], scratch: int) -> tuple[Launch, ...]:
    """order, inverse, offs and counts from ids (tokens, slots): one launch, or three that use `scratch`."""
    order, inverse, offs, counts = outputs
    tokens, slots = ids.shape
    assignments, experts = tokens * slots, offs.shape[0]
    chunk, chunks = _chunks(assignments, experts)
    params = _ROUTE_PARAMS.pack(
        ids.ptr, *ids.strides, order.ptr, inverse.ptr, offs.ptr, counts.ptr, scratch,
        assignments, slots, experts, chunk, chunks, ids.dtype == "int64",
    )  # fmt: skip
    shared = 4 * (experts + 1 + 32)
    if assignments <= _SINGLE_ASSIGNMENTS:
        return (Launch("routing.cu", "route_single", 1, _SINGLE_THREADS, shared, params),)
    buckets = -(-(experts + 1) // _SCAN_BUCKETS)
    return (
        Launch("routing.cu", "route_count", chunks, _CHUNK_THREADS, shared, params),
        Launch("routing.cu", "route_scan", buckets, _SCAN_THREADS, 4 * _SCAN_THREADS, params),
        Launch("routing.cu", "route_place", chunks, _CHUNK_THREADS, shared, params),
    )


def permute(routes: Sequence[View], x: View, out: View) -> tuple[Launch, ...]:
    """Rows of x (tokens, H) to out (tokens * slots, H)."""
    if 0 in out.shape:
        return ()
    wide = _is_wide((x, out))
    kind = "wide" if wide else f"{ITEM_BYTES[x.dtype]}_bytes"
    width = _width(x, wide)
    lanes_log2, grid = _shares(out.shape[0], width)
    params = _move_params(routes, x.shape[0], lanes_log2, width, _rows(x, wide), _rows(out, wide))
    return (Launch("routing.cu", f"permute_rows_{kind}", grid, _ROW_THREADS, 0, params),)


def combine(routes: Sequence[View], y: View, weights: View | None, out: View) -> tuple[Launch, ...]:
    """Weighted sum of rows of y (tokens * slots, H) to out (tokens, H); weights None: all 1."""
    if 0 in out.shape:
        return ()
    wide = _is_wide((y, out))
    width = _width(out, wide)
    lanes_log2, grid = _shares(out.shape[0], width)
    params = _move_params(routes, out.shape[0], lanes_log2, width, _rows(y, wide), _rows(out, wide), weights=weights)
    return (Launch("routing.cu", f"combine_rows_{_kind(y, wide)}", grid, _ROW_THREADS, 0, params),)


def combine_backward(
    routes: Sequence[View], dy: View, y: View, weights: View, d_y: View, d_weights: View
) -> tuple[Launch, ...]:
    """Gradients of combine: d_y (tokens * slots, H) and d_weights (tokens, slots), contiguous float32."""
    if 0 in d_weights.shape:
        return ()
    wide = _is_wide((dy, y, d_y))
    grid = -(-y.shape[0] // _WARPS)
    params = _move_params(
        routes, dy.shape[0], 0, _width(dy, wide), _rows(y, wide), _rows(d_y, wide),
        grad=_rows(dy, wide), weights=weights, d_weights=d_weights.ptr,
    )  # fmt: skip
    return (Launch("routing.cu", f"combine_rows_backward_{_kind(y, wide)}", grid, _ROW_THREADS, 0, params),)


def silu_mul(gate_up: View, out: View) -> tuple[Launch, ...]:
    """out (rows, inner) from gate_up (rows, 2 inner)."""
    return _silu("silu_mul", gate_up, None, out, out.shape[1])


def silu_mul_backward(gate_up: View, dh: View, out: View) -> tuple[Launch, ...]:
    """out (rows, 2 inner) from gate_up and dh (rows, inner)."""
    return _silu("silu_mul_backward", gate_up, dh, out, dh.shape[1])


def _silu(symbol: str, gate_up: View, dh: View | None, out: View, inner: int) -> tuple[Launch, ...]:
    if 0 in out.shape:
        return ()
    # The second half of a row must start at a multiple of 16 bytes as well.
    wide = inner * ITEM_BYTES[out.dtype] % _ACCESS_BYTES == 0
    wide = wide and _is_wide((gate_up, out) if dh is None else (gate_up, dh, out))
    width = inner * ITEM_BYTES[out.dtype] // _ACCESS_BYTES if wide else inner
    lanes_log2, grid = _shares(out.shape[0], width)
    grad = _NOTHING if dh is None else _rows(dh, wide)
    params = _SILU_PARAMS.pack(*_rows(gate_up, wide), *grad, *_rows(out, wide), out.shape[0], width, lanes_log2, 0)
    return (Launch("activation.cu", f"{symbol}_{_kind(out, wide)}", grid, _ROW_THREADS, 0, params),)


def _kind(view: View, wide: bool) -> str:
    return f"{view.dtype}_{'wide' if wide else 'any'}"


def _is_wide(views: Sequence[View]) -> bool:
    """Whether every row of every view is a whole number of 16-byte accesses at multiples of 16 bytes."""
    per_access = _ACCESS_BYTES // ITEM_BYTES[views[0].dtype]
    return all(
        view.ptr % _ACCESS_BYTES == 0
        and view.shape[1] % per_access == 0
        and view.strides[1] == 1
        and (view.strides[0] % per_access == 0 or view.shape[0] == 1)
        for view in views
    )


def _width(view: View, wide: bool) -> int:
    """Accesses in a row."""
    return view.shape[1] * ITEM_BYTES[view.dtype] // _ACCESS_BYTES if wide else view.shape[1]


def _rows(view: View, wide: bool) -> tuple[int, int, int]:
    """The kernels' struct Rows: pitch and step count accesses."""
    if not wide:
        return view.ptr, view.strides[0], view.strides[1]
    return view.ptr, view.strides[0] * ITEM_BYTES[view.dtype] // _ACCESS_BYTES, 1


def _shares(rows: int, width: int) -> tuple[int, tuple[int, int]]:
    """log2 of the threads of a row, and the grid: (blocks of rows, blocks of columns)."""
    each = 1 if rows * width < _FEW_ACCESSES else _ACCESSES_OF_A_THREAD
    lanes_log2 = min(max(-(-width // each), min(width, 32)) - 1, _ROW_THREADS - 1).bit_length()
    blocks = -(-rows * 2**lanes_log2 // _ROW_THREADS)
    columns = min(-(-width // (each << lanes_log2)), max(1, _ENOUGH_BLOCKS // blocks))
    return lanes_log2, (blocks, columns)


def _move_params(
    routes: Sequence[View],
    tokens: int,
    lanes_log2: int,
    width: int,
    source: tuple[int, int, int],
    target: tuple[int, int, int],
    grad: tuple[int, int, int] = _NOTHING,
    weights: View | None = None,
    d_weights: int = 0,
) -> bytes:
    order, inverse, offs = routes
    given = _NOTHING if weights is None else (weights.ptr, *weights.strides)
    slots = order.shape[0] // tokens
    return _MOVE_PARAMS.pack(
        order.ptr, inverse.ptr, offs.ptr, *source, *target, *grad, *given, d_weights, width,
        tokens, slots, offs.shape[0], lanes_log2, 0 if weights is None else _WEIGHT_TYPES[weights.dtype], 0,
    )  # fmt: skip
