"""The grouped products for PyTorch: what `torch.nn.functional.grouped_mm` means, with gradients, inside and outside of
`torch.compile`.

Takes PyTorch's arguments apart and refuses what no operator takes; `_products` computes.
"""

from typing import Any

import torch

from .. import _call, _schedule
from .._schedule import Schedule
from ..errors import ArgumentError, DtypeError, UnsupportedError
from . import _library, _products


def grouped_mm(
    mat_a: Any, mat_b: Any, offs: Any = None, *, bias: Any = None, out_dtype: Any = None, group_offset: Any = 0
) -> Any:
    """Multiplies every group's rows by that group's weights: `torch.nn.functional.grouped_mm` with these kernels.

        y[r] = mat_a[r] @ mat_b[g]                            for rows r of group g, with mat_b of three axes
        dw[g] = mat_a[:, rows of g] @ mat_b[rows of g]        with mat_b of two axes

    The first is `cupy_gmm.grouped_mm(x, w, offs)`, the second `cupy_gmm.grouped_mm_wgrad(x, dy, offs)` with mat_a =
    x.mT; messages call them x, w and dy.

    Args:
        mat_a: (rows, K) bfloat16 or float16, rows sorted by group; (K, rows) where `mat_b` has two axes. Any strides.
        mat_b: (G, K, N) weights, dtype of `mat_a`; `w.mT` of a contiguous (G, N, K) parameter is as fast, and so is its
            gradient. Or (rows, N).
        offs: (G,) int32 or int64 **end** offsets on the device of `mat_a`, or, outside of compilers, a `Schedule`
            (`cupy_gmm.make_schedule`), which forward and backward then share. The content is not checked: any is safe.
        bias: None; not offered.
        out_dtype: torch.bfloat16, torch.float16 or torch.float32; default the dtype of `mat_a`.
        group_offset: Index in `offs` of the first local group: an int, or an int32 tensor of one element on the device.
            Rows of other groups come out zero, and so does their gradient.

    Returns:
        y (rows, N), or dw (G, K, N). Rows at or past the last end are exact +0, in the gradient too.

    Raises:
        ArgumentError, DtypeError, UnsupportedError, CompileError: As `cupy_gmm.grouped_mm`; also for `bias`, for
            `mat_a` of three axes, for a Schedule inside torch.compile, and for tangents of forward mode and vmap.

    Numerics:
        As `cupy_gmm.grouped_mm`, the same bits. Gradients have the dtype of the inputs: with `out_dtype` float32 the
        gradient that comes in is rounded to that first. The gradient of `mat_b` has its layout.

    Cost:
        That of `cupy_gmm.grouped_mm` in each direction. Where nothing is recorded or traced, PyTorch's machinery is not
        entered. Keeps for the backward pass only operands that a wanted gradient reads.

    Source:
        `cupy_gmm.grouped_mm`, `cupy_gmm.grouped_mm_wgrad`.
    """
    _library.tensors(mat_a=mat_a, mat_b=mat_b)
    if bias is not None:
        raise UnsupportedError("`bias` is given: expected None, as it is not offered; add it to the result.")
    if mat_a.dim() == 3:
        raise UnsupportedError(f"`mat_a` has shape {tuple(mat_a.shape)}: expected two axes; {_instead(mat_b)}.")
    group_offset = _checked(offs, group_offset, out_dtype)
    if mat_b.dim() == 2 and mat_a.dim() == 2:
        return _weight_gradient(mat_a.mT, mat_b, offs, group_offset, None, out_dtype)
    return _products.grouped_mm(mat_a, mat_b, offs, group_offset, out_dtype)


def grouped_mm_wgrad(
    x: Any, dy: Any, offs: Any, *, out_dtype: Any = None, num_groups: int | None = None, group_offset: Any = 0
) -> Any:
    """Weight gradient of `grouped_mm`: every group's rows are the reduction axis.

        dw[g] = x[rows of g].T @ dy[rows of g]

    Args:
        x: (rows, K) bfloat16 or float16, any strides.
        dy: (rows, N), dtype of `x`.
        offs: (G,) int32 or int64 **end** offsets on the device of `x`, or, outside of compilers, a `Schedule`.
        out_dtype: torch.bfloat16, torch.float16 or torch.float32; default the dtype of `x`.
        num_groups: Groups of the result; default all from `group_offset` on.
        group_offset: Index in `offs` of `dw[0]`: an int, or an int32 tensor of one element on the device.

    Returns:
        dw, (G, K, N). An empty group's matrix is exact +0.

    Raises:
        ArgumentError, DtypeError, UnsupportedError, CompileError: As `cupy_gmm.grouped_mm_wgrad`; also for a Schedule
            inside torch.compile, and for tangents of forward mode and vmap.

    Numerics:
        As `cupy_gmm.grouped_mm_wgrad`, the same bits; gradients as `grouped_mm` has them.

    Cost:
        That of `cupy_gmm.grouped_mm_wgrad`; see `grouped_mm`.

    Source:
        `cupy_gmm.grouped_mm_wgrad`.
    """
    _library.tensors(x=x, dy=dy)
    group_offset = _checked(offs, group_offset, out_dtype)
    return _weight_gradient(x, dy, offs, group_offset, num_groups, out_dtype)


def _weight_gradient(x: Any, dy: Any, offs: Any, group_offset: Any, num_groups: Any, out_dtype: Any) -> Any:
    host_offset = None if isinstance(group_offset, torch.Tensor) else group_offset
    schedule, ends = (offs, None) if isinstance(offs, Schedule) else (None, _library.seen(offs))
    groups = _call.local_groups(num_groups, None, ends, schedule, host_offset)
    return _products.grouped_mm_wgrad(x, dy, offs, group_offset, groups, out_dtype)


def _checked(offs: Any, group_offset: Any, out_dtype: Any) -> Any:
    """Says what no operator takes; returns `group_offset`, an int or a tensor."""
    if isinstance(offs, Schedule):
        if torch.compiler.is_compiling():
            raise UnsupportedError(
                "`offs` is a Schedule inside torch.compile, which knows tensors only: pass the end offsets; the "
                "schedule is then built beside each product."
            )
    elif offs is None:
        raise ArgumentError("`offs` is None: expected the end offset of each group; for equal groups use torch.bmm.")
    else:
        _library.tensors(offs=offs)
    if out_dtype is not None and not isinstance(out_dtype, torch.dtype):
        raise DtypeError(f"`out_dtype` is {out_dtype!r}: expected a dtype of PyTorch, for example torch.float32.")
    if isinstance(group_offset, torch.Tensor):
        return group_offset
    number, other = _schedule.split_group_offset(group_offset)
    if other is not None:
        _library.tensors(group_offset=other)
    return number


def _instead(mat_b: Any) -> str:
    if mat_b.dim() == 2:
        return "pass `grouped_mm(mat_b.mT, mat_a.mT, offs=offs).mT`, which is the same"
    return "for equal groups use torch.bmm, else fold the groups into the rows"
