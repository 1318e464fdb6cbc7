"""The warm path on a device: exact results where it is taken, and taken only where `_warm` says.

`test_warm` proves on stand-ins that it enqueues what the general path does; here the driver and CuPy are real.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import cupy_gmm
from cupy_gmm import _call, _warm
from cupy_gmm.errors import ArgumentError
from tests import backends, calls, layouts
from tests.backends import Backend
from tests.calls import Case

pytestmark = pytest.mark.gpu
pytest_plugins = ("tests.lateness",)  # the fixture `run`

GROUPS = layouts.Groups((37, 0, 64, 130, 3), 240)
SPIN_CYCLES = 100_000_000  # about 50 ms
ONE = 0x3C00  # the bits of a float16 1


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    """How many calls have taken the warm path since it was asked last; none is known at first."""
    count = [0]
    enqueue = _warm._enqueue

    def counted(*arguments: Any) -> Any:
        count[0] += 1
        return enqueue(*arguments)

    def read() -> int:
        found, count[0] = count[0], 0
        return found

    monkeypatch.setattr(_warm, "_enqueue", counted)
    _warm.entries.clear()
    yield read
    _warm.entries.clear()


@pytest.fixture
def ones(gpu: Backend) -> Callable[..., Any]:
    """ones(out=..., ...): a call of which every element is 64, and the same call each time."""
    cupy = gpu.cupy
    x, w = cupy.ones((240, 64), np.float16), cupy.ones((5, 64, 136), np.float16)
    offs = cupy.asarray(np.array([37, 37, 101, 231, 240], np.int32))
    gpu.synchronize()

    def call(**options: Any) -> Any:
        given = [options.pop(name, array) for name, array in (("x", x), ("w", w), ("offs", offs))]
        return cupy_gmm.grouped_mm(*given, **options)

    return call


def right(result: Any) -> bool:
    return bool((result == 64).all())


# ---- taken


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("kn", [(64, 136), (67, 37), (256, 512)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_exact(
    dtype: str, kn: tuple[int, int], scheduled: bool, gpu: Backend, rng: np.random.Generator, taken: Callable[[], int]
) -> None:
    """Every kind of call three times over, each on other memory: from the second on it is warm, and exact."""
    runs: list[Callable[..., None]] = []
    for out_dtype in (None, "float32"):
        case = Case(GROUPS, kn, dtype, out_dtype)
        offset = Case(GROUPS, kn, dtype, out_dtype, group_offset=1, local=3)
        added = Case(GROUPS, kn, dtype, out_dtype, accumulate=True)
        for layout in (None, layouts.contiguous, layouts.padded(8)):
            runs += [
                lambda case=case, layout=layout, **given: calls.mm(gpu, rng, case, out_layout=layout, **given),
                lambda case=case, layout=layout, **given: calls.wgrad(gpu, rng, case, out_layout=layout, **given),
            ]
        runs.append(lambda case=case, **given: calls.mm(gpu, rng, case, w_layout=layouts.transposed, **given))
        runs.append(lambda added=added, **given: calls.wgrad(gpu, rng, added, **given))
        if not scheduled:
            runs.append(lambda offset=offset, **given: calls.mm(gpu, rng, offset, **given))
            runs.append(lambda offset=offset, **given: calls.wgrad(gpu, rng, offset, **given))
    schedule = cupy_gmm.make_schedule(gpu.ints(GROUPS.offs), GROUPS.rows) if scheduled else None
    for number, run in enumerate(runs):
        taken()
        for _ in range(3):
            run(schedule=schedule)
        assert taken() == 2, f"call {number}"


def test_the_bits_of_the_general_path(gpu: Backend, rng: np.random.Generator, taken: Callable[[], int]) -> None:
    """Random numbers, whose sums do depend on the order of additions."""
    cupy = gpu.cupy
    x, w, dy = (
        gpu.place(rng.standard_normal(shape).astype(np.float16)).array
        for shape in ((240, 520), (5, 520, 264), (240, 264))
    )
    offs = gpu.ints(GROUPS.offs)
    schedule = cupy_gmm.make_schedule(offs, 240)
    for given in (offs, schedule):
        for call in (
            lambda given=given: cupy_gmm.grouped_mm(x, w, given, out_dtype=np.float32),
            lambda given=given: cupy_gmm.grouped_mm(dy, w.swapaxes(1, 2), given),
            lambda given=given: cupy_gmm.grouped_mm_wgrad(x, dy, given),
        ):
            first = call()
            assert taken() == 0
            assert gpu.same(call(), first)
            assert taken() == 1
    assert isinstance(first, cupy.ndarray)


def test_another_stream(gpu: Backend, ones: Callable[..., Any], run: Any, taken: Callable[[], int]) -> None:
    """What is known from one stream goes to the one that is current: it waits for what that one holds."""
    cupy = gpu.cupy
    schedule = cupy_gmm.make_schedule(cupy.asarray(np.array([37, 37, 101, 231, 240], np.int32)), 240)
    for offs in ({}, {"offs": schedule}):
        ones(**offs), ones(**offs)
        gpu.synchronize()
        for stream in (cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream.ptds, cupy.cuda.Stream.null):
            x = cupy.zeros((240, 64), np.float16)
            cupy.cuda.runtime.deviceSynchronize()
            taken()
            with stream:
                run("spin", stream.ptr, count=SPIN_CYCLES)
                run("fill", stream.ptr, target=x.data.ptr, value=ONE, count=x.size)
                y = ones(x=x, **offs)
                assert right(y)  # on the same stream
            assert taken() == 1


def test_scratch_goes_back_in_stream_order(gpu: Backend, ones: Callable[..., Any], taken: Callable[[], int]) -> None:
    """Calls in a row on two streams, results dropped at once, memory poisoned by who gets it next."""
    cupy = gpu.cupy
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    for _ in range(2):
        ones()
    taken()
    kept = []
    for turn in range(200):
        with streams[turn % 2]:
            kept.append(ones())
            ones()
            cupy.full(300, 0x7FE57FE5, np.int32)
    cupy.cuda.runtime.deviceSynchronize()
    assert all(right(y) for y in kept)
    assert taken() == 400


def test_threads(gpu: Backend, ones: Callable[..., Any], taken: Callable[[], int]) -> None:
    """A new thread has no context, and takes the general path once; then eight at a time are warm."""
    cupy = gpu.cupy
    for _ in range(2):
        ones()
    gpu.synchronize()
    wrong: list[object] = []

    def work() -> None:
        try:
            with cupy.cuda.Stream(non_blocking=True) as stream:
                results = [ones() for _ in range(30)]
                stream.synchronize()
                if not all(right(y) for y in results):
                    wrong.append("values")
        except Exception as error:
            wrong.append(error)

    taken()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert not wrong
    assert taken() == 29
    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


def test_eviction(
    gpu: Backend, ones: Callable[..., Any], taken: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_warm, "MAX_ENTRIES", 4)
    monkeypatch.setattr(_call, "MAX_PLANS", 4)
    _call.plans.clear()
    x = gpu.cupy.ones((240, 64), np.float16)
    for _ in range(3):
        for rows in range(231, 241):
            assert right(ones(x=x[:rows])[:231])
            assert len(_warm.entries) <= 4
            assert len(_call.plans) <= 4
    assert taken() == 0, "ten kinds of call in turn, of which four are kept"
    assert right(ones(x=x))
    assert taken() == 1


def test_any_allocator(gpu: Backend, ones: Callable[..., Any], taken: Callable[[], int]) -> None:
    """Memory that begins anywhere; and an allocator that has none."""
    cupy = gpu.cupy
    pool = cupy.cuda.MemoryPool()
    schedule = cupy_gmm.make_schedule(cupy.asarray(np.array([37, 37, 101, 231, 240], np.int32)), 240)
    for offs in ({}, {"offs": schedule}):
        for _ in range(2):
            ones(**offs)
        taken()
        for step in (8, 16, 264):
            with cupy.cuda.using_allocator(lambda nbytes, step=step: pool.malloc(nbytes + step) + step):
                y = ones(**offs)
            assert right(y)
            assert y.data.ptr % 16 == 0
        assert taken() == 3

        def full(nbytes: int) -> None:
            raise MemoryError

        with cupy.cuda.using_allocator(full), pytest.raises(MemoryError):
            ones(**offs)
        assert right(ones(**offs))


# ---- not taken


def test_other_calls_go_the_general_way(gpu: Backend, ones: Callable[..., Any], taken: Callable[[], int]) -> None:
    cupy = gpu.cupy
    cupy_gmm.async_status()

    class Mine(cupy.ndarray):  # type: ignore[misc]
        pass

    arrays = {
        "x": cupy.ones((240, 64), np.float16),
        "w": cupy.ones((5, 64, 136), np.float16),
        "offs": cupy.asarray(np.array([37, 37, 101, 231, 240], np.int32)),
        "out": cupy.empty((240, 136), np.float16),
    }
    ways = {
        **{f"a subclass as {name}": {name: Mine(made.shape, made.dtype, made.data)} for name, made in arrays.items()},
        "checked": {"check": "sync"},
        "checked later": {"check": "async"},
        "offset on the device": {"group_offset": cupy.zeros((), np.int32)},
        "offset of NumPy": {"group_offset": np.int32(0)},
    }
    for name, options in ways.items():
        for _ in range(3):
            assert right(ones(**options)), name
        assert taken() == 0, name
    assert cupy_gmm.async_status() == ()


def test_addresses_count(gpu: Backend, ones: Callable[..., Any], taken: Callable[[], int]) -> None:
    """Off 16 bytes the call is another one; between elements it is refused; so is `out` that begins where x does."""
    cupy = gpu.cupy
    for _ in range(2):
        ones()
    assert taken() == 1
    flat = cupy.ones(240 * 64 + 8, np.float16)
    shifted = cupy.ndarray((240, 64), np.float16, flat.data + 2)
    for warm in (0, 1, 1):
        assert right(ones(x=shifted))
        assert taken() == warm
    odd = cupy.ndarray((240, 64), np.float16, flat.data + 1)
    x = cupy.ones((240, 64), np.float16)
    w = cupy.ones((5, 64, 64), np.float16)
    out = cupy.empty((240, 64), np.float16)
    for _ in range(2):
        assert right(ones(x=x, w=w, out=out))
    for _ in range(3):
        with pytest.raises(ArgumentError, match="starts at address"):
            ones(x=odd)
        with pytest.raises(ArgumentError, match="`out` begins where an input does"):
            ones(x=x, w=w, out=x)
        with pytest.raises(ArgumentError, match="`group_offset` is True"):
            ones(x=x, w=w, group_offset=True)
    assert (x == 1).all()


def test_capture(gpu: Backend, ones: Callable[..., Any], taken: Callable[[], int]) -> None:
    """A known call under capture is the general path's: errors with offsets or no `out`, a graph with both."""
    cupy = gpu.cupy
    schedule = cupy_gmm.make_schedule(cupy.asarray(np.array([37, 37, 101, 231, 240], np.int32)), 240)
    out = cupy.empty((240, 136), np.float16)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        gpu.cupy.cuda.runtime.deviceSynchronize()
        for options in ({}, {"offs": schedule}, {"offs": schedule, "out": out}):
            for _ in range(2):
                ones(**options)
        assert taken() == 3
        stream.synchronize()
        out.fill(7)
        stream.begin_capture()
        accepted = []
        for options in ({}, {"offs": schedule}):
            with contextlib.suppress(ArgumentError):
                accepted.append(ones(**options))
        ones(offs=schedule, out=out)
        graph = stream.end_capture()
        assert taken() == 0
        assert not accepted
        stream.synchronize()
        assert (out == 7).all()
        for _ in range(2):
            ones(offs=schedule)  # between capture and replays, on the same stream
            graph.launch(stream)
        stream.synchronize()
        assert right(out)
        assert taken() == 2


def test_devices(gpu: Backend, ones: Callable[..., Any], taken: Callable[[], int]) -> None:
    cupy = gpu.cupy
    backends.two_gpus()
    for _ in range(2):
        ones()
    taken()
    with cupy.cuda.Device(1):
        y = ones()
        assert (y.device.id, taken()) == (0, 0)
        far = cupy.ones((240, 64), np.float16)
        with pytest.raises(ArgumentError, match="on one device"):
            ones(x=far)
    assert right(y)
    with pytest.raises(ArgumentError, match="on one device"):
        ones(x=far)
    assert taken() == 0
