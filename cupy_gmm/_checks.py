"""Checks that products, routing and the layer share: what an argument is, what it must be, how to mend the call.

Used by `_problem`, `_schedule`, `_call` and `_row_checks`. Knows no operation, no device and no contents of arrays.
"""

import numbers
from collections.abc import Sequence
from typing import Any

from .errors import ArgumentError, DtypeError

INDEX_DTYPES = ("int32", "int64")


def required(*named: tuple[str, Any]) -> None:
    """Says which argument is None, though it must be an array."""
    for name, value in named:
        if value is None:
            raise ArgumentError(f"`{name}` is None: expected an array.")


def whole_number(name: str, value: Any, meaning: str) -> int:
    """An int of the host. An array is refused whatever it holds: it may have to be fetched from its device."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        what = f"a {type(value).__name__}" if hasattr(value, "shape") else repr(value)
        raise ArgumentError(f"`{name}` is {what}: expected {meaning}, an int.")
    return int(value)


def rank(name: str, view: Any, axes: int, meaning: str, hint: str | None = None) -> None:
    if len(view.shape) != axes:
        hint = hint or f"pass an array of {axes} axes"
        raise ArgumentError(f"`{name}` has shape {view.shape}: expected {meaning}; {hint}.")


def rows(name: str, view: Any, meaning: str) -> None:
    """A matrix whose rows are what is counted; further axes in front can be folded into the rows."""
    fold = f"pass `{name}.reshape(-1, {view.shape[-1]})`" if len(view.shape) > 2 else None
    rank(name, view, 2, meaning, fold)


def dtype(name: str, view: Any, allowed: Sequence[str], meaning: str = "") -> None:
    if view.dtype not in allowed:
        names = " or ".join(part for part in (", ".join(allowed[:-1]), allowed[-1]) if part)
        raise DtypeError(f"`{name}` has dtype {view.dtype}: expected {names}{meaning}; {_cast(name, allowed[0])}.")


def same_dtype(name: str, view: Any, other: str, reference: Any) -> None:
    if view.dtype != reference.dtype:
        raise DtypeError(
            f"`{name}` has dtype {view.dtype}: expected {reference.dtype}, as `{other}` has; "
            f"{_cast(name, reference.dtype)}."
        )


def _cast(name: str, wanted: str) -> str:
    return f'cast it, for example `{name}.astype("{wanted}")` (PyTorch: `{name}.to(torch.{wanted})`)'


def no_overlap(name: str, view: Any) -> None:
    """Elements that are written must each have their own memory."""
    # Sorted by stride, each axis must step over everything that the smaller ones reach.
    reach = 0
    for stride, extent in sorted((abs(s), e) for s, e in zip(view.strides, view.shape, strict=True) if e > 1):
        if stride <= reach:
            raise ArgumentError(
                f"`{name}` has strides {view.strides} for shape {view.shape}: its elements overlap in memory; "
                "pass an array of its own."
            )
        reach += stride * (extent - 1)
