"""Calls that become warm, and ways to depart from them: what `test_warm` holds the warm path to.

Arrays are stand-ins of `fakes`, at fixed addresses, so that two runs of one call can be compared word by word.
"""

import dataclasses
import types
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

import cupy_gmm
from cupy_gmm import _schedule, _table
from cupy_gmm._arrays import lifetime
from cupy_gmm._heuristics import BlockShape

ROWS, K, N, GROUPS = 96, 64, 128, 4
BLOCKS = BlockShape(64, 64, 16, False)
BF16 = np.dtype(ml_dtypes.bfloat16)
FP16, FP32, INT32, INT64 = (np.dtype(name) for name in ("float16", "float32", "int32", "int64"))
STREAM = 0x51


# ---- calls


class Given(types.SimpleNamespace):
    """One call to be made: `op`, `a`, `b`, `offs`, and `options`."""

    def run(self) -> Any:
        return getattr(cupy_gmm, self.op)(self.a, self.b, self.offs, **self.options)


def array(gpu: Any, place: int, shape: tuple[int, ...], dtype: Any = BF16, shift: int = 0, **options: Any) -> Any:
    """An array at a fixed address."""
    return gpu.cupy.ndarray(shape, dtype, ptr=place * 0x100000 + shift, **options)


def schedule(gpu: Any, groups: int = GROUPS, rows: int = ROWS, offset: int | None = 0) -> Any:
    shape = _table.table_shape(groups, rows, BLOCKS)
    words = shape.nbytes // 4 + _table.COUNTER_WORDS
    return _schedule.Schedule(array(gpu, 5, (words,), INT32), offset, shape, None)


def forward(gpu: Any) -> Given:
    x, w = array(gpu, 1, (ROWS, K)), array(gpu, 2, (GROUPS, K, N))
    return Given(op="grouped_mm", a=x, b=w, offs=array(gpu, 3, (GROUPS,), INT32), options={})


def forward_out(gpu: Any) -> Given:
    given = forward(gpu)
    given.options["out"] = array(gpu, 4, (ROWS, N))
    return given


def forward_scheduled(gpu: Any) -> Given:
    given = forward_out(gpu)
    given.offs = schedule(gpu)
    return given


def forward_scheduled_here(gpu: Any) -> Given:
    """The Schedule was made on the stream that is current, so its own ticket counter may serve."""
    given = forward_out(gpu)
    given.offs = dataclasses.replace(schedule(gpu), stream=0)
    return given


def shifted(gpu: Any) -> Given:
    given = forward(gpu)
    given.offs, given.options["group_offset"] = array(gpu, 3, (GROUPS + 2,), INT32), 1
    return given


def gradient(gpu: Any) -> Given:
    x, dy = array(gpu, 1, (ROWS, K)), array(gpu, 2, (ROWS, N))
    return Given(op="grouped_mm_wgrad", a=x, b=dy, offs=array(gpu, 3, (GROUPS,), INT32), options={})


def gradient_of_one(gpu: Any) -> Given:
    given = gradient(gpu)
    given.options["num_groups"] = 1
    return given


def gradient_scheduled(gpu: Any) -> Given:
    given = gradient(gpu)
    given.offs = schedule(gpu)
    given.options |= {"out": array(gpu, 4, (GROUPS, K, N), FP32), "accumulate": True}
    return given


def gradient_scheduled_here(gpu: Any) -> Given:
    """As `forward_scheduled_here`; only partial sums need memory."""
    given = gradient_scheduled(gpu)
    given.offs = dataclasses.replace(schedule(gpu), stream=0)
    return given


BASES: tuple[Callable[[Any], Given], ...] = (
    forward, forward_out, forward_scheduled, forward_scheduled_here, shifted,
    gradient, gradient_of_one, gradient_scheduled, gradient_scheduled_here,
)  # fmt: skip


# ---- deeds


@dataclasses.dataclass
class Deed:
    """A departure from a warm call. `general` says that the general path must be asked each time; else it becomes warm
    in its turn, unless it raises."""

    base: Callable[[Any], Given]
    name: str
    do: Callable[[Any, Given], None]
    general: bool = False

    def __str__(self) -> str:
        return f"{self.base.__name__}: {self.name}"


DEEDS: list[Deed] = []


def deed(base: Callable[[Any], Given], name: str, general: bool = False) -> Callable[[Any], Any]:
    def note(do: Callable[[Any, Given], None]) -> Callable[[Any, Given], None]:
        DEEDS.append(Deed(base, name, do, general))
        return do

    return note


def replaced(base: Callable[[Any], Given], name: str, attribute: str, general: bool = False, **options: Any) -> None:
    """The same call with another array as `a`, `b` or `offs`, or as the option `out`."""
    place = {"a": 1, "b": 2, "offs": 3, "out": 4}[attribute]
    shape, dtype = options.pop("shape"), options.pop("dtype", BF16)

    def do(gpu: Any, given: Given) -> None:
        made = array(gpu, place, shape, dtype, **options)
        if attribute == "out":
            given.options["out"] = made
        else:
            setattr(given, attribute, made)

    DEEDS.append(Deed(base, name, do, general))


def optioned(base: Callable[[Any], Given], general: bool = False, **options: Any) -> None:
    name = ", ".join(f"{key}={value!r}" for key, value in options.items())
    DEEDS.append(Deed(base, name, lambda gpu, given: given.options.update(options), general))


X, W, DY, OFFS, Y, DW = (ROWS, K), (GROUPS, K, N), (ROWS, N), (GROUPS,), (ROWS, N), (GROUPS, K, N)

replaced(forward, "x of another type", "a", shape=X, dtype=FP16)
replaced(forward, "fewer rows", "a", shape=(ROWS - 1, K))
replaced(forward, "no rows", "a", shape=(0, K))
replaced(forward, "fewer columns of x", "a", shape=(ROWS, K - 8))
replaced(forward, "padded rows", "a", shape=X, strides=(K * 2 + 16, 2))
replaced(forward, "x off 16 bytes", "a", shape=X, shift=2)
replaced(forward, "x between elements", "a", shape=X, shift=1)
replaced(forward, "x elsewhere", "a", shape=X, shift=0x4000)
replaced(forward, "x on another device", "a", shape=X, device=1)
replaced(forward, "w of another type", "b", shape=W, dtype=FP16)
replaced(forward, "more columns", "b", shape=(GROUPS, K, N + 8))
replaced(forward, "fewer columns", "b", shape=(GROUPS, K, N - 8), strides=(K * N * 2, N * 2, 2))
replaced(forward, "w transposed", "b", shape=W, strides=(K * N * 2, 2, K * 2))
replaced(forward, "w off 16 bytes", "b", shape=W, shift=2)
replaced(forward, "w on another device", "b", shape=W, device=1)
replaced(forward, "int64 offsets", "offs", shape=OFFS, dtype=INT64)
replaced(forward, "float offsets", "offs", shape=OFFS, dtype=FP32)
replaced(forward, "more groups than weights", "offs", shape=(GROUPS + 1,), dtype=INT32)
replaced(forward, "every other offset", "offs", shape=OFFS, dtype=INT32, strides=(8,))
replaced(forward, "offsets between elements", "offs", shape=OFFS, dtype=INT32, shift=2)
replaced(forward, "offsets on another device", "offs", shape=OFFS, dtype=INT32, device=1)
replaced(forward, "out after none", "out", shape=Y)
replaced(forward_out, "out of another type", "out", shape=Y, dtype=FP32)
replaced(forward_out, "out of another shape", "out", shape=(ROWS, N + 8))
replaced(forward_out, "out of the other half type", "out", shape=Y, dtype=FP16)
replaced(forward_out, "out with fewer rows", "out", shape=(ROWS - 1, N))
replaced(forward_out, "padded out", "out", shape=Y, strides=(N * 2 + 32, 2))
replaced(forward_out, "out off 16 bytes", "out", shape=Y, shift=2)
replaced(forward_out, "out between elements", "out", shape=Y, shift=1)
replaced(forward_out, "out elsewhere", "out", shape=Y, shift=0x4000)
replaced(forward_out, "out on another device", "out", shape=Y, device=1)
replaced(gradient, "dy padded", "b", shape=DY, strides=(N * 2 + 16, 2))
replaced(gradient_scheduled, "dw of another type", "out", shape=DW)
optioned(forward, out_dtype=FP32)
optioned(forward, out_dtype="float16")
optioned(forward, out_dtype=["float16"], general=True)
optioned(forward, config="64x128")
optioned(forward, config="no such")
optioned(forward, group_offset=1)
optioned(forward, group_offset=False, general=True)
optioned(forward, check="async", general=True)
optioned(forward, check="later", general=True)
optioned(forward_out, out=None)
optioned(forward_out, out_dtype=FP32)
optioned(forward_scheduled, group_offset=1)
optioned(shifted, group_offset=2)
optioned(shifted, group_offset=3)
optioned(shifted, group_offset=1.0, general=True)
optioned(shifted, group_offset=True, general=True)
optioned(shifted, group_offset=np.int64(1), general=True)
optioned(gradient, num_groups=2)
optioned(gradient, accumulate=True)
optioned(gradient_of_one, num_groups=True, general=True)
optioned(gradient_of_one, num_groups=np.int64(1), general=True)
optioned(gradient_scheduled, accumulate=False)

for number in (
    {"groups": GROUPS + 1}, {"groups": GROUPS + 1, "offset": 1}, {"rows": ROWS + 1}, {"offset": 1}, {"offset": None},
):  # fmt: skip

    @deed(forward_scheduled, f"a Schedule of {number}")
    def _(gpu: Any, given: Given, number: dict[str, Any] = number) -> None:
        given.offs = schedule(gpu, **number)


@deed(forward_scheduled_here, "a Schedule of another stream")
def _(gpu: Any, given: Given) -> None:
    given.offs = dataclasses.replace(given.offs, stream=STREAM)


@deed(forward_scheduled_here, "a counted Schedule on another stream")
def _(gpu: Any, given: Given) -> None:
    gpu.cupy_streams[0] = STREAM


@deed(forward_scheduled_here, "a counted Schedule under capture", general=True)
def _(gpu: Any, given: Given) -> None:
    gpu.cupy_streams[0] = STREAM
    given.offs = dataclasses.replace(given.offs, stream=STREAM)
    gpu.capturing.add(STREAM)


@deed(forward_scheduled, "a Schedule in other blocks")
def _(gpu: Any, given: Given) -> None:
    shape = _table.table_shape(GROUPS, ROWS, BLOCKS._replace(height=32, split=32))
    given.offs = dataclasses.replace(given.offs, shape=shape)


@deed(forward_scheduled, "a Schedule of a subclass of arrays", general=True)
def _(gpu: Any, given: Given) -> None:
    given.offs = dataclasses.replace(given.offs, table=subclass(gpu, given.offs.table))


@deed(forward_scheduled, "a copied Schedule")
def _(gpu: Any, given: Given) -> None:
    given.offs = dataclasses.replace(given.offs, table=array(gpu, 6, given.offs.table.shape, INT32))


def subclass(gpu: Any, made: Any) -> Any:
    kind = type("subclass", (gpu.cupy.ndarray,), {})
    return kind(made.shape, made.dtype, made.data)


for name in ("a", "b", "offs"):

    @deed(forward, f"a subclass of arrays as {name}", general=True)
    def _(gpu: Any, given: Given, name: str = name) -> None:
        setattr(given, name, subclass(gpu, getattr(given, name)))

    @deed(forward, f"an array of torch as {name}", general=True)
    def _(gpu: Any, given: Given, name: str = name) -> None:
        made = getattr(given, name)
        setattr(given, name, gpu.torch.Tensor(made.shape, made.dtype.name, ptr=made.data.ptr))


@deed(forward_out, "a subclass of arrays as out", general=True)
def _(gpu: Any, given: Given) -> None:
    given.options["out"] = subclass(gpu, given.options["out"])


@deed(shifted, "a group offset on the device", general=True)
def _(gpu: Any, given: Given) -> None:
    given.options["group_offset"] = array(gpu, 6, (), INT32)


@deed(forward_out, "out begins where w does", general=True)
def _(gpu: Any, given: Given) -> None:
    given.options["out"] = array(gpu, 2, Y)


@deed(gradient_scheduled, "out begins where x does", general=True)
def _(gpu: Any, given: Given) -> None:
    given.options["out"] = array(gpu, 1, DW, FP32)


for base in (forward, forward_scheduled, gradient, gradient_scheduled):

    @deed(base, "another stream")
    def _(gpu: Any, given: Given) -> None:
        gpu.cupy_streams[0] = STREAM

    @deed(base, "a stream under capture", general=True)
    def _(gpu: Any, given: Given) -> None:
        gpu.cupy_streams[0] = STREAM
        gpu.capturing.add(STREAM)

    @deed(base, "legacy work beside a capture")
    def _(gpu: Any, given: Given) -> None:
        gpu.capturing.add(0)  # what the driver would say is not asked for

    @deed(base, "another device is current", general=True)
    def _(gpu: Any, given: Given) -> None:
        gpu.current = 1

    @deed(base, "a fresh thread", general=True)
    def _(gpu: Any, given: Given) -> None:
        lifetime.thread.bound = False

    @deed(base, "all on another device")
    def _(gpu: Any, given: Given) -> None:
        gpu.current = 1
        for made in (given.a, given.b, getattr(given.offs, "table", given.offs), given.options.get("out")):
            if made is not None:
                made.data.device_id = 1
