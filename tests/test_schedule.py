"""`make_schedule`: the table of the device against its NumPy twin, reuse by many products, refills."""

import re

import numpy as np
import pytest

import cupy_gmm
from cupy_gmm import _device, _heuristics, _table, reference
from cupy_gmm._params import UNKNOWN_GROUPS
from cupy_gmm._table import TableShape
from tests import calls, layouts, offsets, oracle
from tests.backends import DTYPES, Backend
from tests.calls import Case
from tests.offsets import Offsets


def table_of(backend: Backend, schedule: cupy_gmm.Schedule) -> np.ndarray:
    return backend.get(schedule.table)


def check_table(backend: Backend, schedule: cupy_gmm.Schedule, offs: np.ndarray, rows: int) -> None:
    check_words(table_of(backend, schedule), schedule.shape, offs, rows)


def check_words(table: np.ndarray, shape: TableShape, offs: np.ndarray, rows: int) -> None:
    """Word by word what the twin builds; words past the last block mean nothing."""
    twin = reference.schedule(offs, rows, int(table[3]), None, *shape.blocks)
    meant = reference.HEADER_WORDS + -(-(2 * len(offs) + 1) // 4) * 4 + 4 * int(twin[0])
    assert table.dtype == np.int32
    assert table.size >= meant
    wrong = np.flatnonzero(table[:meant] != twin[:meant])
    assert wrong.size == 0, f"word {wrong[0]}: {table[wrong[0]]} instead of {twin[wrong[0]]}, {wrong.size} in all"


@pytest.mark.parametrize("given", offsets.ALL, ids=str)
def test_fixture(given: Offsets, backend: Backend) -> None:
    offs = np.array(given.offs, np.int32)
    schedule = cupy_gmm.make_schedule(backend.ints(offs), given.rows)
    check_table(backend, schedule, offs, given.rows)
    assert table_of(backend, schedule)[1] == given.status


@pytest.mark.parametrize("count", [*layouts.GROUP_COUNTS, 6143, 6144, 8192, 30011])
def test_noise_in_any_number_of_groups(count: int, backend: Backend, rng: np.random.Generator) -> None:
    """Sorted, malformed and constant offsets; both kernels of the device, whichever fits the count."""
    for rows in (0, 1, 777, 70_003):
        noise = rng.integers(-(2**31), 2**31, count)
        near = rng.integers(-30, rows + 30, count)
        for offs in (np.sort(near), np.where(rng.random(count) < 0.1, noise, near), np.full(count, rows)):
            offs = offs.astype(np.int32)
            check_table(backend, cupy_gmm.make_schedule(backend.ints(offs), rows), offs, rows)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 7, 511, 512, 513, 6144, 30011])
def test_sizes_in_place_of_offsets(count: int, gpu: Backend, rng: np.random.Generator) -> None:
    """As the calls of XLA hand them over: the kernel sums them, in 64 bits, and a sum outside int32 saturates."""
    cupy, rows = gpu.cupy, 70_003
    shape = _table.table_shape(count, rows, _heuristics.block_shape(rows, count, _device.info(0).arch))
    drawn = rng.multinomial(rows - 3, np.full(count, 1 / count))
    huge = rng.integers(-(2**31), 2**31, count)
    few = np.where(rng.random(count) < 0.1, -drawn, drawn)
    for sizes in (drawn, few, huge, abs(huge), np.zeros(count)):
        ends = np.clip(np.cumsum(sizes.astype(np.int64)), -(2**31), 2**31 - 1)
        for dtype in (np.int32, np.int64):
            given = cupy.asarray(sizes.astype(dtype))
            table = cupy.full(shape.words, -1, np.int32)
            fill = _table.fill(shape, 1, dtype == np.int64, 0, UNKNOWN_GROUPS, 0, 0, sizes=True)
            fill(cupy.cuda.get_current_stream().ptr, given.data.ptr, 0, table.data.ptr, 0)
            check_words(gpu.get(table), shape, ends, rows)


@pytest.mark.parametrize("name", layouts.GROUPS)
def test_group_layouts(name: str, backend: Backend) -> None:
    for height in layouts.HEIGHTS:
        groups = layouts.GROUPS[name](height)
        schedule = cupy_gmm.make_schedule(backend.ints(groups.offs), groups.rows)
        assert schedule.groups == len(groups.sizes)
        assert schedule.rows == groups.rows
        check_table(backend, schedule, groups.offs, groups.rows)


def test_strided_and_64_bit_offsets(backend: Backend) -> None:
    wide = np.array([3, 99, 2**40, -7, 50, 2**62, 60, 1, -(2**63), 5], np.int64)
    for step in (1, 2, 3, -1, -2):
        schedule = cupy_gmm.make_schedule(backend.ints(wide, "int64")[::step], 70)
        check_table(backend, schedule, wide[::step], 70)
        narrow = np.clip(wide, -(2**31), 2**31 - 1).astype(np.int32)
        schedule = cupy_gmm.make_schedule(backend.ints(narrow)[::step], 70)
        check_table(backend, schedule, narrow[::step], 70)


@pytest.mark.parametrize("offset", [0, 1, 3, 8])
@pytest.mark.parametrize("scalar", [False, True])
def test_group_offset(offset: int, scalar: bool, backend: Backend, rng: np.random.Generator) -> None:
    """A host int and a scalar on the device; the products take it from the schedule."""
    sizes = (3, 17, 0, 23, 66, 0, 19, 7)
    groups = layouts.Groups(sizes, sum(sizes) + 5)
    given = backend.place(np.array(offset, np.int32)).array if scalar else offset
    case = Case(groups, (40, 72), group_offset=offset, local=min(2, 8 - offset))
    calls.mm(backend, rng, case, group_offset=given)
    calls.wgrad(backend, rng, case, group_offset=given)
    schedule = cupy_gmm.make_schedule(backend.ints(groups.offs), groups.rows, group_offset=given)
    check_table(backend, schedule, groups.offs, groups.rows)
    assert table_of(backend, schedule)[3] == offset


@pytest.mark.parametrize("value", [-1, 9, -(2**31), 2**31 - 1])
def test_any_device_group_offset_is_safe(value: int, backend: Backend, rng: np.random.Generator) -> None:
    """The host cannot see it: groups that are not there give zero rows and zero gradients."""
    groups = layouts.Groups((3, 0, 21, 9), 40)
    scalar = backend.place(np.array(value, np.int32)).array
    offs = backend.ints(groups.offs)
    x, dy = (backend.place(oracle.integers(rng, (40, width), "float16")) for width in (24, 16))
    w = backend.place(oracle.integers(rng, (2, 24, 16), "float16"))
    out = backend.output((40, 16), "float16", layouts.padded(3))
    cupy_gmm.grouped_mm(x.array, w.array, offs, group_offset=scalar, out=out.array)
    expected = oracle.expected_mm(x.values, w.values, oracle.bounds_of(groups.offs, 40), "float16", value)
    oracle.assert_same_bits(out.read(), expected)
    out.check_guards()
    dw = cupy_gmm.grouped_mm_wgrad(x.array, dy.array, offs, group_offset=scalar, num_groups=2)
    spans = oracle.bounds_of(groups.offs, 40)
    oracle.assert_same_bits(backend.get(dw), oracle.expected_wgrad(x.values, dy.values, spans, "float16", 2, value))


def test_one_schedule_serves_a_layer(backend: Backend, rng: np.random.Generator) -> None:
    """Up, down, both input gradients and both weight gradients, of any K, N and type, from one table."""
    for name in ("primes", "around-two-tiles", "tail-of-tiles", "seven-rows-of-1024", "no-rows", "all-zero"):
        groups = layouts.GROUPS[name](64)
        schedule = cupy_gmm.make_schedule(backend.ints(groups.offs), groups.rows)
        before = table_of(backend, schedule).copy()
        for dtype in ("bfloat16", "float16"):
            for kn in ((40, 72), (72, 40), (29, 23)):
                case = Case(groups, kn, dtype)
                calls.mm(backend, rng, case, schedule=schedule)
                calls.mm(backend, rng, case, schedule=schedule, w_layout=layouts.transposed)
                calls.wgrad(backend, rng, case, schedule=schedule)
        assert (table_of(backend, schedule) == before).all(), "a product changed the shared table"


def test_refill(backend: Backend, rng: np.random.Generator) -> None:
    """`out=` writes new offsets into the same table; nothing of the old ones stays."""
    offs = backend.ints([50, 50, 50, 200])
    schedule = cupy_gmm.make_schedule(offs, 200)
    table = schedule.table
    for ends in ([10, 20, 30, 40], [200, 200, 200, 200], [0, 0, 0, 0], [-5, 7, 300, 1], [1, 2, 3, 200]):
        again = cupy_gmm.make_schedule(backend.ints(ends), 200, out=schedule)
        assert again is schedule
        assert again.table is table
        check_table(backend, schedule, np.array(ends), 200)
        case = Case(layouts.Groups((), 200), (24, 40), offs=np.array(ends, np.int32))
        calls.mm(backend, rng, case, schedule=schedule)
        calls.wgrad(backend, rng, case, schedule=schedule)


@pytest.mark.gpu
def test_two_streams_share_one_schedule(gpu: Backend, rng: np.random.Generator) -> None:
    """Input and weight gradient side by side, 30 times: no counter lives in the table."""
    import cupy

    groups = layouts.GROUPS["hot-60"](128)
    x = gpu.place(oracle.integers(rng, (groups.rows, 264), "bfloat16"))
    dy = gpu.place(oracle.integers(rng, (groups.rows, 520), "bfloat16"))
    w = gpu.place(oracle.integers(rng, (len(groups.sizes), 264, 520), "bfloat16"))
    spans = oracle.bounds_of(groups.offs, groups.rows)
    dx = gpu.place(oracle.expected_mm(dy.values, w.values.swapaxes(1, 2), spans, "bfloat16")).array
    dw = gpu.place(oracle.expected_wgrad(x.values, dy.values, spans, "bfloat16", len(spans))).array
    schedule = cupy_gmm.make_schedule(gpu.ints(groups.offs), groups.rows)
    gpu.synchronize()
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    results: list[list[object]] = [[], []]
    for _ in range(30):
        with streams[0]:
            results[0].append(cupy_gmm.grouped_mm(dy.array, w.array.swapaxes(1, 2), schedule))
        with streams[1]:
            results[1].append(cupy_gmm.grouped_mm_wgrad(x.array, dy.array, schedule))
    for stream in streams:
        stream.synchronize()
    assert all(gpu.same(result, dx) for result in results[0])
    assert all(gpu.same(result, dw) for result in results[1])


def test_checked_modes(backend: Backend, rng: np.random.Generator) -> None:
    """One mode raises and names what is wrong, one keeps it for later; good offsets pass in silence."""
    names = {1: "negative", 2: "decreasing", 4: "beyond"}
    device = -1 if backend.name == "cpu" else None  # where there is a GPU, it is the one that is asked unless told
    cupy_gmm.async_status(device)
    for given in offsets.ALL:
        offs = backend.ints(given.offs)
        x = backend.place(np.ones((given.rows, 8), DTYPES["bfloat16"]))
        w = backend.place(np.ones((len(given.offs), 8, 8), DTYPES["bfloat16"]))
        for run in (
            lambda check, x=x, w=w, offs=offs: cupy_gmm.grouped_mm(x.array, w.array, offs, check=check),
            lambda check, x=x, offs=offs: cupy_gmm.grouped_mm_wgrad(x.array, x.array, offs, check=check),
        ):
            run("async")
            seen = " ".join(cupy_gmm.async_status(device))
            for bit, word in names.items():
                assert (word in seen) == bool(given.status & bit), (given.why, seen)
            if given.status:
                with pytest.raises(cupy_gmm.ArgumentError, match="`offs`") as caught:
                    run("sync")
                found = re.findall(r"malformed \(([^)]*)\)", str(caught.value))
                for bit, word in names.items():
                    assert [word in text for text in found] == [bool(given.status & bit)], str(caught.value)
            else:
                run("sync")
    assert not list(cupy_gmm.async_status(device)), "reading the status forgets it"


@pytest.mark.gpu
def test_counters_of_a_schedule_are_left_as_found(gpu: Backend, rng: np.random.Generator) -> None:
    """Many products one after the other with one Schedule, of few tiles and of many, beside another stream's."""
    cupy = gpu.cupy
    sizes = (3, 300, 0, 64, 209, 256, 17, 1000)
    offs = np.cumsum(sizes).astype(np.int32)
    rows = int(offs[-1]) + 40
    schedule = cupy_gmm.make_schedule(gpu.ints(offs), rows)
    assert schedule.stream == cupy.cuda.get_current_stream().ptr
    side = cupy.cuda.Stream(non_blocking=True)
    gpu.synchronize()
    for k, n in ((64, 8), (128, 264), (192, 6000)):
        x = gpu.place(oracle.integers(rng, (rows, k), "bfloat16")).array
        w = gpu.place(oracle.integers(rng, (len(sizes), k, n), "bfloat16")).array
        gpu.synchronize()
        with side:
            beside = [cupy_gmm.grouped_mm(x, w, schedule) for _ in range(20)]
        here = [cupy_gmm.grouped_mm(x, w, schedule) for _ in range(20)]
        gpu.synchronize()
        assert table_of(gpu, schedule)[10:16].tolist() == [0] * 6
        expected = gpu.get(cupy_gmm.grouped_mm(x, w, gpu.ints(offs)))
        for made in (*here, *beside):
            assert (gpu.get(made).view(np.uint16) == expected.view(np.uint16)).all()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "sizes", [(3, 300, 0, 64, 209, 256, 17), (5, 9000, 0, 40), (0, 0)], ids=["short", "cut", "none"]
)
def test_counters_of_weight_gradients_are_left_as_found(
    sizes: tuple[int, ...], gpu: Backend, rng: np.random.Generator
) -> None:
    """As above; a long group of few tiles is cut into pieces, which count their arrivals."""
    cupy = gpu.cupy
    offs = np.cumsum(sizes).astype(np.int32)
    rows = int(offs[-1]) + 40
    schedule = cupy_gmm.make_schedule(gpu.ints(offs), rows)
    side = cupy.cuda.Stream(non_blocking=True)
    for k, n in ((64, 8), (128, 264), (520, 1000)):
        x = gpu.place(oracle.integers(rng, (rows, k), "bfloat16")).array
        dy = gpu.place(oracle.integers(rng, (rows, n), "bfloat16")).array
        gpu.synchronize()
        with side:
            beside = [cupy_gmm.grouped_mm_wgrad(x, dy, schedule) for _ in range(20)]
        here = [cupy_gmm.grouped_mm_wgrad(x, dy, schedule) for _ in range(20)]
        gpu.synchronize()
        assert not table_of(gpu, schedule)[schedule.shape.nbytes // 4 :].any()
        expected = gpu.get(cupy_gmm.grouped_mm_wgrad(x, dy, gpu.ints(offs)))
        for made in (*here, *beside):
            assert (gpu.get(made).view(np.uint16) == expected.view(np.uint16)).all()
