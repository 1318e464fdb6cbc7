"""How an operator becomes known to PyTorch, and when a call may go around that.

`products` and `rows` define their operators here. Knows the machinery of PyTorch that watches calls, and no operator.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from .._arrays import View
from ..errors import ArgumentError, UnsupportedError

NAMESPACE = "cupy_gmm"
KEYS = ("CPU", "CUDA")
# A compiler must not copy an operand into another layout: any strides are read, and `.mT` as fast as what it views.
TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))

_library = torch.library.Library(NAMESPACE, "DEF")
_torch: Any = torch._C  # no stubs: the types do not depend on whether PyTorch is installed
try:  # what sees operators and not Python; without a way to ask, no call goes around it
    _modes = _torch._len_torch_dispatch_stack
    _transform = _torch._functorch.peek_interpreter_stack
    _recording = _torch._get_tracing_state
    _can_ask = True
except AttributeError:
    _can_ask = False


def define(
    signature: str,
    kernel: Callable[..., Any],
    fake: Callable[..., Any],
    backward: Callable[..., Any] | None = None,
    save: Callable[..., None] | None = None,
) -> Any:
    """Makes an operator known to PyTorch and returns it.

    Args:
        signature: Of the operator, in PyTorch's language for schemas, without default values: the dispatcher does not
            hand those on.
        kernel: Computes it from tensors with memory, on the CPU and on CUDA devices.
        fake: Shapes and types of its results from tensors without memory; checks what these show.
        backward: Gradients from a context and the gradients of the results; made of operators itself, so that it has
            derivatives too.
        save: Fills the context for `backward`.
    """
    name = signature.partition("(")[0]
    full = f"{NAMESPACE}::{name}"
    _library.define(signature, tags=TAGS)
    for key in KEYS:
        _library.impl(name, kernel, key)
    torch.library.register_fake(full, fake, lib=_library)
    if backward is not None:
        torch.library.register_autograd(full, backward, setup_context=save, lib=_library)

    return getattr(getattr(torch.ops, NAMESPACE), name).default


def untraced(*tensors: Any) -> bool:
    """Whether nothing but autograd needs to see this call: no compiler, no dispatch mode, no subclass.

    Raises:
        UnsupportedError: The call is inside a transform of torch.func.
    """
    if torch.compiler.is_compiling() or not _can_ask:
        return False
    if _transform() is not None:
        raise UnsupportedError(
            "the call is inside a transform of torch.func (grad, vjp, jvp, vmap), which is not offered: use "
            "torch.autograd, and fold an axis that vmap would take into the rows."
        )
    if _modes() or _recording() is not None:
        return False
    return all(type(tensor) in PLAIN and not tensor.is_meta for tensor in tensors)


def recorded(*tensors: Any) -> bool:
    """Whether autograd records a call with these arguments.

    Raises:
        UnsupportedError: One of them carries a tangent.
    """
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise UnsupportedError(
            "an argument carries a tangent of forward-mode differentiation, which is not offered: use reverse mode."
        )
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def direct(*tensors: Any) -> bool:
    """Whether the plain function gives all that PyTorch could ask of this call."""
    return untraced(*tensors) and not recorded(*tensors)


def tensors(**named: Any) -> None:
    """Says which argument is no tensor."""
    for name, value in named.items():
        if not isinstance(value, torch.Tensor):
            raise ArgumentError(
                f"`{name}` is a {type(value).__name__}: expected a tensor of PyTorch; for arrays of other libraries "
                "call the function of the same name in `cupy_gmm`."
            )


def seen(tensor: Any) -> View:
    """What checks look at, of a tensor that may have no memory."""
    return View(0, tuple(tensor.shape), (), str(tensor.dtype).removeprefix("torch."), -1, False, None)
