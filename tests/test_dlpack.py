"""Capsules: every rule of the DLPack standard that a producer can keep or break, and real producers."""

import gc
import sys

import numpy as np
import pytest

from cupy_gmm._arrays import dlpack
from cupy_gmm.errors import ArgumentError, DtypeError
from tests import apart, producers
from tests.producers import Producer, Wrapped

both = pytest.mark.parametrize("old", [False, True], ids=["versioned", "legacy"])


def refused(producer: Producer, error: type[Exception], match: str) -> None:
    """The capsule is refused, left unused, and its memory comes back once, when it goes."""
    capsule = producer.capsule()
    with pytest.raises(error, match=match):
        dlpack.read("x", capsule)
    assert producers.is_named(capsule, producers.NAMES[not producer.old])
    assert (producer.alive, producer.returned) == (1, 0)
    del capsule
    assert (producer.alive, producer.returned) == (0, 1)


# ---- what is read


@both
def test_every_field(old):
    producer = Producer((3, 4), (8, -2), producers.BF16, device=(producers.CUDA, 5), old=old, byte_offset=24)
    found = dlpack.read("x", producer.capsule())
    assert found[:-1] == (
        producer.data + 24,
        (3, 4),
        (8, -2),
        "bfloat16",
        2,
        producers.CUDA,
        5,
        False,
        False,
    )


@both
def test_null_strides_mean_dense(old):
    assert dlpack.read("x", Producer((2, 3, 5), None, old=old).capsule()).strides == (15, 5, 1)


def test_scalars_and_empty_arrays():
    scalar = dlpack.read("x", Producer((), None).capsule())
    assert (scalar.shape, scalar.strides) == ((), ())
    empty = dlpack.read("x", Producer((0, 4), (4, 1), data=0).capsule())
    assert (empty.ptr, empty.shape, empty.strides) == (0, (0, 4), (4, 1))


def test_flags():
    for flags, expected in ((0, (False, False)), (1, (True, False)), (2, (False, True)), (7, (True, True))):
        found = dlpack.read("x", Producer(flags=flags).capsule())
        assert (found.readonly, found.copied) == expected


@pytest.mark.parametrize(
    "code, bits, name",
    [
        (0, 32, "int32"),
        (0, 64, "int64"),
        (1, 8, "uint8"),
        (2, 16, "float16"),
        (2, 32, "float32"),
        (4, 16, "bfloat16"),
        (6, 8, "bool"),
        (10, 8, "float8_e4m3fn"),
        (12, 8, "float8_e5m2"),
        (14, 8, "float8_e8m0fnu"),
    ],
)
def test_element_types(code, bits, name):
    found = dlpack.read("x", Producer(dtype=(code, bits, 1)).capsule())
    assert (found.dtype, found.itemsize) == (name, bits // 8)


# ---- who owns the memory


@both
def test_memory_comes_back_once(old):
    producer = Producer(old=old)
    capsule = producer.capsule()
    found = dlpack.read("x", capsule)
    assert producers.is_named(capsule, b"used_" + producers.NAMES[not old])
    del capsule
    gc.collect()
    assert (producer.alive, producer.returned) == (1, 0)
    del found
    gc.collect()
    assert (producer.alive, producer.returned) == (0, 1)


@both
def test_a_capsule_is_used_once(old):
    producer = Producer(old=old)
    capsule = producer.capsule()
    first = dlpack.read("x", capsule)
    with pytest.raises(ArgumentError, match=r"`x` gave <capsule object .*expected a DLPack capsule"):
        dlpack.read("x", capsule)
    del first, capsule
    assert producer.returned == 1


def test_no_deleter():
    producer = Producer(deleter=False)
    found = dlpack.read("x", producer.capsule())
    del found
    assert producer.returned == 0


def test_nothing_leaks_in_a_thousand_reads():
    producer = Producer()
    for _ in range(1000):
        dlpack.read("x", producer.capsule())
    assert (producer.alive, producer.returned) == (0, 1000)
    array = np.ones((4, 4), np.float16)
    before = sys.getrefcount(array)
    for _ in range(100):
        dlpack.export("x", array)
    assert sys.getrefcount(array) == before


def test_a_lease_alive_at_exit_is_no_crash():
    program = (
        "import numpy as np\n"
        "from cupy_gmm._arrays import dlpack\n"
        "kept = [dlpack.export('x', np.ones((4, 4), np.float16)[::-1, ::-1]) for _ in range(10)]\n"
        "class Late:\n"
        "    def __del__(self, kept=kept): kept.clear()\n"
        "import builtins; builtins.late = Late()\n"
    )
    assert apart.python(program).stderr == ""


# ---- what is refused


@both
@pytest.mark.parametrize("dtype", [(3, 64, 1), (99, 16, 1), (2, 16, 2), (2, 24, 1), (17, 4, 1), (4, 32, 1)], ids=str)
def test_unknown_element_types(old, dtype):
    text = rf"`x` has DLPack element type {dtype[0]} of {dtype[1]} bits and {dtype[2]} lane"
    refused(Producer(dtype=dtype, old=old), DtypeError, text)


def test_versions():
    refused(Producer(version=(2, 0)), ArgumentError, r"`x` comes as DLPack version 2\.0: expected one up to 1")
    for version in ((1, 0), (1, 1), (1, 9)):
        assert dlpack.read("x", Producer(version=version).capsule()).shape == (3, 4)


@both
@pytest.mark.parametrize(
    "shape, strides",
    [
        ((3, 4), (4, 2**62 - 1)),  # -1 element of 2 bytes, divided as an unsigned number
        ((3, 4), (4, -(2**62))),
        ((2, 4), (2**62 - 1, 1)),
        ((2**40, 2**40), (2**40, 1)),
        ((3, 4), (-(2**63), 1)),
        ((2, 2), (2**61, 2**61)),
        ((3, 4), (4, 2**60)),  # too far in bytes only
    ],
    ids=str,
)
def test_strides_beyond_any_memory(old, shape, strides):
    refused(Producer(shape, strides, old=old), ArgumentError, "span more than any memory")


def test_strides_that_nothing_steps_over_may_be_anything():
    found = dlpack.read("x", Producer((1, 4), (2**63 - 1, 1)).capsule())
    assert found.strides == (2**63 - 1, 1)
    assert dlpack.read("x", Producer((0, 4), (2**62, 2**62)).capsule()).shape == (0, 4)


@both
def test_dimensions(old):
    refused(Producer(ndim=-1, old=old), ArgumentError, "with -1 dimensions")
    refused(Producer(ndim=65, old=old), ArgumentError, "with 65 dimensions")
    refused(Producer(None, None, ndim=2, old=old), ArgumentError, "with 2 dimensions and no shape")
    refused(Producer((3, -4), (4, 1), old=old), ArgumentError, r"negative extent in shape \(3, -4\)")
    refused(Producer(data=0, old=old), ArgumentError, r"shape \(3, 4\) and a null data pointer")


def test_what_is_no_capsule():
    for thing in (None, 7, "dltensor", object()):
        with pytest.raises(ArgumentError, match="expected a DLPack capsule"):
            dlpack.read("x", thing)


# ---- the call of `__dlpack__`


def test_old_producers_are_asked_the_old_way():
    producer = Producer(old=True)
    assert dlpack.export("x", producer, stream=7).shape == (3, 4)
    assert producer.streams == [7]


def test_a_producer_that_refuses():
    class Refuses(Producer):
        def __dlpack__(self, **_):
            raise BufferError("not today")

        def __dlpack_device__(self):
            raise RuntimeError("sharded over 8 devices")

    with pytest.raises(ArgumentError, match=r"`w`, of type Refuses, cannot be read .*: not today"):
        dlpack.export("w", Refuses())
    with pytest.raises(ArgumentError, match=r"`w`, of type Refuses, is not one array .*: sharded over 8"):
        dlpack.device_of("w", Refuses())


# ---- real producers


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def test_numpy():
    base = np.arange(60, dtype=np.float16).reshape(3, 4, 5)
    views = [base, base[::-1], base[:, ::-1, ::2], base.transpose(2, 0, 1)]
    for view in [*views, np.broadcast_to(base[:, :1], (3, 9, 5))]:
        found = dlpack.export("x", view)
        assert found.ptr == address(view)
        assert found.shape == view.shape
        assert tuple(2 * step for step in found.strides) == view.strides
        assert found.readonly == (not view.flags.writeable)


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int32", "int64"])
def test_torch(name):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    tensor = torch.zeros(4, 6, dtype=getattr(torch, name))[1:, ::2]
    found = dlpack.export("x", tensor)
    assert found.ptr == tensor.data_ptr()
    assert (found.shape, found.strides, found.dtype) == ((3, 3), (6, 2), name)


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32", "int32"])
def test_jax(name):
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    array = jax.numpy.arange(12, dtype=name).reshape(3, 4)
    found = dlpack.export("x", Wrapped(array))
    assert (found.shape, found.strides, found.dtype) == ((3, 4), (4, 1), name)
    assert found.ptr == array.unsafe_buffer_pointer()
