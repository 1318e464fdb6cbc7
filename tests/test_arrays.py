"""`locate`, `host` and Site on the CPU, for the arrays of every library that is installed."""

import gc

import ml_dtypes
import numpy as np
import pytest

from cupy_gmm import _arrays
from cupy_gmm._arrays import locate
from cupy_gmm.errors import ArgumentError, UnsupportedError
from tests import apart
from tests.producers import Producer, Wrapped


def bits(array):
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


# ---- host arrays


DTYPES = ["bfloat16", "float16", "float32", "int32", "int64", "uint8", "float8_e4m3fn"]


@pytest.mark.parametrize("name", DTYPES)
def test_numpy_round_trip(name):
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    array = np.arange(24).astype(dtype).reshape(2, 3, 4)
    for view in (
        array,
        array.transpose(2, 0, 1),
        array[::-1, :, ::2],
        np.broadcast_to(array[:, :1], (2, 5, 4)),
    ):
        site, (found,) = locate(("x", view))
        assert (site.family, site.device, site.stream, site.is_cpu) == ("numpy", -1, 0, True)
        assert (found.dtype, found.shape, found.device) == (name, view.shape, -1)
        assert tuple(step * dtype.itemsize for step in found.strides) == view.strides
        again = _arrays.host(found)
        assert (again.dtype, again.strides, again.flags.writeable) == (
            dtype,
            view.strides,
            view.flags.writeable,
        )
        assert np.array_equal(bits(again), bits(view))
    again = _arrays.host(locate(("x", array))[1][0])
    again[...] = np.zeros((), dtype)
    assert not bits(array).any(), "the memory is shared"


def test_host_keeps_the_memory():
    source = Producer()
    _, (view,) = locate(("x", source))
    array = _arrays.host(view)[1:]
    del view, _
    gc.collect()
    assert (source.alive, array.shape) == (1, (2, 4))
    del array
    gc.collect()
    assert source.alive == 0


def test_empty_arrays():
    for shape in ((0, 4), (4, 0), (0,)):
        _, (view,) = locate(("x", np.empty(shape, np.float16)))
        assert _arrays.host(view).shape == shape


def test_numpy_oddities_are_named():
    record = np.zeros(8, np.dtype([("a", "u1"), ("b", "<f2")]))["b"]
    with pytest.raises(ArgumentError, match=r"`x` has strides of \(3,\) bytes, .*its 2-byte elements"):
        locate(("x", record))
    assert locate(("x", np.zeros(4, ">f4")))[1][0].dtype == ">f4"
    assert locate(("x", np.zeros(4, "S3")))[1][0].dtype == "bytes24"
    assert locate(("x", np.zeros(4, object)))[1][0].dtype == "object"


def test_outputs_are_numpy():
    site, _ = locate(("x", np.zeros(3, np.float16)))
    array, view = site.empty((2, 5), "bfloat16")
    assert (array.dtype, view.shape, view.strides, view.readonly) == (
        ml_dtypes.bfloat16,
        (2, 5),
        (5, 1),
        False,
    )
    _arrays.host(view)[...] = 3
    assert (site.finish(array) == 3).all()
    with site.guard():
        site.hold([view, None])
    assert not site.capturing()


def test_none_and_writable():
    readonly = np.zeros(3, np.int32)
    readonly.flags.writeable = False
    site, views = locate(("x", None), ("offs", readonly), ("out", None), writable=frozenset({"out"}))
    assert (site.first, views[0], views[2]) == ("offs", None, None)
    assert views[1].readonly
    with pytest.raises(ArgumentError, match="`out` is read-only memory"):
        locate(("x", np.zeros(3)), ("out", readonly), writable=frozenset({"out"}))


def test_what_is_no_array():
    for thing, name in (([1, 2], "list"), (3, "int"), ("text", "str"), (np.float32(1), "float32")):
        with pytest.raises(ArgumentError, match=rf"`w` is a {name}: expected an array of CuPy, PyTorch, JAX"):
            locate(("x", np.zeros(3)), ("w", thing))
    with pytest.raises(ArgumentError, match="`x`, `w`: all are None"):
        locate(("x", None), ("w", None))


def test_the_first_array_decides():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    ours, theirs = np.zeros(3, np.float16), torch.zeros(3)
    assert locate(("x", ours), ("w", theirs))[0].family == "numpy"
    assert locate(("x", theirs), ("w", ours))[0].family == "torch"
    assert locate(("x", Wrapped(ours)), ("w", theirs))[0].family == "dlpack"


def test_other_host_libraries():
    array = np.arange(6, dtype=np.float16).reshape(2, 3)
    site, (view,) = locate(("x", Wrapped(array[:, ::-1])))
    assert np.array_equal(_arrays.host(view), array[:, ::-1])
    out, _ = site.empty((2,), "float32")
    assert type(site.finish(out)) is np.ndarray
    for producer, written in ((Producer(flags=1), "read-only"), (Producer(flags=2), "read-only")):
        with pytest.raises(ArgumentError, match=written):
            locate(("out", producer), writable=frozenset({"out"}))
        assert locate(("x", producer))[1][0].readonly


# ---- PyTorch and JAX on the CPU


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32", "int32", "float8_e4m3fn"])
def test_torch_on_the_cpu(name):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    tensor = torch.arange(24).reshape(2, 3, 4).to(getattr(torch, name))
    for view in (tensor, tensor.mT, tensor[:, 1:, ::2], tensor[:, :1].expand(2, 5, 4)):
        site, (found,) = locate(("x", view))
        assert (site.family, found.dtype, found.ptr) == ("torch", name, view.data_ptr())
        assert (found.shape, found.strides) == (tuple(view.shape), view.stride())
        assert np.array_equal(_arrays.host(found).astype(np.float64), view.double().numpy())
    out, view = site.empty((2, 3), "bfloat16")
    _arrays.host(view)[...] = 1.5
    assert site.finish(out) is out
    assert out.dtype == torch.bfloat16
    assert bool((out == 1.5).all())


def test_torch_with_autograd():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    leaf = torch.ones(3, requires_grad=True)
    assert _arrays.host(locate(("x", leaf))[1][0]).sum() == 3
    assert locate(("w", torch.nn.Parameter(leaf)))[0].family == "torch"
    out = frozenset({"out"})
    with pytest.raises(ArgumentError, match=r"`out` requires grad.*pass `out.detach\(\)`"):
        locate(("x", leaf), ("out", leaf), writable=out)
    with torch.no_grad():
        locate(("x", leaf), ("out", leaf), writable=out)
    locate(("x", leaf), ("out", leaf.detach()), writable=out)


def test_torch_without_plain_memory():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    with pytest.raises(UnsupportedError, match="`x` is on PyTorch's device 'meta'"):
        locate(("x", torch.empty(3, device="meta")))
    with pytest.raises(UnsupportedError, match=r"layout torch.sparse_coo with no plain memory"):
        locate(("x", torch.eye(3).to_sparse()))
    lazy = torch.imag(torch.ones(3, dtype=torch.complex64).conj())
    with pytest.raises(ArgumentError, match=r"lazily negated tensor: pass `x\.resolve_conj\(\)"):
        locate(("x", lazy))

    def inside(x):
        locate(("x", x))

    with pytest.raises(UnsupportedError, match=r"outside of torch\.compile and of torch\.func .*`cupy_gmm\.torch`\."):
        torch.func.vmap(inside)(torch.ones(2, 3))


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32", "int32"])
def test_jax_on_the_cpu(name):
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    with jax.default_device(jax.devices("cpu")[0]):
        array = jax.numpy.arange(12).reshape(3, 4).astype(name)
    site, (view,) = locate(("x", array))
    assert (site.family, site.is_cpu, view.dtype, view.readonly) == ("jax", True, name, True)
    assert view.ptr == array.unsafe_buffer_pointer()
    assert np.array_equal(bits(_arrays.host(view)), bits(np.asarray(array)))
    out, made = site.empty((2, 3), name)
    _arrays.host(made)[...] = 5
    result = site.finish(out)
    assert isinstance(result, jax.Array)
    assert result.dtype == name
    assert (np.asarray(result) == 5).all()
    with pytest.raises(ArgumentError, match=r"`out` is a jax\.Array, which nothing may change: leave it out"):
        locate(("x", array), ("out", array), writable=frozenset({"out"}))


def test_jax_values_that_are_no_concrete_array():
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    array = jax.numpy.ones(4)

    def inside(x):
        locate(("x", x))
        return x.sum()

    for transform in (jax.jit, jax.grad, lambda f: jax.vmap(jax.jit(f))):
        value = array.reshape(2, 2) if transform not in (jax.jit, jax.grad) else array
        with pytest.raises(UnsupportedError, match=r"`x` is a value that JAX is tracing"):
            transform(inside)(value)
    array.delete()
    with pytest.raises(ArgumentError, match=r"`x` is a jax\.Array that was deleted, or donated"):
        locate(("x", array))
    with pytest.raises(ArgumentError, match="`key` is a PRNGKeyArray: expected an array"):
        locate(("key", jax.random.key(0)))


def test_jax_with_two_devices():
    """A sharded array is refused with a reason; a result stays on the device of the first argument."""
    pytest.importorskip("jax", reason="JAX is not installed")
    program = """
import jax, numpy as np
from cupy_gmm._arrays import locate
from cupy_gmm.errors import ArgumentError
one, two = jax.devices()
mesh = jax.sharding.Mesh(np.array([one, two]), ("d",))
rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))
halves = jax.device_put(np.zeros((4, 4), np.float16), rows)
try:
    locate(("x", halves))
except ArgumentError as error:
    assert "`x`, of type ArrayImpl, is not one array on one device" in str(error), error
else:
    raise SystemExit("a sharded array was taken")
site, _ = locate(("x", jax.device_put(np.zeros(4, np.float16), two)))
assert site.finish(site.empty((3,), "float16")[0]).devices() == {two}
"""
    apart.python(program, XLA_FLAGS="--xla_force_host_platform_device_count=2", JAX_PLATFORMS="cpu")
