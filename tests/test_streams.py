"""Order and lifetime of GPU arrays, on the stand-ins of `fakes`: what is enqueued, what is kept how long."""

import gc

import ml_dtypes
import numpy as np
import pytest

from cupy_gmm import _arrays
from cupy_gmm._arrays import lifetime, locate
from cupy_gmm.errors import ArgumentError, UnsupportedError
from tests.producers import CUDA, MANAGED, PINNED, ROCM, Producer

pytest_plugins = ("tests.fakes",)  # the fixture `machine`

BF16 = np.dtype(ml_dtypes.bfloat16)
S1, S2 = 0x51, 0x52  # two side streams


def producer(**options):
    return Producer(**{"device": (CUDA, 0), **options})


# ---- which device, which stream


def test_cupy(machine):
    machine.cupy_streams = {0: S1, 1: S2}
    x = machine.cupy.ndarray((3, 4), BF16)
    w = machine.cupy.ndarray((2, 4, 5), BF16, strides=(40, -10, 2))
    site, (x_view, w_view, none) = locate(("x", x), ("w", w), ("out", None))
    assert (site.family, site.device, site.stream, site.is_cpu) == ("cupy", 0, S1, False)
    assert x_view == (x.data.ptr, (3, 4), (4, 1), "bfloat16", 0, False, x)
    assert (w_view.strides, none) == ((20, -5, 1), None)
    assert not machine.calls("record", "wait"), "arrays of one family need no ordering"
    site.hold([x_view])
    assert not lifetime.pending
    other = machine.cupy.ndarray((3,), BF16, device=1)
    assert (locate(("x", other))[0].device, locate(("x", other))[0].stream) == (1, S2)


def test_cupy_memory_between_elements(machine):
    with pytest.raises(ArgumentError, match=r"`x` starts at address 0x10001, .*its 2-byte elements: pass a"):
        locate(("x", machine.cupy.ndarray((3, 4), BF16, ptr=0x10001)))
    with pytest.raises(ArgumentError, match=r"`x` has strides of \(9, 2\) bytes"):
        locate(("x", machine.cupy.ndarray((3, 4), BF16, strides=(9, 2))))
    with pytest.raises(ArgumentError, match=r"`w` starts at address 0x20001"):
        locate(("w", machine.torch.Tensor((3,), ptr=0x20001)))
    with pytest.raises(ArgumentError, match=r"`w` starts at address"):
        locate(("w", producer(data=0x30003)))


def test_torch(machine):
    machine.torch_streams[1] = S2
    site, (view,) = locate(("x", machine.torch.Tensor((3, 4), device=1)))
    assert (site.family, site.device, site.stream) == ("torch", 1, S2)
    assert (view.shape, view.strides, view.dtype) == ((3, 4), (4, 1), "bfloat16")
    tensor, made = site.empty((5, 6), "bfloat16")
    assert (made.ptr, made.strides, made.device) == (tensor.data_ptr(), (6, 1), 1)
    assert site.scratch(100).shape == (100,)
    assert site.finish(tensor) is tensor
    assert machine.calls("torch.empty") == [("torch.empty", (5, 6), 1, S2), ("torch.empty", 100, 1, S2)]
    assert machine.current == 0


@pytest.mark.parametrize("stream, number", [(0, 1), (1, 1), (2, 2), (S1, S1)], ids=str)
def test_stream_numbers_of_dlpack(machine, stream, number):
    """The legacy stream is 1, never 0; the per-thread one is 2; any other is its handle."""
    machine.cupy_streams[0] = stream
    array = producer()
    site, (view,) = locate(("x", array))
    assert (site.family, site.stream, array.streams) == ("dlpack", stream, [number])
    assert (view.ptr, view.device) == (array.data, 0)


def test_a_producer_is_asked_on_its_own_device(machine):
    class Asks(Producer):
        def __dlpack__(self, **options):
            assert machine.current == 1
            return super().__dlpack__(**options)

    assert locate(("x", Asks(device=(CUDA, 1))))[0].device == 1
    assert machine.current == 0


def test_kinds_of_memory(machine):
    assert locate(("x", producer(device=(MANAGED, 0))))[0].device == 0
    with pytest.raises(ArgumentError, match=r"`x` is in pinned host memory: pass a copy on the device"):
        locate(("x", producer(device=(PINNED, 0))))
    with pytest.raises(UnsupportedError, match=r"`x` is on DLPack device type 10: expected type 2 \(CUDA\)"):
        locate(("x", producer(device=(ROCM, 0))))


def test_mixed_devices(machine):
    arrays = {
        "numpy": np.zeros(3, np.int32),
        "cupy": machine.cupy.ndarray((3,), BF16, device=1),
        "torch": machine.torch.Tensor((3,), device=1),
        "dlpack": producer(device=(CUDA, 1)),
        "jax": machine.jax.Array(producer(device=(CUDA, 1))),
        "host": producer(device=(1, 0)),
    }
    x = machine.cupy.ndarray((3, 4), BF16)
    for kind, offs in arrays.items():
        place = "the CPU" if kind in ("numpy", "host") else "cuda:1"
        with pytest.raises(ArgumentError, match=rf"`offs` is on {place} and `x` on cuda:0: .*move `offs` to cuda:0"):
            locate(("x", x), ("offs", offs))
        back = f"`x` is on cuda:0 and `offs` on {place}"
        with pytest.raises(ArgumentError, match=back):
            locate(("offs", offs), ("x", x))
    assert arrays["dlpack"].streams == [1], "exported as the first array, and not for a call that is refused"


# ---- order among libraries


def test_another_library_on_the_same_stream(machine):
    machine.cupy_streams[0], machine.torch_streams[0] = 0, 1  # both mean the legacy stream
    site, _ = locate(("x", machine.cupy.ndarray((3,), BF16)), ("w", machine.torch.Tensor((3,))))
    site.hold()
    assert not machine.calls("record", "wait")
    assert not lifetime.pending


@pytest.mark.parametrize("first", ["cupy", "torch"])
def test_another_library_on_another_stream(machine, first):
    machine.cupy_streams[0], machine.torch_streams[0] = S1, S2
    arrays = {"cupy": machine.cupy.ndarray((3,), BF16), "torch": machine.torch.Tensor((3,))}
    second = "torch" if first == "cupy" else "cupy"
    ours, theirs = (S1, S2) if first == "cupy" else (S2, S1)
    site, _ = locate((first, arrays[first]), (second, arrays[second]))
    (_, event, recorded), (_, waiting, awaited) = machine.calls("record", "wait")
    assert (recorded, waiting, awaited) == (theirs, ours, event)

    machine.log.clear()
    site.hold()
    ((_, done, recorded),) = machine.calls("record", "wait")
    assert recorded == ours
    (kept,) = lifetime.pending
    assert kept.owners == (arrays[second],)
    machine.unfinished.add(done)
    locate(("x", arrays[first]))
    assert lifetime.pending, "the launch still runs"
    machine.unfinished.clear()
    locate(("x", arrays[first]))
    assert not lifetime.pending


def test_an_output_of_another_library(machine):
    """The other library's stream goes on only after our write."""
    machine.torch_streams[0] = S2
    out = machine.torch.Tensor((3,))
    out.requires_grad = False
    site, _ = locate(("x", machine.cupy.ndarray((3,), BF16)), ("out", out), writable=frozenset({"out"}))
    machine.log.clear()
    site.hold()
    _, (_, event, recorded), (_, waiting, awaited) = machine.calls("record", "wait")
    assert (recorded, waiting, awaited) == (0, S2, event)


@pytest.mark.parametrize("wrap", [False, True], ids=["dlpack", "jax"])
def test_capsules_are_kept_until_the_launch_is_done(machine, wrap):
    source = producer()
    array = machine.jax.Array(source) if wrap else source
    site, views = locate(("x", machine.cupy.ndarray((3,), BF16)), ("w", array))
    assert views[1].readonly == wrap
    site.hold(views)
    ((_, done, _),) = machine.calls("record")
    machine.unfinished.add(done)
    del site, views
    gc.collect()
    lifetime.poll()
    assert (source.alive, source.returned) == (1, 0)
    machine.unfinished.clear()
    lifetime.poll()
    assert (source.alive, source.returned) == (0, 1)


def test_two_launches_of_one_call(machine):
    source = producer()
    site, _ = locate(("x", source))
    site.hold()
    site.hold()
    events = [entry[1] for entry in machine.calls("record")]
    machine.unfinished.add(events[1])
    del site, _
    lifetime.poll()
    assert source.alive == 1
    machine.unfinished.clear()
    lifetime.poll()
    assert source.returned == 1


def test_a_call_that_fails_keeps_nothing(machine):
    source = producer()
    with pytest.raises(ArgumentError):
        locate(("x", source), ("w", [1]))
    gc.collect()
    assert (source.alive, source.returned) == (0, 1)


# ---- allocation


def test_outputs_and_scratch(machine):
    machine.cupy_streams = {0: S1, 1: S2}
    for x in (machine.cupy.ndarray((3,), BF16, device=1), producer(device=(CUDA, 1))):
        site, _ = locate(("x", x))
        machine.log.clear()
        array, view = site.empty((2, 6), "float16")
        assert machine.calls("array") == [("array", (2, 6), 1, S2)], "on the device and stream of the call"
        assert (view.ptr, view.strides, view.device) == (array.data.ptr, (6, 1), 1)
        assert site.finish(array) is array
        scratch = site.scratch(1000)
        assert (scratch.ptr % 256, scratch.shape, scratch.dtype) == (0, (1000,), "uint8")
        assert machine.current == 0


def test_scratch_from_an_allocator_that_does_not_align(machine):
    served = []

    class Odd:
        def __init__(self, nbytes):
            served.append(nbytes)
            self.ptr = 0x1008

    machine.cupy.cuda.alloc = Odd
    site, _ = locate(("x", machine.cupy.ndarray((3,), BF16)))
    assert site.scratch(1000).ptr == 0x1100
    assert served == [1000, 1255]


def test_guard(machine):
    x = machine.cupy.ndarray((3,), BF16)
    site, _ = locate(("x", x))
    machine.log.clear()
    for _ in range(3):
        with site.guard():
            assert machine.current == 0
    assert machine.log == [("setDevice", 0)], "once a thread, which may have no context yet"
    machine.current = 1
    site, _ = locate(("x", x))  # of the next call
    try:
        with site.guard():
            assert machine.current == 0
            raise KeyError
    except KeyError:
        assert machine.current == 1


# ---- capture into a graph


def test_capture_with_cupy(machine):
    machine.cupy_streams[0] = S1
    machine.capturing = {S1}
    site, views = locate(("x", machine.cupy.ndarray((3,), BF16)))
    assert site.capturing()
    with pytest.raises(ArgumentError, match=r"captured into a CUDA graph.*pass `out=`, and a schedule"):
        site.empty((2, 3), "float16")
    scratch = site.scratch(1000)
    assert machine.calls("mallocAsync") == [("mallocAsync", 1000, S1)]
    assert scratch.shape == (1000,)
    site.hold([*views, scratch, None])
    site.hold([scratch])
    assert machine.calls("freeAsync") == [("freeAsync", scratch.ptr, S1)], "freed once, after the launch"


def test_capture_with_torch(machine):
    machine.torch_streams[0] = S2
    machine.capturing = {S2}
    site, _ = locate(("x", machine.torch.Tensor((3,))))
    assert not site.capturing()
    assert site.in_graph()
    site.empty((2, 3), "bfloat16")
    site.scratch(8)
    assert not machine.calls("mallocAsync")


def test_other_libraries_inside_a_capture(machine):
    """No event from outside may be waited for, and none recorded inside can be asked for."""
    machine.cupy_streams[0], machine.torch_streams[0] = S1, S2
    machine.capturing = {S1}
    source = producer()
    stored = producer()
    site, _ = locate(
        ("x", machine.cupy.ndarray((3,), BF16)),
        ("w", machine.torch.Tensor((3,))),
        ("a", source),
        ("b", machine.jax.Array(stored)),
    )
    site.hold()
    assert (source.streams, stored.streams) == ([-1], [None])
    assert not machine.calls("record", "wait")
    assert not lifetime.pending


def test_legacy_stream_is_not_asked(machine):
    machine.cupy.cuda.runtime.streamIsCapturing = None
    for stream in (0, 1):
        machine.cupy_streams[0] = stream
        assert not locate(("x", machine.cupy.ndarray((3,), BF16)))[0].capturing()


# ---- JAX on the GPU


def test_jax_result_is_ordered_and_kept(machine):
    machine.cupy_streams[0] = S1
    source = producer()
    site, (view,) = locate(("x", machine.jax.Array(source)))
    assert (site.family, view.readonly, source.streams) == ("jax", True, [S1])
    native, _ = site.empty((2, 3), "float16")
    result = site.finish(native)
    assert isinstance(result, machine.jax.Array)
    assert machine.calls("export") == [("export", 77)], "CuPy makes XLA's stream wait for its current one"
    lent = result.producer
    assert lent.data.ptr == native.data.ptr
    del site, view
    gc.collect()
    assert not lifetime.pending
    del result, lent  # JAX gives the memory back while its kernels may still read it
    gc.collect()
    (returned,) = lifetime.pending
    assert returned.owners == (native,)
    lifetime.poll()
    (fence,) = machine.jax.fences
    fence.ready = False
    lifetime.poll()
    assert lifetime.pending
    fence.ready = True
    lifetime.poll()
    assert not lifetime.pending


def test_xla_client_that_names_no_stream(machine):
    machine.cupy_streams[0], machine.jax.names_no_stream = S1, True
    site, _ = locate(("x", machine.jax.Array(producer())))
    site.finish(site.empty((2, 3), "float16")[0])
    assert machine.calls("synchronize", "export") == [("synchronize", S1), ("export", -1)]


def test_jax_result_without_elements(machine):
    site, _ = locate(("x", machine.jax.Array(producer(), "gpu:0")))
    result = site.finish(site.empty((0, 3), "float16")[0])
    assert (result.producer.shape, result.place) == ((0, 3), "gpu:0")
    assert not machine.calls("export")


def test_polling_is_left_to_one_thread(machine):
    source = producer()
    site, _ = locate(("x", source))
    site.hold()
    with lifetime._polling:
        lifetime.poll()
        assert lifetime.pending
    lifetime.poll()
    assert not lifetime.pending


def test_a_forked_child_leaves_its_parents_memory_alone(machine, monkeypatch):
    source = producer()
    site, _ = locate(("x", source))
    site.hold()
    del site
    monkeypatch.setattr(lifetime, "_orphans", orphans := [])
    lifetime._after_fork()
    assert (len(orphans), lifetime.pending, source.alive) == (1, [], 1)
    orphans.clear()


def test_views_print_without_their_owner():
    view = _arrays.View(0x1000, (3, 4), (4, 1), "bfloat16", 0, False, object())
    assert repr(view) == "View(bfloat16[3, 4], strides (4, 1), 0x1000 on 0)"
