"""The execute stage as XLA calls it: what it finds in a frame, what it remembers, what it does when something fails."""

import ctypes
import gc
import types

import numpy as np
import pytest

pytest.importorskip("jax", reason="JAX is not installed")

from cupy_gmm import _device, _launch
from cupy_gmm.jax import _abi, _execute, _handler
from tests.ffi_frames import Call, Frame

TEXT = "ein längerer Text ".encode() * 9


class Recorded(_execute.Launches):
    """Two launches a call, that say so."""

    def __init__(self, name):
        super().__init__()
        self.name, self.log = name, []

    def made(self, stream, operands, results):
        self.log.append(("made", stream, operands, results))
        said = [("launch", number, stream, *operands, *results) for number in range(2)]
        return tuple(lambda each=each: self.log.append(each) for each in said)


def executing(ready, devices=(7,)):
    """The execute stage with these launches; nothing may be asked to be prepared."""
    turns = iter([*devices] * 100)
    return _execute.execute(ready, lambda *_: pytest.fail("prepared"), lambda: lambda: next(turns))


@pytest.mark.parametrize("operands, results", [(3, 2), (1, 1), (2, 1), (1, 5), (2, 3), (0, 1), (16, 16)])
def test_arrays_are_found_in_their_order(operands, results):
    """As many as there are; the same ones are made ready once, on each stream."""
    launches = Recorded("a")
    run = executing({(TEXT, 7): launches})
    first = [0x7F00_0000_1000 + 256 * at for at in range(operands)]
    second = [0x7F01_0000_2000 + 256 * at for at in range(results)]
    wanted = []
    for context in (1, 1, 2, 1, 2):
        call = Call(TEXT, first, second, context)
        assert run(call.address) == 0
        assert not call.errors
        assert call.asked == [(32, context)]
        stream = 0x5000 + context
        if len(wanted) in (0, 5):  # a stream for the first time
            wanted.append(("made", stream, first, second))
        wanted += [("launch", number, stream, *first, *second) for number in range(2)]
    assert launches.log == wanted
    assert set(launches.known) == {(0x5000 + context, *first, *second) for context in (1, 2)}


@pytest.mark.parametrize("place", range(5))
def test_an_array_elsewhere_is_another_set(place):
    launches = Recorded("a")
    run = executing({(TEXT, 7): launches})
    addresses = [4096 * at for at in range(1, 6)]
    for moved in (0, 64, 0, 128, 64):
        there = addresses.copy()
        there[place] += moved
        assert run(Call(TEXT, there[:3], there[3:]).address) == 0
        assert launches.log[-1] == ("launch", 1, 0x5001, *there)
    assert [entry[0] for entry in launches.log].count("made") == 3


def test_text_and_device_choose_the_launches():
    """By all of the text, and where nothing was made ready it is asked for and not asked again."""
    made = {key: Recorded(key) for key in ((TEXT, 0), (TEXT + b".", 0), (TEXT, 1))}
    ready, prepared = {}, []

    def prepare(text, device):
        prepared.append((text, device))
        ready[text, device] = made[text, device]
        return made[text, device]

    turns = iter([0, 1, 0, 0, 1])
    run = _execute.execute(ready, prepare, lambda: lambda: next(turns))
    for text in (TEXT, TEXT, TEXT + b".", TEXT, TEXT):
        assert run(Call(text, [256], [512]).address) == 0
    assert prepared == [(TEXT, 0), (TEXT, 1), (TEXT + b".", 0)]
    assert {key: len(each.log) for key, each in made.items()} == {(TEXT, 0): 5, (TEXT + b".", 0): 3, (TEXT, 1): 5}


def test_what_is_remembered_is_bounded(remember_only):
    remember_only(3)
    launches = Recorded("a")
    run = executing({(TEXT, 7): launches})
    for at in range(8):
        assert run(Call(TEXT, [256 * (at + 1)], [256]).address) == 0
        assert 0 < len(launches.known) <= 3


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt("stop"), SystemExit("out")])
@pytest.mark.parametrize("where", ["made", "launch"])
def test_an_error_reaches_xla_and_the_next_call_runs(error, where):
    """Whatever fails, and wherever."""

    def fail():
        raise error

    class Failing(Recorded):
        def made(self, *given):
            if armed:
                return (fail,) if where == "launch" else fail()
            return super().made(*given)

    launches, armed = Failing("a"), True
    run = executing({(TEXT, 7): launches})
    for armed in (True, True, False):
        launches.known.clear()
        call = Call(TEXT, [256], [512])
        assert run(call.address) == (0xE001 if armed else 0)
        assert call.errors == ([(_abi.INTERNAL, f"cupy_gmm: {error}")] if armed else [])
    assert [entry[0] for entry in launches.log] == ["made", "launch", "launch"]


def test_without_a_stream_nothing_is_launched():
    launches = Recorded("a")
    run = executing({(TEXT, 7): launches})
    streamless = Call(TEXT, [256], [512], context=0)
    assert run(streamless.address) == 0xE001
    assert streamless.errors == [
        (_abi.UNIMPLEMENTED, "cupy_gmm: XLA gave no stream to launch on: expected a call on a CUDA device.")
    ]
    assert not launches.log
    assert run(Call(TEXT, [256], [512]).address) == 0


@pytest.mark.parametrize("facts", [{"api_bytes": 80}, {"version": (1, 0)}], ids=["functions", "version"])
def test_another_interface_is_refused(facts):
    """Also where no instantiate stage has looked: nothing is asked of its functions, nothing is launched."""
    launches = Recorded("a")
    call = Call(TEXT, [256], [512], **facts)
    assert executing({(TEXT, 7): launches})(call.address) == 0xE001
    ((code, text),) = call.errors
    assert code == _abi.UNIMPLEMENTED
    assert "XLA's foreign function interface" in text
    assert not call.asked
    assert not launches.log


def test_more_arrays_than_any_call_has():
    call = Call(TEXT, [256] * 17, [512])
    assert executing({(TEXT, 7): Recorded("a")})(call.address) == 0xE001
    assert len(call.errors) == 1


def test_questions_of_xla_before_any_call():
    """Our version and traits: asked with a frame that has nothing else."""
    metadata = np.zeros(8, np.uint64)
    asked = np.array([32, _abi.METADATA, 0, metadata.ctypes.data], np.uint64)
    frame = Frame()
    frame.put("extension_start", asked.ctypes.data)
    assert executing({})(frame.address) == 0
    assert metadata.view(np.int32)[_abi.METADATA_FIELDS["traits"] // 4] == _abi.COMMAND_BUFFER_COMPATIBLE


def test_one_device_is_not_asked_for(monkeypatch):
    """The ordinal of a lone device is 0; with several, CUDA says which is current."""
    monkeypatch.setattr(_device, "import_cupy", lambda: pytest.fail("asked"))
    monkeypatch.setattr(_device, "count", lambda: 1)
    which = _handler._which()
    assert [which() for _ in range(3)] == [0, 0, 0]

    class Runtime:
        getDevice = staticmethod(lambda: 5)

    monkeypatch.setattr(_device, "count", lambda: 2)
    cupy = type("cupy", (), {"cuda": type("cuda", (), {"runtime": Runtime})})
    monkeypatch.setattr(_device, "import_cupy", lambda: cupy)
    assert _handler._which()() == 5


def test_a_launch_that_repeats_keeps_what_the_kernel_is_given(monkeypatch):
    """Each its own parameters, for as long as it lives, whatever else is launched meanwhile."""
    seen = []

    def launch_kernel(*given):
        assert given[10] == 0
        pointer = ctypes.c_uint64.from_address(given[9]).value
        seen.append((*given[:9], ctypes.string_at(pointer, 12)))

    driver, runtime = types.SimpleNamespace(launchKernel=launch_kernel), types.SimpleNamespace(memsetAsync=print)
    monkeypatch.setattr(_launch, "_cuda", lambda: types.SimpleNamespace(driver=driver, runtime=runtime))
    kernel = _launch.Kernel(0xF00, (2, 3, 4), 384, 1 << 16)
    texts = [b"%012d" % number for number in range(40)]
    again = [_launch.ready(kernel, 0x50 + number, text) for number, text in enumerate(texts)]
    gc.collect()
    kept = [bytes(12) for _ in range(1000)]
    for _ in range(2):
        for launch in again:
            launch()
        _launch.enqueue(kernel, 1, kept[0])
    wanted = [(0xF00, 2, 3, 4, 384, 1, 1, 1 << 16, 0x50 + number, text) for number, text in enumerate(texts)]
    assert seen == [*wanted, (0xF00, 2, 3, 4, 384, 1, 1, 1 << 16, 1, bytes(12))] * 2


def test_zeroes_that_repeat(monkeypatch):
    seen = []
    runtime = types.SimpleNamespace(memsetAsync=lambda *given: seen.append(given))
    monkeypatch.setattr(_launch, "_cuda", lambda: types.SimpleNamespace(runtime=runtime))
    again = _launch.zeroing(0x1000, 24, 0x50)
    assert not seen
    again()
    again()
    _launch.zero(0x1000, 24, 0x50)
    assert seen == [(0x1000, 0, 24, 0x50)] * 3
