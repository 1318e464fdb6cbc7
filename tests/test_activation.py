"""`silu_mul` and its gradient against float64, in poisoned memory between guard bands."""

import itertools
from typing import Any

import numpy as np
import pytest

import cupy_gmm
from tests import layouts, oracle, routes
from tests.backends import DTYPES, Backend
from tests.layouts import Layout

# Rows and half widths: one element, no whole access, whole accesses, more than a block's share of a row.
SHAPES = ((1, 1), (5, 7), (33, 8), (3, 24), (257, 36), (2, 264), (9, 2056))
ROUNDING = {"bfloat16": (2.0**-8, 2.0**-134), "float16": (2.0**-11, 2.0**-25), "float32": (0.0, 2.0**-149)}
FLOAT32 = 2.0**-20  # exp, a reciprocal and four roundings
CLOSED = 2.0**-127  # a smaller sigmoid is 0: its exp has left float32


def sigmoid(gate: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-gate))


def halves(gate_up: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    inner = gate_up.shape[1] // 2
    return gate_up[:, :inner].astype(np.float64), gate_up[:, inner:].astype(np.float64)


def assert_close(actual: np.ndarray, value: np.ndarray, magnitude: np.ndarray, what: str) -> None:
    """Within float32 noise of the magnitude, and one rounding to the result's type."""
    unit, smallest = ROUNDING[actual.dtype.name]
    error = np.abs(actual.astype(np.float64) - value)
    bound = FLOAT32 * magnitude + unit * np.abs(value) * (1 + FLOAT32) + smallest
    assert (error <= bound).all(), f"{what}: {(error / bound).max():.3g} times the bound"


def check_forward(
    backend: Backend, gate_up: np.ndarray,
    layout: Layout = layouts.contiguous, out_layout: Layout = layouts.contiguous,
) -> np.ndarray:  # fmt: skip
    placed = backend.place(gate_up, layout)
    gate, up = halves(placed.values)
    value = gate * sigmoid(gate) * up
    backend.poison_allocator(value.shape, gate_up.dtype.name)
    h = backend.get(cupy_gmm.silu_mul(placed.array))
    assert h.dtype == gate_up.dtype
    assert h.shape == value.shape
    magnitude = np.abs(gate * up) * (sigmoid(gate) + CLOSED / FLOAT32)
    assert_close(h, value, magnitude, f"silu_mul {gate_up.shape} {gate_up.dtype}")
    out = backend.output(value.shape, gate_up.dtype.name, out_layout)
    assert cupy_gmm.silu_mul(placed.array, out=out.array) is out.array
    oracle.assert_same_bits(out.read(), h, "out=")
    out.check_guards()
    placed.check_untouched()
    return h


def check_backward(
    backend: Backend, gate_up: np.ndarray, dh: np.ndarray,
    layout: Layout = layouts.contiguous, out_layout: Layout = layouts.contiguous,
) -> np.ndarray:  # fmt: skip
    placed, grad = backend.place(gate_up, layout), backend.place(dh, layout)
    gate, up = halves(placed.values)
    g = grad.values.astype(np.float64)
    s = sigmoid(gate)
    value = np.concatenate([g * up * s * (1 + gate * (1 - s)), g * gate * s], axis=1)
    open_ = s + CLOSED / FLOAT32
    magnitude = np.concatenate([np.abs(g * up) * (1 + np.abs(gate)), np.abs(g * gate)], axis=1)
    magnitude *= np.concatenate([open_, open_], axis=1)
    result = backend.get(cupy_gmm.silu_mul_backward(placed.array, grad.array))
    assert result.dtype == gate_up.dtype
    assert result.shape == gate_up.shape
    assert_close(result, value, magnitude, f"silu_mul_backward {gate_up.shape} {gate_up.dtype}")
    out = backend.output(value.shape, gate_up.dtype.name, out_layout)
    assert cupy_gmm.silu_mul_backward(placed.array, grad.array, out=out.array) is out.array
    oracle.assert_same_bits(out.read(), result, "out=")
    out.check_guards()
    placed.check_untouched()
    grad.check_untouched()
    return result


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_shapes_and_types(dtype: str, backend: Backend, rng: np.random.Generator) -> None:
    for rows, inner in SHAPES:
        gate_up = (4 * rng.standard_normal((rows, 2 * inner))).astype(DTYPES[dtype])
        check_forward(backend, gate_up)
        check_backward(backend, gate_up, routes.normal(rng, (rows, inner), dtype))


@pytest.mark.parametrize("name", sorted(layouts.INPUT_LAYOUTS))
def test_layouts(name: str, backend: Backend, rng: np.random.Generator) -> None:
    layout = layouts.INPUT_LAYOUTS[name]
    out_layout = layouts.LAYOUTS.get(name, layouts.padded(3))
    for inner, dtype in (
        (32, "bfloat16"),
        (13, "float16"),
        (1, "bfloat16"),
        (20, "float32"),
        (12, "bfloat16"),
    ):
        gate_up, dh = routes.normal(rng, (21, 2 * inner), dtype), routes.normal(rng, (21, inner), dtype)
        for pair in itertools.product((layout, layouts.contiguous), (out_layout, layouts.contiguous)):
            check_forward(backend, gate_up, *pair)
            check_backward(backend, gate_up, dh, *pair)


@pytest.mark.parametrize("rows, inner", [(0, 8), (4, 0), (0, 0)])
def test_nothing_to_do(rows: int, inner: int, backend: Backend) -> None:
    gate_up = backend.place(np.ones((rows, 2 * inner), np.float16)).array
    dh = backend.place(np.ones((rows, inner), np.float16)).array
    assert cupy_gmm.silu_mul(gate_up).shape == (rows, inner)
    assert cupy_gmm.silu_mul_backward(gate_up, dh).shape == (rows, 2 * inner)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("inner", [8, 9])
def test_large_gates_saturate(inner: int, dtype: str, backend: Backend) -> None:
    """No inf * 0: an exact zero on one side, an exact identity on the other, and no NaN in the gradient."""
    gates = np.array([-3e38, -1e30, -1e4, -120, -104, 40, 120, 1e4, 1e30])[:, None]
    gate_up = np.concatenate([np.tile(gates, (1, inner)), np.full((9, inner), 3.0)], axis=1)
    gate_up = gate_up.astype(DTYPES[dtype])
    h = check_forward(backend, gate_up)
    assert not h[:5].astype(np.float32).any()
    oracle.assert_same_bits(h[5:], oracle.rounded(gate_up[5:, :inner].astype(np.float32) * 3, dtype))
    d = check_backward(backend, gate_up, np.full((9, inner), 2.0, DTYPES[dtype]))
    assert not d[:5].astype(np.float32).any()
    assert (d[5:, :inner].astype(np.float32) == 6).all()
    oracle.assert_same_bits(d[5:, inner:], oracle.rounded(gate_up[5:, :inner].astype(np.float32) * 2, dtype))


@pytest.mark.parametrize("inner", [8, 9])
def test_a_closed_gate_stops_large_factors(inner: int, backend: Backend) -> None:
    """dh * up overflows float32, the slope is zero: so is the gradient."""
    gate_up = np.concatenate([np.full((3, inner), -1e4), np.full((3, inner), 1e38)], axis=1)
    big = backend.place(gate_up.astype(DTYPES["bfloat16"])).array
    dh = backend.place(np.full((3, inner), 1e38, DTYPES["bfloat16"])).array
    assert not backend.get(cupy_gmm.silu_mul(big)).astype(np.float32).any()
    assert not backend.get(cupy_gmm.silu_mul_backward(big, dh)).astype(np.float32).any()


def test_zero_rows_stay_zero_and_nan_stays_in_its_place(backend: Backend, rng: np.random.Generator) -> None:
    gate_up = routes.normal(rng, (12, 48), "bfloat16")
    dh = routes.normal(rng, (12, 24), "bfloat16")
    gate_up[8:], dh[8:] = 0, 0
    clean = [
        backend.get(cupy_gmm.silu_mul(backend.place(gate_up).array)),
        backend.get(cupy_gmm.silu_mul_backward(backend.place(gate_up).array, backend.place(dh).array)),
    ]
    assert not any(result[8:].view(np.uint16).any() for result in clean)
    gate_up[3, 5] = np.nan
    dirty = [
        backend.get(cupy_gmm.silu_mul(backend.place(gate_up).array)),
        backend.get(cupy_gmm.silu_mul_backward(backend.place(gate_up).array, backend.place(dh).array)),
    ]
    for before, after in zip(clean, dirty, strict=True):
        wrong = np.argwhere(before.view(np.uint16) != after.view(np.uint16))
        assert {tuple(at) for at in wrong.tolist()} <= {(3, 5), (3, 29)}
        assert np.isnan(after[3, 5].astype(np.float32))


# ---- wrong calls


def raises(kind: type[Exception], text: str, call: Any, *args: Any, **options: Any) -> None:
    with pytest.raises(kind) as caught:
        call(*args, **options)
    assert text in str(caught.value)


def test_wrong_arguments_are_sentences(backend: Backend) -> None:
    def array(*shape: int, dtype: str = "bfloat16") -> Any:
        return backend.place(np.ones(shape, DTYPES[dtype])).array

    argument, dtype = cupy_gmm.ArgumentError, cupy_gmm.DtypeError
    both = (lambda a, **o: cupy_gmm.silu_mul(a, **o), lambda a, **o: cupy_gmm.silu_mul_backward(a, a, **o))
    for call in both:
        raises(argument, "`gate_up` has shape (8,): expected (rows, 2 * inner)", call, array(8))
        raises(argument, "`gate_up` has shape (4, 7): expected an even last axis", call, array(4, 7))
        raises(
            dtype, "`gate_up` has dtype int32: expected bfloat16, float16 or float32; cast it",
            call, array(4, 8, dtype="int32"),
        )  # fmt: skip
    backward, x = cupy_gmm.silu_mul_backward, array(4, 8)
    raises(argument, "`dh` has shape (4, 8): expected (4, 4), as `gate_up` has shape", backward, x, array(4, 8))
    raises(
        dtype, "`dh` has dtype float32: expected bfloat16, as `gate_up` has; cast it",
        backward, x, array(4, 4, dtype="float32"),
    )  # fmt: skip
    forward = cupy_gmm.silu_mul
    raises(argument, "`out` has shape (4, 8): expected (4, 4), the shape of", forward, x, out=array(4, 8))
    raises(
        dtype, "`out` has dtype float16: expected bfloat16, that of the result of `silu_mul`",
        forward, x, out=array(4, 4, dtype="float16"),
    )  # fmt: skip
    raises(argument, "`out` begins where an input of `silu_mul` does", forward, x, out=x[:, :4])
    overlapping = backend.place(np.ones((4, 4), DTYPES["bfloat16"]), layouts.broadcast).array
    raises(argument, "elements overlap in memory; pass an array of its own.", forward, x, out=overlapping)
    raises(argument, "`gate_up` is a list", forward, [[1.0, 2.0]])


# ---- GPU only


@pytest.mark.gpu
def test_C31_last_row_past_2_to_31(gpu: Backend, rng: np.random.Generator) -> None:
    """524288 rows, gate and up 8256 wide; the last rows equal the small run, whatever wraps."""
    cupy, period, rows, width = gpu.cupy, 1021, 524288, 8256
    block = routes.normal(rng, (period, width), "bfloat16")
    halfwords = cupy.empty((rows, width), np.uint16)
    whole = rows // period * period
    halfwords[:whole].reshape(-1, period, width)[...] = cupy.asarray(block.view(np.uint16))
    halfwords[whole:] = halfwords[: rows - whole]
    gate_up = cupy.ndarray((rows, width), DTYPES["bfloat16"], halfwords.data)
    start = 8 * period  # the same patterns, within the first 2^31 elements
    for call in (
        lambda part: cupy_gmm.silu_mul(part),
        lambda part: cupy_gmm.silu_mul_backward(part, part[:, : width // 2]),
    ):
        result = call(gate_up)
        small = call(gate_up[start : start + period])
        words = cupy.ndarray(result.shape, np.uint16, result.data)
        expected = cupy.ndarray(small.shape, np.uint16, small.data)
        assert bool((words[whole - period : whole] == expected).all())
        assert bool((words[whole:] == expected[: rows - whole]).all())
        del result, words


@pytest.mark.gpu
def test_gpu_and_cpu_differ_by_rounding_alone(gpu: Backend, rng: np.random.Generator) -> None:
    gate_up = routes.normal(rng, (300, 512), "float32")
    here, there = cupy_gmm.silu_mul(gate_up), gpu.get(cupy_gmm.silu_mul(gpu.place(gate_up).array))
    assert (np.abs(here - there) <= 2 * FLOAT32 * np.abs(here)).all()


@pytest.mark.gpu
def test_40_runs_give_the_same_bits(gpu: Backend, rng: np.random.Generator) -> None:
    gate_up = gpu.place(routes.normal(rng, (500, 520), "bfloat16")).array
    assert len({gpu.get(cupy_gmm.silu_mul(gate_up)).tobytes() for _ in range(40)}) == 1
