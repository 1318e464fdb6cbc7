"""`expert_ffn` forward and backward: exact on whole numbers, within bounds on random ones, in every family.

The whole-number layer has gates that are either a multiple of 32 from 32 up, where silu is the identity, or
at most -128, where it is zero; so every float32 sum of the layer is exact and each rounding is known.
"""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

import cupy_gmm
from tests import layouts, oracle
from tests.backends import DTYPES, Backend

BF16 = DTYPES["bfloat16"]


@dataclasses.dataclass
class Layer:
    """Arrays of one layer on the host."""

    x: np.ndarray
    w_gate_up: np.ndarray
    w_down: np.ndarray
    ids: np.ndarray
    weight: np.ndarray
    dy: np.ndarray

    @property
    def inputs(self) -> list[np.ndarray]:
        return [self.x, self.w_gate_up, self.w_down, self.ids, self.weight]


def whole(rng: np.random.Generator, tokens: int, slots: int, experts: int, h: int = 8, inner: int = 24) -> Layer:
    """See the head of this file. Weights of experts that no token chose are NaN."""
    ids = rng.integers(-1, experts + 1, (tokens, slots)).astype(np.int32)
    if experts:
        ids[ids == experts // 2] = 0
    gate = np.broadcast_to(rng.choice([32, -128], (experts, 1, inner)), (experts, h, inner))
    up, down = rng.integers(-4, 5, (experts, h, inner)), rng.integers(-4, 5, (experts, inner, h))
    w_gate_up, w_down = np.concatenate([gate, up], axis=2).astype(BF16), down.astype(BF16)
    unused = [expert not in ids for expert in range(experts)]
    w_gate_up[unused], w_down[unused] = np.nan, np.nan
    weight = rng.choice([0.25, 0.5, 1.0, -2.0], (tokens, slots)).astype(np.float32)
    weight[(ids < 0) | (ids >= experts)] = np.nan
    x = rng.integers(1, 3, (tokens, h)).astype(BF16)
    return Layer(x, w_gate_up, w_down, ids, weight, rng.integers(-4, 5, (tokens, h)).astype(BF16))


def normal(rng: np.random.Generator, tokens: int, slots: int, experts: int, h: int, inner: int, dtype: str) -> Layer:
    def of(*shape: int, scale: float = 1.0) -> np.ndarray:
        return (scale * rng.standard_normal(shape)).astype(DTYPES[dtype])

    ids = rng.integers(0, experts, (tokens, slots)).astype(np.int32)
    weight = rng.random((tokens, slots)).astype(np.float32)
    gate_up, down = of(experts, h, 2 * inner, scale=h**-0.5), of(experts, inner, h, scale=inner**-0.5)
    return Layer(of(tokens, h), gate_up, down, ids, weight, of(tokens, h))


Round = Callable[[np.ndarray], np.ndarray]


def loop(layer: Layer, rounded: Round, real: type = np.float32) -> tuple[np.ndarray, ...]:
    """One assignment after another, `rounded` where the library rounds; results in the order of NAMES."""
    x, dy = layer.x.astype(real), layer.dy.astype(real)
    y, dx = np.zeros_like(x), np.zeros_like(x)
    inner = layer.w_down.shape[1]
    dw_gate_up, dw_down = np.zeros(layer.w_gate_up.shape, real), np.zeros(layer.w_down.shape, real)
    d_weight = np.zeros(layer.ids.shape, real)
    for token, slot in np.ndindex(*layer.ids.shape):
        expert = layer.ids[token, slot]
        if not 0 <= expert < len(layer.w_down):
            continue
        w1, w2 = layer.w_gate_up[expert].astype(real), layer.w_down[expert].astype(real)
        weight = real(layer.weight[token, slot])
        gate_up = rounded(x[token] @ w1)
        gate, up = gate_up[:inner], gate_up[inner:]
        with np.errstate(over="ignore"):
            s = 1 / (1 + np.exp(-gate))
        hidden = rounded(gate * s * up)
        row = rounded(hidden @ w2)
        y[token] += weight * row
        d_weight[token, slot] = dy[token] @ row
        d_row = rounded(weight * dy[token])
        d_hidden = rounded(d_row @ w2.T)
        d_gate = rounded(s * (1 + gate * (1 - s)) * d_hidden * up)
        d_gate_up = np.concatenate([d_gate, rounded(gate * s * d_hidden)])
        dw_down[expert] += np.outer(hidden, d_row)
        dw_gate_up[expert] += np.outer(x[token], d_gate_up)
        dx[token] += rounded(d_gate_up @ w1.T)
    return (*map(rounded, (y, dx, dw_gate_up, dw_down)), d_weight)


def run(backend: Backend, layer: Layer, layout: layouts.Layout = layouts.contiguous) -> list[np.ndarray]:
    """Forward with and without `save`, backward; the library's results in the order of `loop`."""
    placed = [backend.place(a, layout) for a in layer.inputs]
    arrays = [p.array for p in placed]
    y, saved = cupy_gmm.expert_ffn(*arrays, save=True)
    oracle.assert_same_bits(backend.get(cupy_gmm.expert_ffn(*arrays)), backend.get(y), "save=False")
    dy = backend.place(layer.dy, layout)
    results = [backend.get(a) for a in (y, *cupy_gmm.expert_ffn_backward(dy.array, saved))]
    for p in (*placed, dy):
        p.check_untouched()
    return results


NAMES = ("y", "dx", "dw_gate_up", "dw_down", "dexpert_weight")


def assert_exact(results: list[np.ndarray], layer: Layer) -> None:
    expected = loop(layer, lambda a: oracle.rounded(a.astype(np.float32), "bfloat16").astype(np.float32))
    for name, actual, value in zip(NAMES, results, expected, strict=True):
        dtype = "float32" if name == "dexpert_weight" else "bfloat16"
        assert actual.dtype == DTYPES[dtype]
        # A zero's sign follows the order of a sum of zeros.
        oracle.assert_same_bits(
            actual + actual.dtype.type(0), oracle.rounded(value, dtype) + DTYPES[dtype].type(0), name
        )


@pytest.mark.parametrize(
    "tokens, slots, experts",
    [(1, 1, 1), (37, 2, 5), (16, 8, 3), (61, 1, 40), (33, 4, 9), (0, 2, 3), (5, 0, 3), (9, 2, 0)],
)
def test_whole_numbers_are_exact(
    tokens: int, slots: int, experts: int, backend: Backend, rng: np.random.Generator
) -> None:
    """NaN in the weights of dropped ids and of unused experts; no tokens, no slots, no experts."""
    layer = whole(rng, tokens, slots, experts)
    results = run(backend, layer)
    assert_exact(results, layer)
    for expert in range(experts):
        if expert not in layer.ids:
            assert not results[2][expert].view(np.uint16).any()
            assert not results[3][expert].view(np.uint16).any()


@pytest.mark.parametrize("name", ["pitch-plus-7", "transposed", "off-2-bytes", "reversed-last", "step-two"])
def test_any_layout(name: str, backend: Backend, rng: np.random.Generator) -> None:
    layer = whole(rng, 19, 3, 4)
    assert_exact(run(backend, layer, layouts.LAYOUTS[name]), layer)


def test_one_token_choosing_one_expert_twice(backend: Backend, rng: np.random.Generator) -> None:
    layer = whole(rng, 21, 4, 3)
    layer.ids[:, 1] = layer.ids[:, 0]
    layer.weight[:] = 0.5
    layer.w_gate_up[:], layer.w_down[:] = np.nan_to_num(layer.w_gate_up), np.nan_to_num(layer.w_down)
    layer.ids[:, 2] = 2
    assert_exact(run(backend, layer), layer)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("weight_dtype", ["float32", "bfloat16", "float16"])
def test_random_numbers(weight_dtype: str, dtype: str, backend: Backend, rng: np.random.Generator) -> None:
    """Against float64 without a rounding in between; the unit of the type times the size of what is added."""
    layer = normal(rng, 96, 4, 6, 64, 48, dtype)
    layer.weight = layer.weight.astype(DTYPES[weight_dtype])
    expected = loop(layer, lambda a: a, np.float64)
    unit = {"bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]
    for name, actual, value in zip(NAMES, run(backend, layer), expected, strict=True):
        scale = np.sqrt((value**2).mean())
        error = np.abs(actual.astype(np.float64) - value).max()
        assert error <= 24 * unit * scale, f"{name}: {error / (unit * scale):.3g} units"


def test_gradients_are_derivatives(backend: Backend, rng: np.random.Generator) -> None:
    """Directional derivatives of the float64 loop: what the backward loop of these tests says is true."""
    layer = normal(rng, 13, 2, 3, 10, 6, "float16")
    exact: Round = lambda a: a  # noqa: E731
    grads = loop(layer, exact, np.float64)[1:]
    real = dataclasses.replace(
        layer,
        **{f.name: getattr(layer, f.name).astype(np.float64) for f in dataclasses.fields(layer) if f.name != "ids"},
    )
    step = 1e-6
    for name, grad in zip(("x", "w_gate_up", "w_down", "weight"), grads, strict=True):
        direction = rng.standard_normal(grad.shape)
        ends = []
        for sign in (1, -1):
            moved = dataclasses.replace(real, **{name: getattr(real, name) + sign * step * direction})
            ends.append((loop(moved, exact, np.float64)[0] * real.dy).sum())
        assert np.isclose((ends[0] - ends[1]) / (2 * step), (grad * direction).sum(), rtol=1e-6)


def test_a_tokens_bits_do_not_depend_on_its_company(backend: Backend, rng: np.random.Generator) -> None:
    layer = normal(rng, 200, 2, 4, 48, 40, "bfloat16")
    arrays = [backend.place(a).array for a in layer.inputs]
    whole_batch = backend.get(cupy_gmm.expert_ffn(*arrays))
    for first, last in ((0, 1), (3, 20), (150, 200)):
        part = [backend.place(a[first:last]).array for a in (layer.x, layer.ids, layer.weight)]
        y = cupy_gmm.expert_ffn(part[0], *arrays[1:3], *part[1:])
        oracle.assert_same_bits(backend.get(y), whole_batch[first:last])


@pytest.mark.parametrize("family", ["torch", "jax"])
def test_other_families_give_the_same_bits(family: str, rng: np.random.Generator) -> None:
    module = pytest.importorskip(family)
    layer = normal(rng, 25, 2, 3, 24, 16, "float16")
    convert = module.from_numpy if family == "torch" else lambda a: module.device_put(a, module.devices("cpu")[0])
    y, saved = cupy_gmm.expert_ffn(*map(convert, layer.inputs), save=True)
    theirs = [y, *cupy_gmm.expert_ffn_backward(convert(layer.dy), saved)]
    kind = module.Tensor if family == "torch" else module.Array
    assert all(isinstance(a, kind) for a in theirs)
    for name, actual, expected in zip(NAMES, theirs, run(Backend(), layer), strict=True):
        oracle.assert_same_bits(np.asarray(actual), expected, name)


# ---- wrong calls


def test_wrong_arguments_are_sentences(backend: Backend, rng: np.random.Generator) -> None:
    layer = whole(rng, 6, 2, 3, h=8, inner=4)

    def raises(kind: type[Exception], text: str, **wrong: np.ndarray) -> None:
        changed = dataclasses.replace(layer, **wrong)
        with pytest.raises(kind) as caught:
            cupy_gmm.expert_ffn(*(backend.place(a).array for a in changed.inputs))
        assert text in str(caught.value)

    argument, dtype = cupy_gmm.ArgumentError, cupy_gmm.DtypeError
    raises(argument, "`x` has shape (8,): expected (tokens, h); pass an array of 2 axes.", x=layer.x[0])
    raises(argument, "`w_down` has shape (4, 8): expected (experts, inner, h)", w_down=layer.w_down[0])
    raises(
        dtype, "`x` has dtype float32: expected bfloat16 or float16; cast it, for example `x.astype(",
        x=layer.x.astype(np.float32),
    )  # fmt: skip
    raises(dtype, "`w_down` has dtype float16: expected bfloat16, as", w_down=layer.w_down.astype(np.float16))
    gate_up = layer.w_gate_up
    raises(
        argument, "`w_gate_up` has shape (3, 7, 8): expected (experts, 8, 2 * inner), as `x` has shape (6,",
        w_gate_up=gate_up[:, :7],
    )  # fmt: skip
    raises(argument, "`w_gate_up` has shape (3, 6, 8): expected", w_gate_up=np.swapaxes(gate_up[:, :, :6], 1, 2))
    raises(argument, "; pass `w_gate_up.mT`.", w_gate_up=np.swapaxes(gate_up[:, :, :6], 1, 2))
    raises(argument, "`w_gate_up` has shape (3, 8, 7): expected", w_gate_up=gate_up[:, :, :7])
    raises(
        argument, "`w_down` has shape (3, 8, 4): expected (3, 4, 8), as `w_gate_up` has shape (3, 8, 8); "
        "pass `w_down.mT`.",
        w_down=np.swapaxes(layer.w_down, 1, 2),
    )  # fmt: skip
    raises(argument, "`w_down` has shape (2, 4, 8): expected (3, 4, 8)", w_down=layer.w_down[:2])
    raises(
        argument, "`expert_idx` has shape (5, 2): expected (6, slots), as `x` has shape (6, 8)",
        ids=layer.ids[:5],
    )  # fmt: skip
    raises(argument, "`expert_idx` has shape (6,): expected (tokens, slots)", ids=layer.ids[:, 0])
    raises(dtype, "`expert_idx` has dtype float32", ids=layer.ids.astype(np.float32))
    raises(
        argument, "`expert_weight` has shape (6, 1): expected (6, 2), as `expert_idx` has; pass a weight",
        weight=layer.weight[:, :1],
    )  # fmt: skip
    raises(dtype, "`expert_weight` has dtype int32: expected float32", weight=np.ones((6, 2), np.int32))


def test_wrong_backward_arguments_are_sentences(backend: Backend, rng: np.random.Generator) -> None:
    layer = whole(rng, 6, 2, 3, h=8, inner=4)
    y, saved = cupy_gmm.expert_ffn(*(backend.place(a).array for a in layer.inputs), save=True)
    for wrong in ((y, saved), None):
        with pytest.raises(cupy_gmm.ArgumentError, match="expected the second result of `expert_ffn"):
            cupy_gmm.expert_ffn_backward(backend.place(layer.dy).array, wrong)
    with pytest.raises(cupy_gmm.ArgumentError, match=r"`dy` has shape \(5, 8\): expected \(6, 8\)"):
        cupy_gmm.expert_ffn_backward(backend.place(layer.dy[:5]).array, saved)
    with pytest.raises(cupy_gmm.DtypeError, match="`dy` has dtype float32: expected bfloat16"):
        cupy_gmm.expert_ffn_backward(backend.place(layer.dy.astype(np.float32)).array, saved)


# ---- GPU only


@pytest.mark.gpu
def test_20_runs_give_the_same_bits(gpu: Backend, rng: np.random.Generator) -> None:
    layer = normal(rng, 700, 8, 16, 128, 96, "bfloat16")
    assert len({b"".join(a.tobytes() for a in run(gpu, layer)) for _ in range(20)}) == 1


@pytest.mark.gpu
def test_capture_with_cupy_arrays_is_a_sentence(gpu: Backend, rng: np.random.Generator) -> None:
    layer = whole(rng, 6, 2, 3)
    stream = gpu.cupy.cuda.Stream(non_blocking=True)
    with stream:
        arrays = [gpu.place(a).array for a in layer.inputs]
        cupy_gmm.expert_ffn(*arrays)
        stream.begin_capture()
        with pytest.raises(cupy_gmm.ArgumentError, match="inside a CUDA graph capture"):
            cupy_gmm.expert_ffn(*arrays)
        stream.end_capture()


@pytest.mark.gpu
def test_layer_of_steps_in_a_graph(gpu: Backend, rng: np.random.Generator) -> None:
    """The public steps with `out=` in one capture; replayed with other ids, bits as the eager layer."""
    layer = normal(rng, 300, 4, 12, 64, 48, "bfloat16")
    stream = gpu.cupy.cuda.Stream(non_blocking=True)
    with stream:
        x, w1, w2, ids, weight = (gpu.place(a).array for a in layer.inputs)
        routing = cupy_gmm.route(ids, 12)
        xs = cupy_gmm.permute(x, routing)
        schedule = cupy_gmm.make_schedule(routing.offs, 1200)
        gate_up = cupy_gmm.grouped_mm(xs, w1, schedule)
        hidden = cupy_gmm.silu_mul(gate_up)
        ys = cupy_gmm.grouped_mm(hidden, w2, schedule)
        y = cupy_gmm.combine(ys, routing, weight)
        stream.begin_capture()
        cupy_gmm.route(ids, 12, out=routing)
        cupy_gmm.permute(x, routing, out=xs)
        cupy_gmm.make_schedule(routing.offs, 1200, out=schedule)
        cupy_gmm.grouped_mm(xs, w1, schedule, out=gate_up)
        cupy_gmm.silu_mul(gate_up, out=hidden)
        cupy_gmm.grouped_mm(hidden, w2, schedule, out=ys)
        cupy_gmm.combine(ys, routing, weight, out=y)
        graph = stream.end_capture()
        for experts in (1, 5, 12, 30):
            other = rng.integers(0, experts, (300, 4)).astype(np.int32)
            ids.set(other)
            graph.launch(stream)
            stream.synchronize()
            eager = cupy_gmm.expert_ffn(x, w1, w2, gpu.ints(other), weight)
            oracle.assert_same_bits(gpu.get(y), gpu.get(eager), f"{experts} experts")
