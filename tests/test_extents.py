"""Extents around tiles, alignment, strides."""

import numpy as np
import pytest

import cupy_gmm
from cupy_gmm import _config, errors
from tests import apart, calls, layouts, oracle
from tests.backends import Backend
from tests.calls import Case
from tests.layouts import Groups

COLUMN_TILES = sorted({config.tile_n for config in _config.CONFIGS.values()})
FORWARD = [None, *sorted(name for name, config in _config.CONFIGS.items() if config.op == "grouped_mm")]
WGRAD = [None, *sorted(name for name, config in _config.CONFIGS.items() if config.op == "grouped_mm_wgrad")]


@pytest.mark.parametrize("k,n", [(256, 96), (96, 192)])
def test_C45_weight_gradient_of_wide_experts_scaled(k: int, n: int, backend: Backend, rng: np.random.Generator) -> None:
    calls.wgrad(backend, rng, Case(Groups((32,) * 16, 512), (k, n)))


@pytest.mark.gpu
@pytest.mark.parametrize("k,n", [(2048, 768), (768, 1536)])
def test_C45_weight_gradient_of_wide_experts(k: int, n: int, gpu: Backend, rng: np.random.Generator) -> None:
    """128 experts, 4096 rows, on every config; compared on the device."""
    groups = Groups((32,) * 128, 4096)
    x, dy = (gpu.place(oracle.integers(rng, (4096, width), "bfloat16")) for width in (k, n))
    spans = oracle.bounds_of(groups.offs, 4096)
    expected = gpu.place(oracle.expected_wgrad(x.values, dy.values, spans, "bfloat16", 128)).array
    offs = gpu.ints(groups.offs)
    for config in WGRAD:
        gpu.poison_allocator(expected.shape, "bfloat16")
        dw = cupy_gmm.grouped_mm_wgrad(x.array, dy.array, offs, config=config)
        assert gpu.same(dw, expected), config


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_groups_of_every_length(dtype: str, gpu: Backend, rng: np.random.Generator) -> None:
    """From 1 to 256 rows, which needs every extent that a tile may have."""
    case = Case(Groups(tuple(range(1, 257)), 33000), (72, 264), dtype)
    calls.mm(gpu, rng, case)
    calls.mm(gpu, rng, case, w_layout=layouts.transposed)
    calls.wgrad(gpu, rng, case)


def test_C46_long_reductions_scaled(backend: Backend, rng: np.random.Generator) -> None:
    calls.wgrad(backend, rng, Case(Groups((14745,), 14745), (64, 96)))
    calls.wgrad(backend, rng, Case(Groups((3, 0, 9001, 70), 9100), (72, 40), out_dtype="float32"))
    calls.mm(backend, rng, Case(Groups((1538,), 1538), (257, 64)))


@pytest.mark.gpu
def test_C46_long_reductions(gpu: Backend, rng: np.random.Generator) -> None:
    """One hot expert of 147456 rows; and 1538 rows of 2048."""
    calls.wgrad(gpu, rng, Case(Groups((147456,), 147456), (512, 1024), out_dtype="float32"))
    calls.wgrad(gpu, rng, Case(Groups((5, 147451, 0), 147456), (512, 264), out_dtype="float32", accumulate=True))
    calls.mm(gpu, rng, Case(Groups((1538,), 1538), (2048, 256)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_C47_rows_of_72_bytes(dtype: str, backend: Backend, rng: np.random.Generator) -> None:
    for groups in (Groups((36, 0, 5), 41), Groups((1,), 1)):
        for kn in ((36, 36), (64, 36), (36, 64)):
            case = Case(groups, kn, dtype)
            calls.mm(backend, rng, case)
            calls.mm(backend, rng, case, w_layout=layouts.transposed)
            calls.wgrad(backend, rng, case)


def test_C48_float32_operands_are_refused_each_time(backend: Backend) -> None:
    x, w = backend.place(np.ones((8, 8), np.float32)), backend.place(np.ones((2, 8, 8), np.float32))
    for _ in range(3):
        with pytest.raises(errors.DtypeError, match="float32"):
            cupy_gmm.grouped_mm(x.array, w.array, backend.ints([4, 8]))


def test_C49_pitch_of_65(backend: Backend, rng: np.random.Generator) -> None:
    case = Case(Groups((20, 44), 64), (64, 64), "float16")
    calls.mm(backend, rng, case, x_layout=layouts.padded(1))
    calls.mm(backend, rng, case, w_layout=layouts.padded(1), out_layout=layouts.padded(1))
    calls.wgrad(backend, rng, case, x_layout=layouts.padded(1), dy_layout=layouts.padded(1))


@pytest.mark.parametrize("shift", [2, 4, 8, 16])
@pytest.mark.parametrize("operand", ["x", "w", "out", "dy", "x-wgrad", "dw"])
def test_C50_base_address(operand: str, shift: int, backend: Backend, rng: np.random.Generator) -> None:
    chosen = layouts.shifted(shift)
    for kn in ((64, 128), (72, 40)):
        case = Case(Groups((33, 0, 70), 110), kn)
        if operand in ("x", "w", "out"):
            calls.mm(backend, rng, case, **{f"{operand}_layout": chosen})
        else:
            name = {"dy": "dy_layout", "x-wgrad": "x_layout", "dw": "out_layout"}[operand]
            calls.wgrad(backend, rng, case, **{name: chosen})


def test_C51_transposed_weights_at_an_odd_element(backend: Backend, rng: np.random.Generator) -> None:
    for kn in ((64, 128), (67, 37), (8, 8)):
        case = Case(Groups((5, 0, 60, 1), 66), kn)
        calls.mm(backend, rng, case, w_layout=layouts.transposed_shifted)
        calls.wgrad(backend, rng, case, out_layout=layouts.transposed_shifted)


@pytest.mark.parametrize("n", [1, 7, 8, 127, 128, 129, 200])
def test_C53_columns_beyond_n(n: int, backend: Backend, rng: np.random.Generator) -> None:
    """Nothing spills into the guard columns of a padded `out`, however wide the tile."""
    pitch = layouts.padded_to_16_bytes
    case = Case(Groups((3, 0, 65), 70), (40, n))
    configs, gradients, repeats = (FORWARD, WGRAD, 4) if backend.name == "cupy" else ([None], [None], 1)
    for _ in range(repeats):
        for config in configs:
            calls.mm(
                backend,
                rng,
                case,
                x_layout=pitch,
                w_layout=pitch,
                out_layout=layouts.padded(9),
                config=config,
            )
            calls.mm(backend, rng, case, x_layout=pitch, w_layout=pitch, out_layout=pitch, config=config)
        for config in gradients:
            calls.wgrad(backend, rng, case, x_layout=pitch, dy_layout=pitch, out_layout=pitch, config=config)


@pytest.mark.parametrize("tile", COLUMN_TILES)
def test_C54_last_column_block(tile: int, backend: Backend, rng: np.random.Generator) -> None:
    for n in (tile + 1, 2 * tile - 1, tile - 1):
        for kn in ((24, n), (n, 24)):
            case = Case(Groups((31, 2), 33), kn)
            calls.mm(backend, rng, case)
            calls.mm(backend, rng, case, w_layout=layouts.transposed)
            calls.wgrad(backend, rng, case)


@pytest.mark.parametrize("kn", layouts.KN_PRIMES)
def test_C56_nothing_is_square(kn: tuple[int, int], backend: Backend, rng: np.random.Generator) -> None:
    case = Case(Groups((43, 0, 53, 11), 109), kn)
    for w_layout in (layouts.contiguous, layouts.transposed):
        calls.mm(backend, rng, case, w_layout=w_layout)
    calls.wgrad(backend, rng, case)
    calls.wgrad(backend, rng, case, out_layout=layouts.transposed)


@pytest.mark.parametrize("layout", ["reversed-first", "reversed-last"])
def test_C58_negative_strides(layout: str, backend: Backend, rng: np.random.Generator) -> None:
    chosen = layouts.LAYOUTS[layout]
    for kn in ((64, 72), (29, 23)):
        case = Case(Groups((17, 0, 66, 3), 90), kn)
        calls.mm(backend, rng, case, x_layout=chosen)
        calls.mm(backend, rng, case, w_layout=chosen)
        calls.mm(backend, rng, case, out_layout=chosen)
        calls.wgrad(backend, rng, case, x_layout=chosen, dy_layout=chosen, out_layout=chosen)
    ends = np.array([90, 86, 20, 17], np.int32)
    x = backend.place(oracle.integers(rng, (90, 8), "float16"))
    w = backend.place(oracle.integers(rng, (4, 8, 3), "float16"))
    y = backend.get(cupy_gmm.grouped_mm(x.array, w.array, backend.ints(ends)[::-1]))
    oracle.assert_same_bits(y, oracle.expected_mm(x.values, w.values, oracle.bounds_of(ends[::-1], 90), "float16"))


PROGRAM_C59 = """
import sys
import numpy as np
import cupy_gmm
if sys.argv[1] == "cupy":
    import cupy as xp
else:
    xp = np
x = xp.asarray(np.arange(12, dtype=np.float16).reshape(3, 4))[::-1, ::-1]
w = xp.asarray(np.ones((2, 4, 5), np.float16))[::-1]
y = cupy_gmm.grouped_mm(x, w, xp.asarray(np.array([1, 3], np.int32)))
y = y if xp is np else y.get()
assert (y == np.array([38, 22, 6])[:, None]).all(), y
"""


def test_C59_negative_strides_do_not_abort_the_process(backend: Backend) -> None:
    apart.python(PROGRAM_C59, backend.name)


def test_C60_broadcast_and_stepped_operands(backend: Backend, rng: np.random.Generator) -> None:
    for kn in ((64, 72), (29, 23)):
        case = Case(Groups((17, 0, 66, 3), 90), kn)
        for chosen in (layouts.broadcast, layouts.step_two):
            calls.mm(backend, rng, case, x_layout=chosen)
            calls.mm(backend, rng, case, w_layout=chosen)
            calls.wgrad(backend, rng, case, x_layout=chosen, dy_layout=chosen)
        calls.mm(backend, rng, case, out_layout=layouts.step_two)
        calls.wgrad(backend, rng, case, out_layout=layouts.step_two)


@pytest.mark.parametrize("axis", [0, 1])
def test_C60_out_must_not_overlap_itself(axis: int, backend: Backend) -> None:
    x, w = backend.place(np.ones((6, 8), np.float16)), backend.place(np.ones((2, 8, 6), np.float16))
    strides = [(0, 1), (6, 0)][axis]
    out = backend.place(np.zeros((6, 6), np.float16), lambda shape: layouts.Placement(strides, 0, 64)).array
    with pytest.raises(errors.ArgumentError, match=r"`out`.*overlap"):
        cupy_gmm.grouped_mm(x.array, w.array, backend.ints([3, 6]), out=out)


@pytest.mark.parametrize("tile", COLUMN_TILES)
def test_C62_half_a_column_tile(tile: int, backend: Backend, rng: np.random.Generator) -> None:
    for n in (tile // 2 + 1, tile // 2 - 1):
        for dtype in ("bfloat16", "float16"):
            case = Case(Groups((65, 1), 66), (64, n), dtype)
            calls.mm(backend, rng, case, out_layout=layouts.contiguous)
            calls.wgrad(backend, rng, case, out_layout=layouts.contiguous)


def test_unit_axes_carry_any_stride(backend: Backend, rng: np.random.Generator) -> None:
    """The stride of an axis of one element is never used."""
    for groups, kn in ((Groups((1,), 1), (1, 1)), (Groups((1,), 1), (64, 128)), (Groups((9,), 9), (64, 1))):
        odd = layouts.odd_unit_stride
        calls.mm(backend, rng, Case(groups, kn), x_layout=odd, w_layout=odd, out_layout=odd)
        calls.wgrad(backend, rng, Case(groups, kn), x_layout=odd, dy_layout=odd, out_layout=odd)
