"""The schedule: which rows belong to which group, as a table of row blocks built on the device from end offsets."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import _arrays, _checks, _device, _heuristics, _launch, _problem, _table, reference
from ._params import SIZES_PARAMS, UNKNOWN_GROUPS
from .errors import ArgumentError

STATUS_NAMES = {1: "negative", 2: "decreasing", 4: "beyond rows"}
STATUS_WORD = 1  # of the table's header
PER_THREAD = 2  # name of the per-thread default stream
_OUT = frozenset({"out"})


@dataclass(frozen=True, slots=True)
class Schedule:
    """Row blocks of one set of offsets: pass it as `offs` to every product with the same rows.

    Made by `make_schedule`. It depends on the offsets and the number of rows alone, not on K or N, so both products
    of a layer, their input gradients and their weight gradients share one.

    Attributes:
        table: int32 array in the family of `offs`; its layout is documented in `kernels/params.cuh`. On a GPU
            the counters of products follow, from byte `shape.nbytes` on.
        group_offset: The host value given to `make_schedule`, or None when it is on the device.
        shape: Extents of the table.
        stream: CUDA handle of the stream whose products may count tickets in the table, one after the other; -1: none.
    """

    table: Any
    group_offset: int | None
    shape: _table.TableShape
    view: Any = field(repr=False, compare=False)
    stream: int = field(default=-1, repr=False, compare=False)

    @property
    def groups(self) -> int:
        """Length of the offsets it was made from."""
        return self.shape.groups

    @property
    def rows(self) -> int:
        """Rows of the operands it was made for."""
        return self.shape.rows


def facts(schedule: Schedule) -> tuple[Any, ...]:
    """What the plan of a product depends on."""
    shape = schedule.shape
    return shape.groups, shape.rows, shape.blocks, schedule.group_offset


def make_schedule(offs: Any, rows: int, *, group_offset: Any = 0, out: Schedule | None = None) -> Schedule:
    """Builds the schedule of `offs` once, for all products over the same rows.

        blocks of group g: its rows cut into nearly equal parts of at most `height`, fixed by rows, G and the
        architecture

    Args:
        offs: (G,) int32 or int64 end offsets on the device of the operands (or on the CPU for the NumPy path): group
            g owns rows `offs[g - 1]` to `offs[g] - 1`. Any content is safe: the running maximum clamped to [0, rows]
            counts. The content is not checked; see `check=` of the products.
        rows: Rows of x, 0 to 0x7fff0000.
        group_offset: Index of the first group whose weights are local; an int, or an int32 device array of one element.
        out: A Schedule of the same number of groups and rows to build into, for example inside a CUDA graph.

    Returns:
        A Schedule whose table is in the family of `offs`; `out` itself when given.

    Raises:
        ArgumentError: A rank, extent or device does not fit, or `out` was made for other extents.
        DtypeError: `offs` holds no int32 or int64.

    Cost:
        One launch, a few microseconds on the device; never waits for it. Capturable in a CUDA graph with `out=`.

    Source:
        kernels/schedule.cu.
    """
    _checks.required(("offs", offs))
    if isinstance(offs, Schedule):
        raise ArgumentError("`offs` is a Schedule: expected end offsets; pass it to the products as it is.")
    rows = _problem.rows_of_schedule(rows)
    host_offset, device_offset = split_group_offset(group_offset)
    table = None if out is None else _schedule_of("out", out).table
    site, (offs_view, offset_view, table_view) = _arrays.locate(
        ("offs", offs), ("group_offset", device_offset), ("out", table), writable=_OUT
    )
    groups = _problem.offsets(offs_view)
    if device_offset is None:
        _problem.group_offset_in(groups, host_offset or 0)
    check_group_offset(offset_view)
    arch = "" if site.is_cpu else _device.info(site.device).arch
    shape = _table.table_shape(groups, rows, _heuristics.block_shape(rows, groups, arch))
    if out is not None and (out.groups, out.rows) != (groups, rows):
        raise ArgumentError(
            f"`out` was made for {out.groups} groups and {out.rows} rows: expected {groups} groups and {rows} rows, "
            "as `offs` and `rows` say; make a new Schedule."
        )
    words = shape.words if site.is_cpu else shape.nbytes // 4 + _table.COUNTER_WORDS
    with site.guard():
        if table_view is None:
            table, table_view = site.empty((words,), "int32")
        if site.is_cpu:
            offset = int(_arrays.host(offset_view).reshape(-1)[0]) if offset_view is not None else host_offset or 0
            _arrays.host(table_view)[: shape.words] = reference.schedule(
                _arrays.host(offs_view), rows, offset, None, *shape.blocks
            )
        else:
            fill = fill_of(shape, offs_view, host_offset, UNKNOWN_GROUPS, _table.COUNTER_WORDS)
            offset_ptr, counters = 0 if offset_view is None else offset_view.ptr, table_view.ptr + shape.nbytes
            fill(site.stream, offs_view.ptr, offset_ptr, table_view.ptr, counters)
            site.hold((offs_view, offset_view, table_view))
    if out is not None:
        return out
    return Schedule(site.finish(table), host_offset, shape, table_view, _counting_stream(site))


def _counting_stream(site: Any) -> int:
    # Work on one stream runs in order, so one counter serves it. A graph may run beside any stream; the handle of
    # the per-thread default stream means another stream in each thread; a jax.Array is nobody's to change.
    if site.is_cpu or site.family not in ("cupy", "torch") or site.stream == PER_THREAD or site.in_graph():
        return -1
    return int(site.stream)


def fill_of(
    shape: _table.TableShape, offs: Any, host_offset: int | None, num_groups: int, zeroed_words: int
) -> _launch.Launcher:
    """The launch that fills a table from the offsets of a View; kept, but for addresses."""
    wide = offs.dtype == "int64"
    return _table.fill(shape, offs.strides[0], wide, host_offset or 0, num_groups, zeroed_words, offs.device)


def running_sum(group_sizes: Any) -> Any:
    """`ops.offs_from_sizes`."""
    _checks.required(("group_sizes", group_sizes))
    site, (sizes,) = _arrays.locate(("group_sizes", group_sizes))
    _checks.rank("group_sizes", sizes, 1, "(groups,) rows of each group", "pass `group_sizes.reshape(-1)`")
    _checks.dtype("group_sizes", sizes, _checks.INDEX_DTYPES)
    with site.guard():
        native, view = site.empty(sizes.shape, "int32")
        groups = sizes.shape[0]
        if site.is_cpu:
            limits = np.iinfo(np.int32)
            np.clip(
                np.cumsum(_arrays.host(sizes), dtype=np.int64),
                limits.min,
                limits.max,
                out=_arrays.host(view),
                casting="unsafe",
            )
        elif groups:
            function = _launch.unit_function(_table.UNIT, "offsets_of_sizes", site.device)
            stride = sizes.strides[0] if groups > 1 else 0
            params = SIZES_PARAMS.pack(sizes.ptr, view.ptr, stride, groups, sizes.dtype == "int64")
            _launch.launch(function, 1, _table.THREADS, 0, site, params)
        site.hold((sizes, view))
    return site.finish(native)


def split_group_offset(group_offset: Any) -> tuple[int | None, Any]:
    """(host value, device array): exactly one of them is not None."""
    if isinstance(group_offset, int) and not isinstance(group_offset, bool):
        return group_offset, None
    if isinstance(group_offset, np.integer):
        return int(group_offset), None
    if not hasattr(group_offset, "shape"):
        raise ArgumentError(
            f"`group_offset` is {group_offset!r}: expected an int, or an int32 array of one element on the device of "
            "`x`."
        )
    return None, group_offset


def check_group_offset(view: Any) -> None:
    """Checks the view of a `group_offset` that lives on the device."""
    if view is None:
        return
    _checks.dtype("group_offset", view, ("int32",))
    if view.shape not in ((), (1,)):
        raise ArgumentError(f"`group_offset` has shape {view.shape}: expected one element, shape () or (1,).")


def _schedule_of(name: str, value: Any) -> Schedule:
    if not isinstance(value, Schedule):
        raise ArgumentError(f"`{name}` is a {type(value).__name__}: expected a Schedule, as `make_schedule` returns.")
    return value


def status_text(bits: int) -> str:
    """What a status word says, as part of a sentence."""
    return ", ".join(name for bit, name in STATUS_NAMES.items() if bits & bit)


def raise_for_status(bits: int, rows: int) -> None:
    """Raises the error of `check="sync"` when `bits` says that `offs` is malformed."""
    if bits:
        raise ArgumentError(
            f"`offs` is malformed ({status_text(bits)}): expected non-decreasing end offsets between 0 and rows = "
            f"{rows}; if it holds the size of each group, pass `offs_from_sizes(offs)`."
        )


def read_word(address: int, site: Any) -> int:
    """Reads one int32 of the device; waits for the stream of `site`."""
    runtime = _device.import_cupy().cuda.runtime
    word = np.zeros(1, np.int32)
    runtime.memcpyAsync(word.ctypes.data, address, 4, runtime.memcpyDeviceToHost, site.stream)
    runtime.streamSynchronize(site.stream)
    return int(word[0])


_status_words: dict[int, Any] = {}
_device.forget_in_child(_status_words.clear)


def has_status_word(device: int) -> bool:
    """Whether `status_word(device)` needs no allocation."""
    return device in _status_words


def status_word(device: int) -> Any:
    """The device's int32 word that `check="async"` collects findings in, zero at first; a CuPy or NumPy array."""
    word = _status_words.get(device)
    if word is None:
        word = _status_words.setdefault(device, _new_status_word(device))
    return word


def _new_status_word(device: int) -> Any:
    if device < 0:
        return np.zeros(1, np.int32)
    cupy = _device.import_cupy()
    with cupy.cuda.Device(device):
        word = cupy.zeros(1, dtype=np.int32)
        cupy.cuda.get_current_stream().synchronize()  # other streams may use it from now on
        return word


def async_status(device: int | None = None) -> tuple[str, ...]:
    """Names of what calls with `check="async"` have found wrong with their offsets, and forgets it.

    Args:
        device: CUDA ordinal; None for the current device, or for the CPU where there is no device. -1 is the CPU.

    Returns:
        A tuple of "negative", "decreasing", "beyond rows"; empty when every checked call was fine.

    Raises:
        ArgumentError: No such device.

    Cost:
        Waits for the device; call it once a step or less, never inside a CUDA graph.
    """
    if device is not None:
        device = _checks.whole_number("device", device, "a CUDA ordinal or -1 for the CPU")
    else:
        device = _device.import_cupy().cuda.Device().id if _device.count() else -1
    if device >= 0:
        _device.info(device)
        cupy = _device.import_cupy()
        with cupy.cuda.Device(device):
            cupy.cuda.runtime.deviceSynchronize()
            word = status_word(device)
            bits = int(word[0].get())
            word.fill(0)
            cupy.cuda.runtime.deviceSynchronize()
    else:
        word = status_word(-1)
        bits = int(word[0])
        word[0] = 0
    return tuple(name for bit, name in STATUS_NAMES.items() if bits & bit)
