"""What the tests of `cupy_gmm.torch` share: devices, whole numbers, and a loop over the groups in float64."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from tests import oracle

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

BF16 = torch.bfloat16


def usable(name: str) -> str:
    """The device of that name.

    Who has a GPU may still have installed PyTorch for the CPU: then a skip, and only then: a build for CUDA that does
    not find the GPU fails, and `gpu_log` complains of a log of the GPU tests with a skip.
    """
    if name == "cuda":
        if torch.version.cuda is None:
            pytest.skip("this PyTorch is a build without CUDA")
        assert torch.cuda.is_available(), "this PyTorch is a build for CUDA, and does not find the GPU that CuPy sees"
    return name


def whole(rng: np.random.Generator, *shape: int, dtype: Any = BF16, device: str = "cpu") -> Any:
    """Integers from -4 to 4: sums are exact in float32."""
    return torch.from_numpy(rng.integers(-4, 5, shape)).to(device, dtype)


def ints(values: Sequence[int] | np.ndarray, device: str = "cpu", dtype: Any = torch.int32) -> Any:
    return torch.tensor(np.asarray(values), dtype=dtype, device=device)


def loop(x: Any, w: Any, offs: Sequence[int], group_offset: int = 0) -> Any:
    """The product in float64, one group after another; recorded by PyTorch's own autograd."""
    parts, reached = [], 0
    for group, (start, end) in enumerate(oracle.bounds_of(offs, len(x))):
        local = group - group_offset
        if start < end:
            part = x[start:end].double()
            parts.append(part @ w[local].double() if 0 <= local < len(w) else part.new_zeros(end - start, w.shape[2]))
            reached = end
    return torch.cat([*parts, x.new_zeros(len(x) - reached, w.shape[2], dtype=torch.float64)])


def gradients(call: Callable[..., Any], dy: Any, *inputs: Any) -> tuple[Any, ...]:
    """(result, gradient of each input); the inputs themselves stay as they are."""
    leaves = [each.detach().clone(memory_format=torch.preserve_format).requires_grad_() for each in inputs]
    result = call(*leaves)
    return result.detach(), *torch.autograd.grad(result, leaves, dy.to(result.dtype), allow_unused=True)


def assert_same(actual: Any, expected: Any, what: object = "") -> None:
    """Same type, shape and numbers, the sign of zero aside; `expected` is rounded once to the type of `actual`."""
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    expected = expected.to(actual.dtype)
    assert not actual.isnan().any(), f"{what}: NaN"
    wrong = (actual != expected).nonzero()
    assert not len(wrong), f"{what}: {len(wrong)} of {actual.numel()} differ, first at {wrong[0].tolist()}"


def assert_same_bits(actual: Any, expected: Any, what: object = "") -> None:
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), what
    words = torch.int16 if actual.element_size() == 2 else torch.int32
    assert torch.equal(actual.contiguous().view(words), expected.contiguous().view(words)), what
