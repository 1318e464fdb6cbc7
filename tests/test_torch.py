"""`grouped_mm` of `cupy_gmm.torch`: values, gradients, which way calls go. On the CPU, and on a GPU if there is one."""

from typing import Any

import numpy as np
import pytest

import cupy_gmm
from tests import apart
from tests.torches import BF16, assert_same, assert_same_bits, gradients, ints, loop, torch, usable, whole

import cupy_gmm.torch as face  # isort: skip  (needs PyTorch, without which the line above skips)

OFFS = (5, 5, 18, 31)  # of 37 rows: an empty group, and a tail
ROWS, K, N = 37, 19, 23


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return usable(request.param)


def operands(rng: np.random.Generator, device: str, dtype: Any = BF16) -> tuple[Any, Any, Any]:
    """x, w and dy, with NaN wherever nothing may be read: the tail, and weights of the empty group."""
    x, w, dy = (whole(rng, *s, dtype=dtype, device=device) for s in ((ROWS, K), (len(OFFS), K, N), (ROWS, N)))
    x[OFFS[-1] :], dy[OFFS[-1] :], w[1] = torch.nan, torch.nan, torch.nan
    return x, w, dy


@pytest.mark.parametrize("layout", ["stored", "transposed"])
@pytest.mark.parametrize("given", ["offs", "int64", "schedule"])
@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("out_dtype", [None, torch.float32])
def test_gradients_are_those_of_a_loop(
    layout: str, given: str, dtype: Any, out_dtype: Any, device: str, rng: np.random.Generator
) -> None:
    x, w, dy = operands(rng, device, dtype)
    offs: Any = ints(OFFS, device, torch.int64 if given == "int64" else torch.int32)
    if given == "schedule":
        offs = cupy_gmm.make_schedule(offs, ROWS)
    if layout == "transposed":
        w = w.mT.contiguous().mT
    y, dx, dw = gradients(lambda x, w: face.grouped_mm(x, w, offs=offs, out_dtype=out_dtype), dy, x, w)
    assert y.dtype == (out_dtype or dtype)
    assert dx.dtype == dw.dtype == dtype
    for name, actual, expected in zip("y dx dw".split(), (y, dx, dw), gradients(_loop, dy, x, w), strict=True):
        assert_same(actual, expected, name)
    assert dw.stride() == w.stride(), "the gradient has the layout of the weights"


def _loop(x: Any, w: Any) -> Any:
    return loop(x, w, OFFS)


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize("given", ["offs", "schedule"])
def test_groups_of_this_rank(where: str, given: str, device: str, rng: np.random.Generator) -> None:
    x, w, dy = operands(rng, device)
    offset: Any = 1 if where == "host" else ints([1], device)
    offs: Any = ints(OFFS, device)
    if given == "schedule":
        offs, offset = cupy_gmm.make_schedule(offs, ROWS, group_offset=offset), 0
    results = gradients(lambda x, w: face.grouped_mm(x, w, offs, group_offset=offset), dy, x, w[1:3])
    expected = gradients(lambda x, w: loop(x, w, OFFS, 1), dy, x, w[1:3])
    for actual, value in zip(results, expected, strict=True):
        assert_same(actual, value)
    dw = face.grouped_mm_wgrad(x, dy, offs, num_groups=2, group_offset=offset)
    assert_same_bits(dw, results[2])


def test_weight_gradient_form(device: str, rng: np.random.Generator) -> None:
    """Two axes each: the value, and its derivatives, which are products again."""
    x, ddw, dy = operands(rng, device)
    ddw[1] = 3  # no rows meet it
    offs = ints(OFFS, device)

    def expected(a: Any, b: Any) -> Any:
        spans = [(0, 5), (5, 5), (5, 18), (18, 31)]
        return torch.stack([a.double()[:, s:e] @ b.double()[s:e] for s, e in spans])

    calls = {
        "as torch": lambda a, b: face.grouped_mm(a, b, offs=offs),
        "by name": lambda a, b: face.grouped_mm_wgrad(a.mT, b, offs),
        "schedule": lambda a, b: face.grouped_mm(a, b, cupy_gmm.make_schedule(offs, ROWS)),
    }
    wanted = gradients(expected, ddw, x.mT, dy)
    for name, call in calls.items():
        for actual, value in zip(gradients(call, ddw, x.mT, dy), wanted, strict=True):
            assert_same(actual, value, name)


def test_same_as_the_function_of_torch(rng: np.random.Generator) -> None:
    """Changing the import changes no number, on what both offer (torch leaves tail rows as they are)."""
    theirs = pytest.importorskip("torch.nn.functional").grouped_mm
    x, w, offs = whole(rng, 40, 16), whole(rng, 3, 16, 24), ints([7, 7, 40])
    assert_same(face.grouped_mm(x, w, offs=offs), theirs(x, w, offs=offs))
    assert_same(face.grouped_mm(mat_a=x, mat_b=w, offs=offs), theirs(mat_a=x, mat_b=w, offs=offs))
    dy = whole(rng, 40, 24)
    assert_same(face.grouped_mm(x.mT, dy, offs=offs), theirs(x.mT, dy, offs=offs))
    folded = theirs(w.mT, x.mT, offs=offs)
    assert_same(face.grouped_mm(x, w, offs=offs).mT, folded)


@pytest.mark.parametrize("wanted", ["x", "w"])
def test_keeps_and_computes_only_what_is_wanted(wanted: str, device: str, rng: np.random.Generator) -> None:
    x, w, dy = operands(rng, device)
    offs = ints(OFFS, device)
    (x if wanted == "x" else w).requires_grad_()
    kept: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = face.grouped_mm(x, w, offs)
    other = w if wanted == "x" else x
    assert [t.data_ptr() for t in kept] == [other.data_ptr(), offs.data_ptr()]
    y.backward(dy)
    assert (x.grad is None, w.grad is None) == (wanted == "w", wanted == "x")


@pytest.mark.parametrize("given", ["offs", "schedule"])
def test_second_derivatives(given: str, device: str, rng: np.random.Generator) -> None:
    """The gradient's own gradient, as a penalty on its norm needs it."""
    x, w, dy = operands(rng, device)
    w[1] = 2
    x[OFFS[-1] :], dy[OFFS[-1] :] = 0, 0
    x, w, dy = x.clamp(-1, 1), w.clamp(-1, 1), dy.clamp(-1, 1)
    offs: Any = ints(OFFS, device)
    if given == "schedule":
        offs = cupy_gmm.make_schedule(offs, ROWS)

    def second(call: Any, dtype: Any) -> tuple[Any, ...]:
        leaves = [each.detach().to(dtype).requires_grad_() for each in (x, w, dy)]
        dx, dw = torch.autograd.grad(call(*leaves[:2]), leaves[:2], leaves[2], create_graph=True)
        return torch.autograd.grad((dx * x.to(dtype)).sum() + (dw * w.to(dtype)).sum(), leaves)

    ours = second(lambda x, w: face.grouped_mm(x, w, offs), BF16)
    for actual, expected in zip(ours, second(_loop, torch.float64), strict=True):
        assert_same(actual, expected)


def test_parameters_of_a_module_are_trained(device: str, rng: np.random.Generator) -> None:
    """Weights stored (groups, N, K) and read as `.mT`: their gradient lies as they do, so that none is copied."""
    x, w, dy = operands(rng, device)
    parameter = torch.nn.Parameter(w.nan_to_num().mT.contiguous())
    face.grouped_mm(x, parameter.mT, ints(OFFS, device)).backward(dy)
    assert parameter.grad.is_contiguous()
    _, expected = gradients(lambda w: loop(x, w, OFFS), dy, w.nan_to_num())
    assert_same(parameter.grad, expected.mT)


def test_an_operand_written_before_the_backward_pass_is_noticed(rng: np.random.Generator) -> None:
    x, w, dy = operands(rng, "cpu")
    offs = ints(OFFS)
    y = face.grouped_mm(x.requires_grad_(), w, offs)
    offs.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(dy)


def test_checkpoint(device: str, rng: np.random.Generator) -> None:
    from torch.utils.checkpoint import checkpoint

    x, w, dy = operands(rng, device)
    offs = ints(OFFS, device)
    plain = gradients(lambda x, w: face.grouped_mm(x, w, offs), dy, x, w)
    again = gradients(lambda x, w: checkpoint(face.grouped_mm, x, w, offs, use_reentrant=False), dy, x, w)
    for a, b in zip(plain, again, strict=True):
        assert_same_bits(a, b)


# ---- which way a call goes


def test_no_machinery_where_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    from cupy_gmm.torch import _products

    went: list[str] = []
    for name in ("GROUPED_MM", "WGRAD"):
        real = getattr(_products, name)
        monkeypatch.setattr(_products, name, lambda *args, real=real, name=name: went.append(name) or real(*args))
    x, w, dy = operands(rng, "cpu")
    leaf, offs = w.clone().requires_grad_(), ints(OFFS)
    direct = face.grouped_mm(x, w, offs)
    with torch.no_grad():
        assert_same_bits(face.grouped_mm(x, leaf, offs), direct)
    with torch.inference_mode():
        assert_same_bits(face.grouped_mm(x, leaf, offs), direct)
    assert not went
    y = face.grouped_mm(x, leaf, offs)
    assert y.requires_grad
    assert_same_bits(y.detach(), direct)
    assert went == ["GROUPED_MM"]
    y.backward(dy, retain_graph=True)
    assert went == ["GROUPED_MM"], "the backward pass is not recorded"
    torch.autograd.grad(y, leaf, dy.requires_grad_(), create_graph=True)
    assert went == ["GROUPED_MM", "WGRAD"]


def test_a_dispatch_mode_sees_the_operator(rng: np.random.Generator) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen: list[Any] = []
    x, w, _ = operands(rng, "cpu")
    with Log():
        face.grouped_mm(x, w, ints(OFFS))
    assert torch.ops.cupy_gmm.grouped_mm.default in seen


@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_shapes_without_memory(kind: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    def shapes(device: str) -> None:
        x, w = torch.empty(ROWS, K, dtype=BF16, device=device), torch.empty(4, K, N, dtype=BF16, device=device)
        offs = torch.empty(4, dtype=torch.int32, device=device)
        y = face.grouped_mm(x, w.requires_grad_(), offs, out_dtype=torch.float32)
        assert (y.shape, y.dtype, y.device.type) == ((ROWS, N), torch.float32, device)
        dw = face.grouped_mm(x.mT, y.to(BF16), offs, group_offset=1)
        assert (dw.shape, dw.dtype) == ((3, K, N), BF16)
        (grad,) = torch.autograd.grad(y, w, y)
        assert (grad.shape, grad.dtype) == (w.shape, BF16)
        with pytest.raises(cupy_gmm.ArgumentError, match=r"`w` has shape \(4, 23, 19\): expected .* pass `w.mT`"):
            face.grouped_mm(x, w.mT, offs)

    if kind == "meta":
        shapes("meta")
    else:
        with FakeTensorMode():
            shapes("cuda" if torch.cuda.is_available() else "cpu")


# ---- wrong calls


def test_wrong_calls_are_sentences(rng: np.random.Generator) -> None:
    x, w, offs = whole(rng, ROWS, K), whole(rng, 4, K, N), ints(OFFS)

    def raises(kind: type[Exception], text: str, *args: Any, **words: Any) -> None:
        for grad in (False, True):
            given = [a.detach().requires_grad_(grad) if getattr(a, "dtype", None) is BF16 else a for a in args]
            with pytest.raises(kind) as caught:
                face.grouped_mm(*given, **words)
            assert text in str(caught.value)

    argument, dtype, unsupported = cupy_gmm.ArgumentError, cupy_gmm.DtypeError, cupy_gmm.UnsupportedError
    raises(argument, "`mat_b` is a ndarray: expected a tensor of PyTorch; for arrays", x, np.ones(3), offs)
    raises(argument, "`offs` is None: expected the end offset of each group; for equal groups use torch.bmm.", x, w)
    raises(argument, "`offs` is a list: expected a tensor of PyTorch", x, w, [1, 2])
    raises(unsupported, "`bias` is given: expected None, as it is not offered; add it to", x, w, offs, bias=x)
    raises(unsupported, "`mat_a` has shape (4, 19, 23): expected two axes; for equal groups use torch.bmm", w, w, offs)
    raises(unsupported, "; pass `grouped_mm(mat_b.mT, mat_a.mT, offs=offs).mT`, which is", w.mT, x.mT, offs)
    raises(argument, "`w` has shape (4, 23, 19): expected (groups, k, n) with k = 19", x, w.mT, offs)
    raises(dtype, "`w` has dtype float32: expected bfloat16, as `x` has", x, w.float(), offs)
    raises(dtype, "`offs` has dtype float32: expected int32 or int64 end offsets", x, w, offs.float())
    raises(dtype, "`out_dtype` is float64: expected bfloat16, float16 or float32", x, w, offs, out_dtype=torch.float64)
    raises(argument, "`offs` has length 4: expected at least 5", x, w, offs, group_offset=1)
    raises(argument, "`group_offset` is None: expected an int", x, w, offs, group_offset=None)
    raises(argument, "`num_groups` is None and `group_offset` is on the device", x.mT, x, offs, group_offset=ints([1]))
    raises(argument, "`group_offset` is a ndarray: expected a tensor", x, w, offs, group_offset=np.zeros(1, np.int32))
    raises(dtype, "`out_dtype` is 'float32': expected a dtype of PyTorch", x, w, offs, out_dtype="float32")
    schedule = cupy_gmm.make_schedule(offs, 5)
    raises(argument, "`offs` is a Schedule for 5 rows: expected one for 37", x, w, schedule)


def test_what_is_not_offered_by_transforms_is_a_sentence(rng: np.random.Generator) -> None:
    x, w, offs = whole(rng, ROWS, K), whole(rng, 4, K, N), ints(OFFS)
    transforms = {
        "vmap": lambda call: torch.func.vmap(call)(torch.stack([x, x])),
        "jvp": lambda call: torch.func.jvp(call, (x,), (x,)),
        "vjp": lambda call: torch.func.vjp(call, x),
    }
    for transform in transforms.values():
        with pytest.raises(
            cupy_gmm.UnsupportedError, match=r"inside a transform of torch\.func .* which is not offered"
        ):
            transform(lambda x: face.grouped_mm(x, w, offs))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        with pytest.raises(cupy_gmm.UnsupportedError, match="carries a tangent of forward-mode differentiation"):
            face.grouped_mm(dual, w, offs)


def test_importing_the_library_does_not_import_torch() -> None:
    apart.python("import sys, cupy_gmm; assert not {'torch', 'cupy_gmm.torch'} & set(sys.modules)")
