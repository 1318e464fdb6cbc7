"""Checks of `routing` and `moe`: what the host can see of an argument fits, or a sentence says what to do.

Works on views alone: no kernel, no contents of arrays.
"""

from collections.abc import Sequence
from typing import Any

from ._arrays import Site, View
from ._rowwise import ITEM_BYTES, MAX_EXPERTS, MAX_ROWS
from .errors import ArgumentError, DtypeError

__all__ = [
    "assignment_rows", "contiguous", "expert_ids", "gate_up_rows", "of_shape", "rank", "result", "routes",
    "row_dtype", "same_dtype", "tokens_of", "weights_of",
]  # fmt: skip

_WHOLE_NUMBERS = ("int32", "int64")


def rank(name: str, view: View, axes: int, meaning: str) -> None:
    if len(view.shape) != axes:
        raise ArgumentError(f"`{name}` has shape {view.shape}: expected {meaning}; pass an array of {axes} axes.")


def row_dtype(name: str, view: View, allowed: Sequence[str] = tuple(ITEM_BYTES)) -> None:
    if view.dtype not in allowed:
        names = " or ".join([", ".join(allowed[:-1]), allowed[-1]])
        raise DtypeError(
            f"`{name}` has dtype {view.dtype}: expected {names}; cast it, for example `{name}.astype({allowed[0]})`."
        )


def same_dtype(name: str, view: View, other: str, reference: View) -> None:
    if view.dtype != reference.dtype:
        raise DtypeError(
            f"`{name}` has dtype {view.dtype}: expected {reference.dtype}, as `{other}` has; "
            f"cast it, for example `{name}.astype({reference.dtype})`."
        )


def of_shape(name: str, view: View, shape: tuple[int, ...], why: str) -> None:
    if view.shape != shape:
        raise ArgumentError(f"`{name}` has shape {view.shape}: expected {shape}, {why}.")


def contiguous(name: str, view: View) -> None:
    step = 1
    for stride, extent in zip(reversed(view.strides), reversed(view.shape), strict=True):
        if extent > 1 and stride != step:
            raise ArgumentError(
                f"`{name}` has strides {view.strides} for shape {view.shape}: expected contiguous elements; "
                "pass a copy of it."
            )
        step *= max(extent, 1)


def expert_ids(ids: View, num_experts: Any) -> int:
    """Checks the arguments of `route`; returns the number of experts."""
    if len(ids.shape) != 2:
        hint = "; for one expert a token pass `expert_idx[:, None]`" if len(ids.shape) == 1 else ""
        raise ArgumentError(f"`expert_idx` has shape {ids.shape}: expected (tokens, slots){hint}.")
    if ids.dtype not in _WHOLE_NUMBERS:
        raise DtypeError(f"`expert_idx` has dtype {ids.dtype}: expected int32 or int64; cast it with `.astype(int32)`.")
    if isinstance(num_experts, bool) or not hasattr(num_experts, "__index__"):
        raise ArgumentError(f"`num_experts` is {num_experts!r}: expected the number of experts, an int.")
    experts = int(num_experts.__index__())
    if not 0 <= experts <= MAX_EXPERTS:
        raise ArgumentError(
            f"`num_experts` is {experts}: expected 0 to {MAX_EXPERTS}; spread them over several layers."
        )
    tokens, slots = ids.shape
    if tokens * max(slots, 1) > MAX_ROWS:
        raise ArgumentError(
            f"`expert_idx` has shape {ids.shape}: expected less than 2^31 assignments; "
            "split the tokens over several calls."
        )
    return experts


def routes(order: View, inverse: View, offs: View) -> None:
    """Checks the arrays of a Routing, which a caller may have built."""
    for name, view in (("order", order), ("inverse", inverse), ("offs", offs)):
        if len(view.shape) != 1:
            raise ArgumentError(
                f"`routing.{name}` has shape {view.shape}: expected one axis; pass it as `route` returns it."
            )
        if view.dtype != "int32":
            raise DtypeError(f"`routing.{name}` has dtype {view.dtype}: expected int32; cast it with `.astype(int32)`.")
        contiguous(f"routing.{name}", view)
    of_shape("routing.inverse", inverse, order.shape, "as `routing.order` has; pass arrays of one `route` call")
    if order.shape[0] > MAX_ROWS:
        raise ArgumentError(f"`routing.order` has shape {order.shape}: expected less than 2^31 assignments.")


def tokens_of(assignments: int, known: int | None, tokens: int | None, name: str) -> int:
    """The number of tokens, from the Routing (`known`) and from the argument called `name` (`tokens`)."""
    if known is None and tokens is None:
        raise ArgumentError(
            "`routing` has tokens None: expected the number of tokens; build it as `Routing(..., tokens=T)`."
        )
    if known is not None and tokens is not None and known != tokens:
        raise ArgumentError(
            f"`{name}` has {tokens} tokens: expected {known}, as `routing` was made for; pass the array that "
            "belongs to this routing."
        )
    count = known if tokens is None else tokens
    assert count is not None
    if not 0 <= count <= MAX_ROWS or (assignments % count if count else assignments):
        raise ArgumentError(
            f"`{name}` has {count} tokens: expected a divisor of {assignments}, the length of "
            "`routing.order`; pass the array that belongs to this routing."
        )
    return count


def assignment_rows(name: str, view: View, assignments: int) -> None:
    """An array with a row for each assignment."""
    rank(name, view, 2, "(tokens * slots, h)")
    row_dtype(name, view)
    if view.shape[0] != assignments:
        raise ArgumentError(
            f"`{name}` has shape {view.shape}: expected ({assignments}, h), a row for each element of "
            "`routing.order`; pass rows as `permute` arranges them."
        )


def weights_of(view: View, assignments: int, known: int | None) -> int:
    """Checks the weights (tokens, slots); returns the number of tokens."""
    rank("weights", view, 2, "(tokens, slots)")
    row_dtype("weights", view, ("float32", "bfloat16", "float16"))
    tokens = tokens_of(assignments, known, view.shape[0], "weights")
    if tokens and view.shape[1] != assignments // tokens:
        raise ArgumentError(
            f"`weights` has shape {view.shape}: expected {(tokens, assignments // tokens)}, as `routing` has "
            f"{assignments} assignments; pass one weight for each element of `expert_idx`."
        )
    return tokens


def gate_up_rows(view: View) -> tuple[int, int]:
    """Checks `gate_up`; returns its rows and half its width."""
    rank("gate_up", view, 2, "(rows, 2 * inner)")
    row_dtype("gate_up", view)
    rows, width = view.shape
    if width % 2:
        raise ArgumentError(
            f"`gate_up` has shape {view.shape}: expected an even last axis, [gate | up]; pass both halves."
        )
    if rows > MAX_ROWS:
        raise ArgumentError(f"`gate_up` has shape {view.shape}: expected less than 2^31 rows; split the call.")
    return rows, width // 2


def result(
    site: Site,
    call: str,
    name: str,
    shape: tuple[int, ...],
    dtype: str,
    out: Any,
    view: View | None,
    *inputs: View,
) -> tuple[Any, View]:
    """The caller's `out` after its checks, or fresh memory; and its view."""
    if view is None:
        return site.empty(shape, dtype)
    of_shape(name, view, shape, f"the shape of the result of `{call}`; allocate it so")
    if view.dtype != dtype:
        raise DtypeError(
            f"`{name}` has dtype {view.dtype}: expected {dtype}, that of the result of `{call}`; allocate it so."
        )
    if any(view.ptr and view.ptr == other.ptr for other in inputs):
        raise ArgumentError(f"`{name}` begins where an input of `{call}` does: pass an array of its own.")
    # Sorted by stride, each axis must step over everything that the smaller ones reach.
    reach = 0
    for stride, extent in sorted((abs(s), e) for s, e in zip(view.strides, shape, strict=True) if e > 1):
        if stride <= reach:
            raise ArgumentError(
                f"`{name}` has strides {view.strides} for shape {shape}: its elements overlap; "
                "pass an array of its own."
            )
        reach += stride * (extent - 1)
    return out, view
