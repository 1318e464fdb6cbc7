"""The products as operators of PyTorch, and their gradients, which are the same products.

    dx = grouped_mm(dy, w.mT)    dw = grouped_mm_wgrad(x, dy)    and, of the weight gradient,
    dx = grouped_mm(dy, ddw.mT)  d_dy = grouped_mm(x, ddw)

With end offsets as a tensor they are registered operators. A Schedule is no tensor, and no operator takes one: calls
with it are recorded by a `torch.autograd.Function`, outside of compilers. Where nothing is recorded or traced, as in
most backward passes, neither is entered. Used by `products`.
"""

from typing import Any

import torch

from .. import _problem, ops
from .._schedule import Schedule
from ._library import define, direct, seen


def grouped_mm(x: Any, w: Any, offs: Any, group_offset: Any, out_dtype: Any) -> Any:
    """`ops.grouped_mm`, recorded by autograd and seen by compilers where they want to."""
    if direct(x, w):
        return ops.grouped_mm(x, w, offs, out_dtype=out_dtype, group_offset=group_offset)
    if isinstance(offs, Schedule):
        return _Scheduled.apply(x, w, offs, group_offset, out_dtype)
    return GROUPED_MM(x, w, offs, *_split(group_offset), out_dtype)


def grouped_mm_wgrad(x: Any, dy: Any, offs: Any, group_offset: Any, groups: Any, out_dtype: Any) -> Any:
    """`ops.grouped_mm_wgrad` of so many groups, recorded by autograd and seen by compilers where they want to."""
    if direct(x, dy):
        return ops.grouped_mm_wgrad(x, dy, offs, out_dtype=out_dtype, group_offset=group_offset, num_groups=groups)
    if isinstance(offs, Schedule):
        return _ScheduledWgrad.apply(x, dy, offs, group_offset, groups, out_dtype)
    return WGRAD(x, dy, offs, *_split(group_offset), groups, out_dtype)


def _split(group_offset: Any) -> tuple[Any, Any]:
    """The offset as an operator takes it: a number and, where the device knows it, a tensor."""
    return (0, group_offset) if isinstance(group_offset, torch.Tensor) else (group_offset, None)


def _joined(group_offset: Any, device_offset: Any) -> Any:
    """What `_split` took apart."""
    return group_offset if device_offset is None else device_offset


# ---- gradients of the forward product


def _keep(ctx: Any, x: Any, w: Any, offs: Any, group_offset: Any) -> None:
    """Keeps what the gradients that are asked for read, and no more: x may be large, and w frozen."""
    needs_x, needs_w = ctx.needs_input_grad[:2]
    _keep_offsets(ctx, offs, group_offset, x if needs_w else None, w if needs_x else None)
    ctx.dtype, ctx.groups = x.dtype, w.shape[0]
    # The gradient of w comes in the layout of w, so that of a parameter read as `.mT` needs no copy.
    ctx.columns = w.stride(-2) == 1 and w.stride(-1) != 1


def _gradients(ctx: Any, dy: Any) -> tuple[Any, Any]:
    x, w, offs, group_offset = _kept(ctx)
    dy = dy.to(ctx.dtype)
    dx = dw = None
    if ctx.needs_input_grad[0]:
        dx = grouped_mm(dy, w.mT, offs, group_offset, None)
    if ctx.needs_input_grad[1]:
        if ctx.columns:
            dw = grouped_mm_wgrad(dy, x, offs, group_offset, ctx.groups, None).mT
        else:
            dw = grouped_mm_wgrad(x, dy, offs, group_offset, ctx.groups, None)
    return dx, dw


# ---- gradients of the weight gradient


def _keep_wgrad(ctx: Any, x: Any, dy: Any, offs: Any, group_offset: Any) -> None:
    needs_x, needs_dy = ctx.needs_input_grad[:2]
    _keep_offsets(ctx, offs, group_offset, x if needs_dy else None, dy if needs_x else None)
    ctx.dtype = x.dtype


def _wgrad_gradients(ctx: Any, ddw: Any) -> tuple[Any, Any]:
    x, dy, offs, group_offset = _kept(ctx)
    ddw = ddw.to(ctx.dtype)
    dx = grouped_mm(dy, ddw.mT, offs, group_offset, None) if ctx.needs_input_grad[0] else None
    d_dy = grouped_mm(x, ddw, offs, group_offset, None) if ctx.needs_input_grad[1] else None
    return dx, d_dy


def _keep_offsets(ctx: Any, offs: Any, group_offset: Any, *operands: Any) -> None:
    """Tensors go through PyTorch, which notices when one is written to before the backward pass."""
    ctx.schedule = offs if isinstance(offs, Schedule) else None
    ctx.group_offset, device_offset = _split(group_offset)
    ctx.save_for_backward(*operands, None if ctx.schedule is not None else offs, device_offset)


def _kept(ctx: Any) -> tuple[Any, Any, Any, Any]:
    a, b, offs, device_offset = ctx.saved_tensors
    return a, b, offs if ctx.schedule is None else ctx.schedule, _joined(ctx.group_offset, device_offset)


# ---- registered


def _forward(x: Any, w: Any, offs: Any, group_offset: int, device_offset: Any, out_dtype: Any) -> Any:
    offset = _joined(group_offset, device_offset)
    return ops.grouped_mm(x, w, offs, out_dtype=out_dtype, group_offset=offset)


def _fake_forward(x: Any, w: Any, offs: Any, group_offset: Any, device_offset: Any, out_dtype: Any) -> Any:
    rows, _, n, _ = _problem.forward_extents(seen(x), seen(w))
    return x.new_empty((rows, n), dtype=out_dtype or x.dtype)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    x, w, offs, group_offset, device_offset, _ = inputs
    _keep(ctx, x, w, offs, _joined(group_offset, device_offset))


def _backward(ctx: Any, dy: Any) -> tuple[Any, ...]:
    return *_gradients(ctx, dy), None, None, None, None


def _wgrad(x: Any, dy: Any, offs: Any, group_offset: int, device_offset: Any, groups: int, out_dtype: Any) -> Any:
    offset = _joined(group_offset, device_offset)
    return ops.grouped_mm_wgrad(x, dy, offs, out_dtype=out_dtype, group_offset=offset, num_groups=groups)


def _fake_wgrad(x: Any, dy: Any, offs: Any, group_offset: Any, device_offset: Any, groups: Any, out_dtype: Any) -> Any:
    _, k, n = _problem.wgrad_extents(seen(x), seen(dy))
    return x.new_empty((groups, k, n), dtype=out_dtype or x.dtype)


def _save_wgrad(ctx: Any, inputs: Any, output: Any) -> None:
    x, dy, offs, group_offset, device_offset, _, _ = inputs
    _keep_wgrad(ctx, x, dy, offs, _joined(group_offset, device_offset))


def _wgrad_backward(ctx: Any, ddw: Any) -> tuple[Any, ...]:
    return *_wgrad_gradients(ctx, ddw), None, None, None, None, None


GROUPED_MM = define(
    "grouped_mm(Tensor x, Tensor w, Tensor offs, SymInt group_offset, Tensor? device_offset, "
    "ScalarType? out_dtype) -> Tensor",
    _forward, _fake_forward, _backward, _save,
)  # fmt: skip
WGRAD = define(
    "grouped_mm_wgrad(Tensor x, Tensor dy, Tensor offs, SymInt group_offset, Tensor? device_offset, SymInt num_groups, "
    "ScalarType? out_dtype) -> Tensor",
    _wgrad, _fake_wgrad, _wgrad_backward, _save_wgrad,
)  # fmt: skip


# ---- with a Schedule


class _Scheduled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, w: Any, schedule: Schedule, group_offset: Any, out_dtype: Any) -> Any:
        _keep(ctx, x, w, schedule, group_offset)
        return ops.grouped_mm(x, w, schedule, out_dtype=out_dtype, group_offset=group_offset)

    @staticmethod
    def backward(ctx: Any, dy: Any) -> tuple[Any, ...]:
        return *_gradients(ctx, dy), None, None, None


class _ScheduledWgrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, dy: Any, schedule: Schedule, group_offset: Any, groups: Any, out_dtype: Any) -> Any:
        _keep_wgrad(ctx, x, dy, schedule, group_offset)
        return ops.grouped_mm_wgrad(x, dy, schedule, out_dtype=out_dtype, group_offset=group_offset, num_groups=groups)

    @staticmethod
    def backward(ctx: Any, ddw: Any) -> tuple[Any, ...]:
        return *_wgrad_gradients(ctx, ddw), None, None, None, None
