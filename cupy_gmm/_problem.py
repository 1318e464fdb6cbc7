"""Problem: the pointer-free facts of one product call, and every check of an argument that needs no device."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from . import _checks
from ._arrays.dlpack import dense
from ._config import GROUPED_MM, VECTOR_BYTES, WGRAD
from ._variants import K_MAJOR, MN_MAJOR, STRIDED
from .errors import ArgumentError, DtypeError

INPUT_DTYPES = ("bfloat16", "float16")
OUTPUT_DTYPES = ("bfloat16", "float16", "float32")
ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
MAX_ROWS = 0x7FFF0000  # the largest extent of any axis: tile arithmetic stays inside int32
CHECKS = (None, "sync", "async")


@dataclass(frozen=True, slots=True)
class Problem:
    """What a kernel must know of one call, without addresses. Strides count elements, innermost last.

    Attributes:
        op: "grouped_mm" or "grouped_mm_wgrad".
        a_strides: (row, column) of x.
        b_strides: (group, row, column) of w, or (0, row, column) of dy.
        c_strides: (group, row, column) of the result; group 0 for y.
        groups: Groups of w or of the weight gradient.
        b_layout: How the right operand lies in memory, a name of `operand.cuh`.
        any_stride: Some operand has no 16-byte access.
        vector_store: The result takes 16-byte stores.
    """

    op: str
    dtype: str
    out_dtype: str
    rows: int
    k: int
    n: int
    groups: int
    a_strides: tuple[int, int]
    b_strides: tuple[int, int, int]
    c_strides: tuple[int, int, int]
    b_layout: str
    any_stride: bool
    vector_store: bool
    accumulate: bool = False

    @property
    def out_shape(self) -> tuple[int, ...]:
        return (self.rows, self.n) if self.op == GROUPED_MM else (self.groups, self.k, self.n)


def dtype_name(dtype: Any) -> str:
    """Canonical name of a dtype object of any framework, or of its name."""
    if isinstance(dtype, str):
        return dtype
    text = str(dtype)
    if text.startswith("torch."):
        return text.removeprefix("torch.")
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None)
    return str(name or text)


def forward(x: Any, w: Any, out: Any, out_dtype: Any) -> Problem:
    """Facts of `grouped_mm`.

    Args:
        x: View, (rows, k).
        w: View, (groups, k, n).
        out: View or None.
        out_dtype: What the caller asked for, or None.

    Raises:
        ArgumentError: A shape or stride does not fit.
        DtypeError: A dtype is not offered.
    """
    rows, k, n, groups = forward_extents(x, w)
    _extents(rows=rows, k=k, n=n, groups=groups)
    name = _out_dtype(out, out_dtype, x.dtype)
    y_row, y_col = _out_strides(out, (rows, n), name, "y")
    layout = _weight_layout(w)
    return Problem(
        op=GROUPED_MM,
        dtype=x.dtype,
        out_dtype=name,
        rows=rows,
        k=k,
        n=n,
        groups=groups,
        a_strides=x.strides,
        b_strides=w.strides,
        c_strides=(0, y_row, y_col),
        b_layout=layout,
        any_stride=layout == STRIDED or not _rows_contiguous(x),
        vector_store=_vector_store(out, (0, y_row, y_col), (1, rows, n), name),
    )


def weight_gradient(x: Any, dy: Any, out: Any, out_dtype: Any, groups: int, accumulate: bool) -> Problem:
    """Facts of `grouped_mm_wgrad`. Arguments as in `forward`; `groups` is that of the result.

    Raises:
        ArgumentError: A shape or stride does not fit.
        DtypeError: A dtype is not offered.
    """
    rows, k, n = wgrad_extents(x, dy)
    _extents(rows=rows, k=k, n=n, groups=groups)
    name = _out_dtype(out, out_dtype, x.dtype)
    if accumulate and out is None:
        raise ArgumentError("`accumulate` is True and `out` is None: pass the array to add to as `out=`.")
    c_strides = _out_strides(out, (groups, k, n), name, "dw")
    return Problem(
        op=WGRAD,
        dtype=x.dtype,
        out_dtype=name,
        rows=rows,
        k=k,
        n=n,
        groups=groups,
        a_strides=x.strides,
        b_strides=(0, *dy.strides),
        c_strides=c_strides,  # type: ignore[arg-type]
        b_layout=MN_MAJOR,
        any_stride=not (_rows_contiguous(x) and _rows_contiguous(dy)),
        vector_store=_vector_store(out, c_strides, (groups, k, n), name),
        accumulate=accumulate,
    )


def forward_extents(x: Any, w: Any) -> tuple[int, int, int, int]:
    """Checks shapes and dtypes of `grouped_mm`, whose extents may be symbols; returns rows, k, n and groups."""
    _checks.rows("x", x, "(rows, k)")
    _checks.rank("w", w, 3, "(groups, k, n)", "for one group pass `w[None]`" if len(w.shape) == 2 else None)
    _checks.dtype("x", x, INPUT_DTYPES)
    _checks.same_dtype("w", w, "x", x)
    rows, k = x.shape
    groups, w_k, n = w.shape
    if w_k != k:
        hint = "; pass `w.mT`" if n == k else ""
        raise ArgumentError(
            f"`w` has shape {w.shape}: expected (groups, k, n) with k = {k}, as `x` has shape {x.shape}{hint}."
        )
    return rows, k, n, groups


def wgrad_extents(x: Any, dy: Any) -> tuple[int, int, int]:
    """Checks shapes and dtypes of `grouped_mm_wgrad`, whose extents may be symbols; returns rows, k and n."""
    _checks.rows("x", x, "(rows, k)")
    _checks.rows("dy", dy, "(rows, n)")
    _checks.dtype("x", x, INPUT_DTYPES)
    _checks.same_dtype("dy", dy, "x", x)
    rows, k = x.shape
    if dy.shape[0] != rows:
        raise ArgumentError(
            f"`dy` has shape {dy.shape}: expected (rows, n) with rows = {rows}, as `x` has shape {x.shape}; "
            "pass the gradient of the product of this `x`."
        )
    return rows, k, dy.shape[1]


def offsets(offs: Any) -> int:
    """Checks the view of `offs` and returns its number of groups."""
    _checks.rank("offs", offs, 1, "(groups,) end offsets", "pass `offs.reshape(-1)`")
    _checks.dtype("offs", offs, _checks.INDEX_DTYPES, " end offsets")
    _extents(groups=offs.shape[0])
    return int(offs.shape[0])


def rows_of_schedule(rows: Any) -> int:
    """Checks the `rows` that a schedule is made for."""
    count = _checks.whole_number("rows", rows, "the number of rows of `x`")
    _extents(rows=count)
    return count


def group_offset_in(groups: int, group_offset: int, offs: str = "offs") -> None:
    """Checks a host `group_offset` against the length of the argument called `offs`."""
    if not 0 <= group_offset <= groups:
        raise ArgumentError(
            f"`group_offset` is {group_offset} and `{offs}` has length {groups}: expected 0 to {groups}, the index in "
            f"`{offs}` of the first local group."
        )


def group_range(problem: Problem, groups: int, group_offset: int) -> None:
    """Checks a host `group_offset` and the local groups of `problem` against the length of `offs`."""
    group_offset_in(groups, group_offset)
    last = group_offset + problem.groups
    if last > groups:
        who = "`w` has" if problem.op == GROUPED_MM else "`out` or `num_groups` asks for"
        where = f" from `group_offset` {group_offset} on" if group_offset else ""
        hint = "not only the local ones" if group_offset else "the last one too"
        raise ArgumentError(
            f"`offs` has length {groups}: expected at least {last}, as {who} {problem.groups} groups{where}; "
            f"pass the end offsets of all groups, {hint}."
        )


def check_mode(check: object) -> None:
    if check not in CHECKS:
        raise ArgumentError(f'`check` is {check!r}: expected None, "sync" or "async".')


def _extents(**extents: int) -> None:
    for name, extent in extents.items():
        if not 0 <= extent <= MAX_ROWS:
            hint = "; split the call into several" if extent > 0 else ""
            raise ArgumentError(f"`{name}` is {extent}: expected 0 to {MAX_ROWS}{hint}.")


def _out_dtype(out: Any, out_dtype: Any, default: str) -> str:
    if out_dtype is not None:
        name = dtype_name(out_dtype)
        if name not in OUTPUT_DTYPES:
            raise DtypeError(
                f"`out_dtype` is {name}: expected bfloat16, float16 or float32; for another type cast the result."
            )
        if out is not None and out.dtype != name:
            raise DtypeError(
                f"`out` has dtype {out.dtype} and `out_dtype` is {name}: expected the same; drop `out_dtype`."
            )
        return name
    if out is None:
        return default
    if out.dtype not in OUTPUT_DTYPES:
        raise DtypeError(
            f"`out` has dtype {out.dtype}: expected bfloat16, float16 or float32; allocate it as {default}."
        )
    return str(out.dtype)


def _out_strides(out: Any, shape: tuple[int, ...], dtype: str, meaning: str) -> tuple[int, ...]:
    if out is None:
        return dense(shape)
    if out.shape != shape:
        transposed = len(shape) == 3 and out.shape == (shape[0], shape[2], shape[1])
        hint = "pass `out.mT`" if transposed else "allocate it so"
        raise ArgumentError(f"`out` has shape {out.shape}: expected {shape}, the shape of {meaning}; {hint}.")
    _checks.no_overlap("out", out)
    return tuple(out.strides)


def _aligned(view: Any, pitches: Sequence[tuple[int, int]]) -> bool:
    """Base address and every (extent, stride) that is walked keep 16-byte alignment of 2-byte elements."""
    if 0 in view.shape:  # nothing is read, and an empty array's strides say nothing
        return True
    step = VECTOR_BYTES // 2
    return view.ptr % VECTOR_BYTES == 0 and all(extent <= 1 or stride % step == 0 for extent, stride in pitches)


def _rows_contiguous(view: Any) -> bool:
    """Whether rows are read 16 bytes at a time. A single row counts as one of many, so that its bits do not differ."""
    (rows, cols), (row, col) = view.shape, view.strides
    pitches = (row,) if rows > 1 else (row, cols)
    return (rows * cols == 0 or cols <= 1 or col == 1) and any(_aligned(view, [(2, pitch)]) for pitch in pitches)


def _weight_layout(w: Any) -> str:
    groups, k, n = w.shape
    group, k_stride, n_stride = w.strides
    if (0 in w.shape or n <= 1 or n_stride == 1) and _aligned(w, [(groups, group), (k, k_stride)]):
        return MN_MAJOR
    if (k <= 1 or k_stride == 1) and _aligned(w, [(groups, group), (n, n_stride)]):
        return K_MAJOR
    return STRIDED


def _vector_store(out: Any, strides: Sequence[int], extents: Sequence[int], dtype: str) -> bool:
    group, row, col = strides
    if extents[2] > 1 and col != 1:
        return False
    step = VECTOR_BYTES // ITEM_BYTES[dtype]
    aligned = out is None or out.ptr % VECTOR_BYTES == 0
    return aligned and all(
        extent <= 1 or stride % step == 0 for extent, stride in zip(extents[:2], (group, row), strict=True)
    )
