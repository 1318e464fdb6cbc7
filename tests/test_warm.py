"""The warm path on the stand-ins of `fakes`: it enqueues what the general path does, and leaves to it all the rest.

A deed is one way to depart from a call that is warm. Whatever the deed, the log of the machine must be the one of the
general path alone; and each part of the key and each condition of `_warm.call`, taken away, must show in some deed.
"""

import ast
import copy
import functools
import inspect
import itertools
import threading
import types
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import cupy_gmm
from cupy_gmm import _arrays, _call, _device, _launch, _plan, _schedule, _table, _tensormap, _warm, ops
from cupy_gmm._arrays import lifetime
from tests import departures
from tests.departures import BASES, DEEDS, STREAM, Deed, Given

pytest_plugins = ("tests.fakes",)  # the fixture `machine`


class NoneSpare(list):
    """Every launch takes a fresh block of zeros, so that the log shows its arguments alone."""

    def pop(self, *_: Any) -> Any:
        raise IndexError


@pytest.fixture(params=["sm_80", "sm_90"])
def gpu(request: pytest.FixtureRequest, machine: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The machine, with kernels that are only names."""

    def function(*names: Any) -> Any:
        return types.SimpleNamespace(handle=zlib.crc32(repr(names).encode()))

    def encode(shape: _tensormap.MapShape, address: int) -> bytes:
        return repr((zlib.crc32(repr(shape).encode()), address)).encode().ljust(_tensormap.MAP_BYTES)

    monkeypatch.setattr(_device, "info", lambda ordinal: _device.typical(request.param))
    monkeypatch.setattr(_plan, "_load", lambda variant, device: (function(variant.symbol, device), 128))
    monkeypatch.setattr(_launch, "unit_function", lambda unit, symbol, device, smem=0: function(unit, symbol, device))
    monkeypatch.setattr(_tensormap.MapShape, "encode", encode)
    new_block = _launch._new_block
    monkeypatch.setattr(_launch, "_spare", NoneSpare())
    monkeypatch.setattr(_launch, "_new_block", lambda room=0: new_block())  # which the log reads to the end
    monkeypatch.setattr(_table, "_fill", functools.lru_cache(_table._fill.__wrapped__))
    monkeypatch.setattr(_call, "plans", {})
    monkeypatch.setattr(_device, "_forgetters", [])
    machine.located = 0
    locate = _arrays.locate

    def counted(*named: Any, **options: Any) -> Any:
        machine.located += 1
        return locate(*named, **options)

    monkeypatch.setattr(_arrays, "locate", counted)
    machine.arch = request.param
    return machine


# ---- the machine's log


def enqueued(gpu: Any, base: Callable[[Any], Given], do: Callable[[Any, Given], None]) -> tuple[Any, list[Any]]:
    """What a call gives or raises, and what it makes of the machine, all addresses counted from the same start."""
    gpu.current, gpu.cupy_streams = 0, {0: 0, 1: STREAM + 1}
    gpu.capturing.clear()
    lifetime.thread.bound = True
    given = base(gpu)
    do(gpu, given)
    gpu.addresses = itertools.count(0x10000000, 0x10000)
    gpu.log.clear()
    gpu.located = 0
    try:
        result = given.run()
    except Exception as error:
        return repr(error), list(gpu.log)
    if result is given.options.get("out"):
        return "out", list(gpu.log)
    if isinstance(result, gpu.torch.Tensor):
        return (result.shape, result.dtype, result.data_ptr()), list(gpu.log)
    return (type(result), result.shape, result.dtype, result.data.ptr), list(gpu.log)


def nothing(gpu: Any, given: Given) -> None:
    pass


def alone(gpu: Any, base: Callable[[Any], Given], do: Callable[[Any, Given], None]) -> tuple[Any, list[Any]]:
    """`enqueued` without the warm path, and with a plan of its own, which was made before."""
    _call.plans.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "_warm", types.SimpleNamespace(call=lambda *_: (None, None)))
        enqueued(gpu, base, do)
        return enqueued(gpu, base, do)


def check(gpu: Any, deeds: list[Deed], references: dict[str, Any]) -> None:
    """Each deed after its call has become warm; AssertionError when one shows."""
    for each in deeds:
        for _ in range(3):
            assert enqueued(gpu, each.base, nothing) == references[each.base.__name__], each.base
        assert gpu.located == 0, f"{each.base.__name__} is not warm"
        for _ in range(3):
            found = enqueued(gpu, each.base, each.do)
            assert found == references[str(each)], str(each)
        assert gpu.located == each.general or "Error" in str(found[0]), f"{each} takes the wrong path"


def references(gpu: Any) -> dict[str, Any]:
    found = {base.__name__: alone(gpu, base, nothing) for base in BASES}
    found |= {str(each): alone(gpu, each.base, each.do) for each in DEEDS}
    assert len(found) == len(BASES) + len(DEEDS)
    return found


# ---- tests


@pytest.mark.parametrize("base", BASES, ids=lambda base: base.__name__)
def test_a_known_call_enqueues_the_same(base: Callable[[Any], Given], gpu: Any) -> None:
    outcome, log = alone(gpu, base, nothing)
    assert sum(entry[0] == "launch" for entry in log) == (1 if "scheduled" in base.__name__ else 2)
    for turn in range(4):
        assert enqueued(gpu, base, nothing) == (outcome, log)
        assert gpu.located == (turn == 0), f"call {turn} takes the wrong path"
    assert len(_warm.entries) == 1


@pytest.mark.parametrize("base", [departures.forward_scheduled_here, departures.gradient_scheduled_here])
def test_counters_in_the_schedule_need_no_memset(base: Callable[[Any], Given], gpu: Any) -> None:
    kinds = [entry[0] for entry in alone(gpu, base, nothing)[1]]
    assert kinds == (["launch"] if gpu.arch == "sm_90" else ["alloc", "memset", "launch"])


def test_every_departure_is_seen(gpu: Any) -> None:
    check(gpu, DEEDS, references(gpu))
    raised = [each for each in DEEDS if "Error" in str(alone(gpu, each.base, each.do)[0])]
    assert len(raised) > 15, "deeds that raise must raise on the warm path as well"


def mutants(source: types.ModuleType, function: str) -> dict[str, types.CodeType]:
    """The module without one part of the key, or without one condition, of a function."""
    tree = ast.parse(inspect.getsource(source))
    body = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function)
    found = {}
    for node in ast.walk(body):
        parts, without = [], None
        if isinstance(node, ast.BoolOp):
            parts, without = node.values, ast.Constant(isinstance(node.op, ast.And))
        elif isinstance(node, ast.Tuple) and len(node.elts) > 3:
            parts, without = node.elts, ast.Constant(0)
        for index, part in enumerate(parts):
            parts[index] = without
            name = f"line {part.lineno}: {ast.unparse(part)}"
            found[name] = compile(ast.fix_missing_locations(copy.deepcopy(tree)), f"{function}, mutated", "exec")
            parts[index] = part
    return found


# Mutants that change nothing that is promised, and why.
EQUIVALENT = {
    "op": "w has three axes and dy has two",
    "stream not in lifetime.LEGACY": "`captured` asks so too: this spares the call",
}
EQUIVALENT_OFF_HOPPER = {"schedule.stream != stream": "no portable kernel counts tickets in a Schedule"}


@pytest.mark.parametrize("source, function", [(_warm, "call"), (_call, "key")], ids=["call", "key"])
def test_mutants_are_noticed(
    source: types.ModuleType, function: str, gpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = references(gpu)
    unnoticed = []
    codes = mutants(source, function)
    for name, code in codes.items():
        module: Any = types.ModuleType(source.__name__)
        module.__package__ = "cupy_gmm"
        exec(code, module.__dict__)
        monkeypatch.setattr(ops, source.__name__.removeprefix("cupy_gmm."), module)
        monkeypatch.setattr(_warm, "entries", {})
        try:
            check(gpu, DEEDS, expected)
        except Exception:
            continue
        unnoticed.append(name)
    assert len(codes) > 15
    allowed = EQUIVALENT if gpu.arch == "sm_90" else EQUIVALENT | EQUIVALENT_OFF_HOPPER
    assert {name.split(": ")[1] for name in unnoticed} <= set(allowed), unnoticed


@pytest.mark.parametrize("part", range(4))
def test_what_a_plan_takes_from_a_schedule(part: int, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutants of `_schedule.facts`, one part missing."""
    expected = references(gpu)
    facts = _schedule.facts
    monkeypatch.setattr(_schedule, "facts", lambda given: (*facts(given)[:part], 0, *facts(given)[part + 1 :]))
    with pytest.raises(AssertionError):
        check(gpu, DEEDS, expected)


# ---- what is kept, and for how long


def test_entries_are_bounded(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_warm, "MAX_ENTRIES", 3)
    monkeypatch.setattr(_call, "MAX_PLANS", 3)
    deeds = [each for each in DEEDS if each.base is departures.forward and not each.general]
    for _ in range(2):
        for each in deeds:
            assert enqueued(gpu, each.base, each.do) == alone(gpu, each.base, each.do), str(each)
            assert len(_warm.entries) <= 3
            assert len(_call.plans) <= 3
    assert len(deeds) > 10


def test_nothing_to_compute_is_not_kept(gpu: Any) -> None:
    def no_columns(gpu: Any, given: Given) -> None:
        given.b = departures.array(gpu, 2, (departures.GROUPS, departures.K, 0))

    for _ in range(3):
        outcome, _ = enqueued(gpu, departures.forward, no_columns)
        assert outcome[1] == (departures.ROWS, 0)
        assert gpu.located == 1
    assert not _warm.entries


def test_a_forked_child_knows_no_call(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the handler of a fork does, without the fork."""
    forgetters: list[Callable[[], object]] = []
    monkeypatch.setattr(_device, "_forgetters", forgetters)
    module: Any = types.ModuleType("cupy_gmm._warm")
    module.__package__ = "cupy_gmm"
    exec(inspect.getsource(_warm), module.__dict__)
    monkeypatch.setattr(ops, "_warm", module)
    for _ in range(2):
        enqueued(gpu, departures.forward, nothing)
    assert (gpu.located, len(module.entries)) == (0, 1)
    for clear in forgetters:
        clear()
    enqueued(gpu, departures.forward, nothing)
    assert gpu.located == 1


def test_foreign_memory_is_let_go(gpu: Any) -> None:
    """A program that mixes libraries keeps an array of another one no longer than without the warm path."""
    for _ in range(2):
        enqueued(gpu, departures.forward, nothing)
    lifetime.pending.append(lifetime.Launched(0, STREAM, (object(),)))
    enqueued(gpu, departures.forward, nothing)
    assert (gpu.located, lifetime.pending) == (0, [])


# ---- memory and threads


@pytest.mark.parametrize("warm", [False, True])
def test_any_allocator(warm: bool, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The result takes 16-byte stores and the scratch has whole parts, wherever the user's memory begins."""
    given = departures.forward(gpu)
    if warm:
        given.run()
    for step in (8, 16, 24, 128, 255 * 8):
        gpu.addresses = itertools.count(0x10000000 + step, 0x10000)
        gpu.log.clear()
        gpu.located = 0
        if not warm:
            _warm.entries.clear()
        result = given.run()
        assert gpu.located == (not warm)
        assert result.data.ptr % 16 == 0
        _, zeroed = (int.from_bytes(gpu.calls("launch")[0][-1][at : at + 8], "little") for at in (16, 24))
        assert zeroed % 256 == 0
        sizes = [entry[1] for entry in gpu.calls("alloc")]
        assert sizes[-1] - 255 == sizes[-2]


def test_memory_that_is_not_there(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The allocator's own error comes through, nothing is launched, and the next call is as good as any."""
    expected = alone(gpu, departures.forward_out, nothing)
    for _ in range(2):
        enqueued(gpu, departures.forward_out, nothing)

    def full(nbytes: int) -> None:
        raise MemoryError("no more")

    with monkeypatch.context() as patch:
        patch.setattr(_warm, "_cupy", _warm._cupy._replace(alloc=full))
        assert enqueued(gpu, departures.forward_out, nothing) == ("MemoryError('no more')", [])
    assert enqueued(gpu, departures.forward_out, nothing) == expected
    assert gpu.located == 0


@pytest.mark.parametrize("remembered", [False, True])
def test_a_launch_inside_a_launch(remembered: bool, gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal handler, or another thread, launches just before the driver reads: each has its own arguments."""

    def packed(launches: Any, stream: int, *addresses: int) -> None:
        _launch.enqueue(launches._kernel, stream, launches._pack(*addresses))

    if not remembered:
        monkeypatch.setattr(_launch.Launcher, "__call__", packed)
    monkeypatch.setattr(_launch, "_spare", [])
    inner = _launch.Kernel(7, (1, 1, 1), 32, 0)
    driver = gpu.cupy.cuda.driver
    launch = driver.launchKernel

    def interrupted(handle: int, *rest: int) -> None:
        if handle != 7:
            _launch.enqueue(inner, 0, b"\x07" * 200)
        launch(handle, *rest)

    for _ in range(2):
        departures.forward(gpu).run()
    monkeypatch.setattr(_launch, "_spare", NoneSpare())
    _, expected = enqueued(gpu, departures.forward, nothing)
    monkeypatch.setattr(_launch, "_spare", [])
    monkeypatch.setattr(driver, "launchKernel", interrupted)
    for _ in range(3):
        _, found = enqueued(gpu, departures.forward, nothing)
    launches = [entry for entry in found if entry[0] == "launch"]
    assert [entry[1] for entry in launches[::2]] == [7, 7]
    wanted = [entry for entry in expected if entry[0] == "launch"]
    for got, want in zip(launches[1::2], wanted, strict=True):
        assert got[:-1] == want[:-1]
        assert got[-1].startswith(want[-1])
    assert len(_launch._spare) == (1 if remembered else 2)


@pytest.mark.parametrize("base", [departures.forward_out, departures.forward_scheduled_here])
def test_many_threads(
    base: Callable[[Any], Given], gpu: Any, remember_only: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight threads repeat eight calls: every launch has the arguments of one of them, none of two."""
    monkeypatch.setattr(_launch, "_spare", [])
    remember_only(5)  # so that what is known comes and goes
    calls = []
    for number in range(8):
        given = base(gpu)
        given.a = departures.array(gpu, 0x100 + number, (departures.ROWS, departures.K))
        given.options["out"] = departures.array(gpu, 0x200 + number, (departures.ROWS, departures.N))
        calls.append(given)
    for given in calls * 2:
        given.run()
    gpu.log.clear()
    threads = [threading.Thread(target=lambda given=given: [given.run() for _ in range(50)]) for given in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    products = [entry[-1] for entry in gpu.calls("launch") if entry[5] != _table.THREADS]
    maps = {"sm_80": 0, "sm_90": 19}  # tensor maps stand in front
    skip = maps[gpu.arch] * _tensormap.MAP_BYTES
    pairs = {
        (int.from_bytes(p[skip : skip + 8], "little"), int.from_bytes(p[skip + 16 : skip + 24], "little"))
        for p in products
    }
    assert len(products) == 400
    assert pairs == {(given.a.data.ptr, given.options["out"].data.ptr) for given in calls}


def test_a_refill_is_packed_once(gpu: Any) -> None:
    schedule = cupy_gmm.make_schedule(departures.array(gpu, 3, (departures.GROUPS,), departures.INT32), departures.ROWS)
    before = _table._fill.cache_info()
    for place in (3, 6):
        offs = departures.array(gpu, place, (departures.GROUPS,), departures.INT32)
        assert cupy_gmm.make_schedule(offs, departures.ROWS, out=schedule) is schedule
    assert _table._fill.cache_info().misses == before.misses
    first, *_, last = (entry[-1] for entry in gpu.calls("launch"))
    assert first[8:] == last[8:]
    assert first != last
