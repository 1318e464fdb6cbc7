"""Arrays of CuPy, PyTorch and JAX on a device: order among streams, lifetimes, graphs, threads.

The call under test copies its last argument on the stream of the Site. A kernel that spins for about 50 ms in
front of what the call must wait for, or in front of the call, makes a missing order show every time.
"""

import gc
import threading
import time

import numpy as np
import pytest

from cupy_gmm._arrays import lifetime, locate
from cupy_gmm.errors import ArgumentError
from tests import apart
from tests.producers import CUDA, Producer, Wrapped

pytestmark = pytest.mark.gpu
pytest_plugins = ("tests.lateness",)  # the fixtures `run`, `late`, `copied`, `torch`, `jax`

COUNT = 1 << 20  # elements that `run` and `copied` treat
SPIN_CYCLES = 100_000_000  # about 50 ms
POISON = 0x7FE5


def half_bits(array):
    return np.asarray(array).view(np.uint16)


def torch_zeros(torch):
    return torch.zeros(COUNT, dtype=torch.float16, device="cuda:0")


def torch_bits(tensor):
    return half_bits(tensor.cpu().numpy())


# ---- order


@pytest.mark.parametrize("kind", ["legacy", "per-thread", "side"])
def test_cupy_streams(late, copied, kind):
    import cupy

    streams = {"legacy": cupy.cuda.Stream.null, "per-thread": cupy.cuda.Stream.ptds}
    stream = streams.get(kind) or cupy.cuda.Stream(non_blocking=True)
    x = cupy.zeros(COUNT, cupy.float16)
    cupy.cuda.runtime.deviceSynchronize()
    with stream:
        late(stream.ptr, x.data.ptr, 7)
        y = copied(x)
        stream.synchronize()
    assert isinstance(y, cupy.ndarray)
    assert (half_bits(cupy.asnumpy(y)) == 7).all()


@pytest.mark.parametrize("kind", ["default", "side"])
def test_torch_streams(torch, late, copied, kind):
    stream = torch.cuda.default_stream() if kind == "default" else torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x = torch_zeros(torch)
        x.requires_grad_()
        late(stream.cuda_stream, x.data_ptr(), 7)
        y = copied(x)
        stream.synchronize()
    assert isinstance(y, torch.Tensor)
    assert not y.requires_grad
    assert (torch_bits(y) == 7).all()


@pytest.mark.parametrize("kind", ["legacy", "per-thread", "side"])
def test_producers_are_told_our_stream(torch, jax, late, copied, kind):
    """A tensor and a jax.Array behind `__dlpack__` alone; PyTorch knows no per-thread stream."""
    import cupy

    streams = {"legacy": cupy.cuda.Stream.null, "per-thread": cupy.cuda.Stream.ptds}
    stream = streams.get(kind) or cupy.cuda.Stream(non_blocking=True)
    theirs = torch.cuda.Stream()
    with stream:
        wrapped = Wrapped(jax.numpy.full(COUNT, 2, "float16"))
        y = copied(cupy.zeros(4, cupy.float16), wrapped)
        stream.synchronize()
        assert (cupy.asnumpy(y) == 2).all()
        assert wrapped.streams == [stream.ptr or 1]
        if kind != "per-thread":
            with torch.cuda.stream(theirs):
                x = torch_zeros(torch)
                late(theirs.cuda_stream, x.data_ptr(), 9)
                y = copied(Wrapped(x))
            stream.synchronize()
            assert (half_bits(cupy.asnumpy(y)) == 9).all()


@pytest.mark.parametrize("first", ["cupy", "torch"])
def test_two_libraries_on_two_streams(torch, run, late, copied, first):
    """The second argument is ready late, read late, dropped at once, its memory poisoned by its library."""
    import cupy

    ours, theirs = cupy.cuda.Stream(non_blocking=True), torch.cuda.Stream()
    with ours, torch.cuda.stream(theirs):
        for value in range(1, 6):
            if first == "cupy":
                w = torch_zeros(torch)
                late(theirs.cuda_stream, w.data_ptr(), value)
                run("spin", ours.ptr, count=2 * SPIN_CYCLES)
                y = copied(cupy.zeros(4, cupy.float16), w)
                del w
                again = torch_zeros(torch)
                run("fill", theirs.cuda_stream, target=again.data_ptr(), value=POISON)
                ours.synchronize()
                found = cupy.asnumpy(y)
            else:
                w = cupy.zeros(COUNT, cupy.float16)
                late(ours.ptr, w.data.ptr, value)
                run("spin", theirs.cuda_stream, count=2 * SPIN_CYCLES)
                y = copied(torch_zeros(torch), w)
                del w
                again = cupy.zeros(COUNT, cupy.float16)
                run("fill", ours.ptr, target=again.data.ptr, value=POISON)
                theirs.synchronize()
                found = y.cpu().numpy()
            assert (half_bits(found) == value).all()
            del again


def test_an_output_of_another_library(torch, late, copied):
    import cupy

    ours, theirs = cupy.cuda.Stream(non_blocking=True), torch.cuda.Stream()
    with ours, torch.cuda.stream(theirs):
        out = torch_zeros(torch)
        x = cupy.zeros(COUNT, cupy.float16)
        late(ours.ptr, x.data.ptr, 5)
        assert copied(x, out=out) is out
        later = out.clone()
        theirs.synchronize()
    assert (torch_bits(later) == 5).all()


# ---- JAX


@pytest.mark.parametrize("kind", ["legacy", "side"])
def test_jax_arrays(jax, run, copied, kind):
    """Inputs that JAX still computes, results that it uses at once, on a CuPy stream that lags behind."""
    import cupy

    stream = cupy.cuda.Stream.null if kind == "legacy" else cupy.cuda.Stream(non_blocking=True)
    big = jax.numpy.full((4096, 4096), 2.0**-12, "float16")
    chain = jax.jit(lambda b, v: jax.numpy.full(COUNT, 1, "float16") * (b @ b @ b)[0, 0] * 4096 * v)
    with stream:
        results = []
        for value in range(40):
            run("spin", stream.ptr, count=SPIN_CYCLES // 50)
            y = copied(chain(big, float(value)))
            assert isinstance(y, jax.Array)
            results.append(y + 1)
            del y
    for value, result in enumerate(results):
        assert (np.asarray(result) == value + 1).all()


def test_memory_that_jax_gives_back_is_not_reused_early(jax, copied):
    """JAX reads a result of ours late, behind a long computation, after the array object has gone."""
    import cupy

    slow = jax.jit(lambda b: jax.lax.fori_loop(0, 60, lambda _, c: (c @ b) * 0.5, b))
    late_sum = jax.jit(lambda y, wait: y + wait[0, 0] * 0)
    big = jax.numpy.full((4096, 4096), 2.0**-12, "float32")
    slow(big).block_until_ready()
    for value in range(1, 6):
        y = copied(jax.numpy.full(COUNT, value, "float16"))
        result = late_sum(y, slow(big).astype("float16"))
        del y
        gc.collect()
        for _ in range(8):  # CuPy's pool would serve the same block
            cupy.full(COUNT, 31.0, cupy.float16)
            copied(jax.numpy.full(COUNT, 47, "float16"))
        assert (np.asarray(result) == value).all()
    deadline = time.monotonic() + 30
    while lifetime.pending and time.monotonic() < deadline:
        cupy.cuda.runtime.deviceSynchronize()
        time.sleep(0.01)
        lifetime.poll()
    assert not lifetime.pending, "and in the end it is given back"


def test_jax_details(jax):
    x = jax.numpy.zeros((3, 4), "bfloat16")
    site, (view,) = locate(("x", x))
    assert (site.family, view.dtype, view.shape, view.strides) == ("jax", "bfloat16", (3, 4), (4, 1))
    for shape in ((0, 4), (4, 0)):
        result = site.finish(site.empty(shape, "bfloat16")[0])
        assert (result.shape, result.dtype, result.devices()) == (shape, "bfloat16", x.devices())
    with pytest.raises(ArgumentError, match=r"`out` is a jax\.Array, which nothing may change"):
        locate(("x", x), ("out", x), writable=frozenset({"out"}))
    on_cpu = jax.device_put(x, jax.devices("cpu")[0])
    with pytest.raises(ArgumentError, match="`offs` is on the CPU and `x` on cuda:0"):
        locate(("x", x), ("offs", on_cpu))


# ---- what is read


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int32"])
def test_element_types(torch, name):
    tensor = torch.zeros(8, 6, device="cuda").to(getattr(torch, name)).mT[1:, ::2]
    arrays = [tensor]
    try:
        tensor.__dlpack__(max_version=(1, 1))
        arrays.append(Wrapped(tensor))
    except (BufferError, RuntimeError) as error:
        print(f"this PyTorch does not export {name}: {error}")
    for array in arrays:
        _, (view,) = locate(("x", array))
        assert (view.ptr, view.dtype, view.strides) == (tensor.data_ptr(), name, tensor.stride())


def test_negative_strides():
    import cupy

    x = cupy.arange(24, dtype=cupy.float16).reshape(4, 6)
    for view in (x[::-1], x[:, ::-1], cupy.broadcast_to(x[:1], (9, 6))):
        for array in (view, Wrapped(view)):
            refused = ""
            try:
                _, (found,) = locate(("x", array))
            except ArgumentError as error:  # CuPy 14 exports a stride of -1 as one near 2**63
                refused = str(error)
            if refused:
                assert array is not view
                assert "its library exports this view wrongly" in refused
                continue
            assert found.ptr == view.data.ptr
            assert tuple(2 * step for step in found.strides) == view.strides


def test_offs_on_the_cpu(torch):
    import cupy

    x = cupy.zeros((4, 4), cupy.float16)
    for offs in (np.zeros(2, np.int32), torch.zeros(2, dtype=torch.int32), Wrapped(np.zeros(2, np.int32))):
        with pytest.raises(ArgumentError, match="`offs` is on the CPU and `x` on cuda:0"):
            locate(("x", x), ("offs", offs))
        with pytest.raises(ArgumentError, match="`x` is on cuda:0 and `offs` on the CPU"):
            locate(("offs", offs), ("x", x))


# ---- lifetime, graphs, threads


def test_a_capsule_lives_until_its_launch_is_done(run, copied):
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        memory = cupy.full(COUNT, 3, cupy.float16)
        source = Producer((COUNT,), data=memory.data.ptr, device=(CUDA, 0))
        gc.collect()
        run("spin", stream.ptr, count=4 * SPIN_CYCLES)
        y = copied(source)
        lifetime.poll()
        assert (source.alive, stream.done) == (1, False)
        stream.synchronize()
        assert source.alive == 1
        lifetime.poll()
        assert (source.alive, source.returned) == (0, 1)
        assert (cupy.asnumpy(y) == 3).all()


def test_capture_with_cupy(run):
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    x, out = cupy.zeros(COUNT, cupy.float16), cupy.zeros(COUNT, cupy.float16)
    cupy.cuda.runtime.deviceSynchronize()
    with stream:
        stream.begin_capture()
        site, views = locate(("x", x), ("out", out), writable=frozenset({"out"}))
        with pytest.raises(ArgumentError, match="pass `out=`"):
            site.empty((4,), "float16")
        scratch = site.scratch(2 * COUNT)
        run("copy", site.stream, views[0].ptr, scratch.ptr)
        run("copy", site.stream, scratch.ptr, views[1].ptr)
        site.hold([scratch])
        graph = stream.end_capture()
        for value in range(1, 6):
            x.fill(value)
            graph.launch()
            assert (cupy.asnumpy(out) == value).all()


def test_capture_with_torch(torch, copied):
    x = torch_zeros(torch)
    copied(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = copied(x)
    for value in range(1, 6):
        x.fill_(value)
        graph.replay()
        assert bool((y == value).all())


def test_polling_does_not_end_a_capture(run, copied):
    import cupy

    side, stream = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
    memory = cupy.zeros(COUNT, cupy.float16)
    x, out = cupy.ones(COUNT, cupy.float16), cupy.zeros(COUNT, cupy.float16)
    cupy.cuda.runtime.deviceSynchronize()
    with side:
        run("spin", side.ptr, count=4 * SPIN_CYCLES)
        copied(Producer((COUNT,), data=memory.data.ptr, device=(CUDA, 0)))
    assert lifetime.pending
    with stream:
        stream.begin_capture(mode=cupy.cuda.runtime.streamCaptureModeGlobal)
        copied(x, out=out)
        graph = stream.end_capture()
        graph.launch()
        assert (cupy.asnumpy(out) == 1).all()
    side.synchronize()
    lifetime.poll()


def test_first_cuda_action_in_a_fresh_thread(torch):
    program = """
import threading
import torch
x = torch.ones(4, dtype=torch.float16, device="cuda")

def work():
    from cuda.bindings import driver
    from cupy_gmm._arrays import locate
    site, (view,) = locate(("x", x))
    with site.guard():
        status, context = driver.cuCtxGetCurrent()
        assert int(status) == 0 and int(context), (status, context)
    assert site.scratch(100).ptr % 256 == 0
    done.append(True)

done = []
thread = threading.Thread(target=work)
thread.start()
thread.join()
assert done
"""
    apart.python(program)


def test_threads(run, copied):
    """Eight threads, each with a stream of its own."""
    import cupy

    wrong: list[object] = []

    def work(number: int) -> None:
        try:
            with cupy.cuda.Stream(non_blocking=True) as stream:
                for round_ in range(20):
                    x = cupy.full(COUNT, number * 20 + round_, cupy.float16)
                    source = Producer((COUNT,), data=x.data.ptr, device=(CUDA, 0))
                    y = copied(x if round_ % 2 else source)
                    stream.synchronize()
                    if not (cupy.asnumpy(y) == number * 20 + round_).all():
                        wrong.append((number, round_))
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_host_cost_of_three_cupy_arrays():
    import cupy

    named = [(name, cupy.zeros((8, 8, 8), cupy.float16)) for name in ("x", "w", "offs")]
    best = min(_seconds(lambda: locate(*named), 1_000) for _ in range(100))  # short, as other tests run beside it
    print(f"locate of three CuPy arrays: {best * 1e6:.2f} us")
    assert best < 6e-6


def _seconds(call, times):
    start = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start) / times
