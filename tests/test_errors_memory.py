"""Memory that a kernel could not address or must not write: read-only, unaligned, strides off the element."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cupy_gmm
from cupy_gmm import _config
from cupy_gmm.errors import ArgumentError, GmmError
from tests import layouts, oracle
from tests.backends import DTYPES, Backend

BF16 = DTYPES["bfloat16"]


def operands(rng: np.random.Generator, backend: Backend) -> tuple[Any, Any, Any, np.ndarray]:
    x, w = oracle.integers(rng, (10, 8), "bfloat16"), oracle.integers(rng, (2, 8, 6), "bfloat16")
    expected = oracle.expected_mm(x, w, [(0, 4), (4, 10)], "float32")
    return backend.place(x).array, backend.place(w).array, backend.ints([4, 10]), expected


def refused(call: Callable[[], Any], word: str) -> bool:
    """Whether `call` raises an ArgumentError that says `word`."""
    try:
        call()
    except ArgumentError as error:
        return word in str(error)
    return False


def test_read_only_out(rng: np.random.Generator) -> None:
    backend = Backend()
    x, w, offs, _ = operands(rng, backend)
    for shape, call in (
        ((10, 6), lambda out: cupy_gmm.grouped_mm(x, w, offs, out=out)),
        ((2, 8, 8), lambda out: cupy_gmm.grouped_mm_wgrad(x, x, offs, out=out)),
        ((2, 8, 8), lambda out: cupy_gmm.grouped_mm_wgrad(x, x, offs, out=out, accumulate=True)),
    ):
        out = np.zeros(shape, BF16)
        out.flags.writeable = False
        with pytest.raises(ArgumentError, match=r"`out`.*read-only"):
            call(out)
        assert not out.any()


def test_read_only_inputs_are_fine(rng: np.random.Generator) -> None:
    x, w, offs, expected = operands(rng, Backend())
    for array in (x, w, offs):
        array.flags.writeable = False
    oracle.assert_same_bits(cupy_gmm.grouped_mm(x, w, offs, out_dtype=np.float32), expected)


@pytest.mark.parametrize("shift", [1, 2, 3])
def test_unaligned_elements(shift: int, backend: Backend, rng: np.random.Generator) -> None:
    """float32 and bf16 `out` at addresses that no element may have: right, or refused; never a fault."""
    x, w, offs, expected = operands(rng, backend)
    for dtype in ("float32", "bfloat16"):
        kind = DTYPES[dtype]
        if shift % kind.itemsize == 0:
            continue
        host = np.zeros(256, np.uint16)
        strides = (6 * kind.itemsize, kind.itemsize)
        buffer, out = backend.upload(host, (10, 6), kind, shift, strides)
        if refused(lambda out=out: cupy_gmm.grouped_mm(x, w, offs, out=out), "`out`"):
            continue
        backend.synchronize()
        window = np.ndarray((10, 6), kind, backend.flat(buffer).data, shift, strides)
        oracle.assert_same_bits(np.ascontiguousarray(window), expected.astype(kind))
    backend.synchronize()


@pytest.mark.parametrize("operand", ["x", "out"])
def test_strides_off_the_element(operand: str, backend: Backend, rng: np.random.Generator) -> None:
    """A pitch of 17 bytes cannot be counted in elements of two bytes."""
    x, w, offs, expected = operands(rng, backend)
    host = np.zeros(256, np.uint16)
    if operand == "x":
        window = np.ndarray((10, 8), BF16, host.data, 0, (17, 2))
        window[...] = backend.get(x)
        odd = backend.upload(host, (10, 8), BF16, 0, (17, 2))[1]
        arguments = {"x": odd, "out": backend.output((10, 6), "float32").array}
    else:
        arguments = {"x": x, "out": backend.upload(host, (10, 6), BF16, 0, (17, 2))[1]}
    if not refused(lambda: cupy_gmm.grouped_mm(arguments["x"], w, offs, out=arguments["out"]), "17"):
        assert operand == "x"
        oracle.assert_same_bits(backend.get(arguments["out"]), expected)


def test_out_may_not_be_a_jax_array(rng: np.random.Generator) -> None:
    jax = pytest.importorskip("jax", reason="jax is not installed")
    x, w, offs, _expected = operands(rng, Backend())
    with jax.default_device(jax.devices("cpu")[0]):
        out = jax.numpy.zeros((10, 6), "bfloat16")
        with pytest.raises(ArgumentError, match=r"`out`.*(immutable|read-only|nothing may change)"):
            cupy_gmm.grouped_mm(x, w, offs, out=out)
        with pytest.raises(ArgumentError, match=r"`out`.*(immutable|read-only|nothing may change)"):
            cupy_gmm.grouped_mm(jax.numpy.asarray(x), jax.numpy.asarray(w), jax.numpy.asarray(offs), out=out)


FAST = [name for name, config in _config.CONFIGS.items() if config.vectorised]


@pytest.mark.gpu
@pytest.mark.parametrize("config", FAST)
def test_forced_config_says_why_not(config: str, gpu: Backend, rng: np.random.Generator) -> None:
    """A config that loads 16 bytes at a time, on a base or a pitch that does not allow it."""
    for layout in (layouts.shifted(2), layouts.padded(1), layouts.step_two):
        x = gpu.place(oracle.integers(rng, (64, 64), "bfloat16"), layout).array
        dense = gpu.place(oracle.integers(rng, (64, 64), "bfloat16")).array
        w = gpu.place(oracle.integers(rng, (2, 64, 64), "bfloat16")).array
        call, other = cupy_gmm.grouped_mm, w
        if _config.CONFIGS[config].op == "grouped_mm_wgrad":
            call, other = cupy_gmm.grouped_mm_wgrad, dense
        with pytest.raises(ArgumentError, match=rf"`config`.*{config}.*16.byte"):
            call(x, other, gpu.ints([10, 64]), config=config)


@pytest.mark.gpu
def test_warm_calls_check_what_the_plan_does_not_hold(gpu: Backend, rng: np.random.Generator) -> None:
    """A first call makes the plan; the second one differs in an argument that the plan may not know."""
    x, w, offs, _ = operands(rng, gpu)
    good = gpu.place(np.array(0, np.int32)).array
    for _ in range(2):
        cupy_gmm.grouped_mm(x, w, offs, group_offset=good)
        cupy_gmm.grouped_mm(x, w, offs)
        cupy_gmm.grouped_mm(x, w, cupy_gmm.make_schedule(offs, 10))
    for bad in (np.array(0, np.int64), np.array(0.0, np.float32), np.array([0, 1], np.int32)):
        with pytest.raises(GmmError, match="`group_offset`"):
            cupy_gmm.grouped_mm(x, w, offs, group_offset=gpu.place(bad).array)
    with pytest.raises(GmmError, match="`offs`"):
        cupy_gmm.grouped_mm(x, w, gpu.place(np.array([4.0, 10.0], np.float32)).array)
    with pytest.raises(GmmError, match="`offs`"):
        cupy_gmm.grouped_mm(x, w, cupy_gmm.make_schedule(offs, 11))
    with pytest.raises(GmmError, match="`check`"):
        cupy_gmm.grouped_mm(x, w, offs, check="never")
