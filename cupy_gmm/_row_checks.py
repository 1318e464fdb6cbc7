"""Checks of `routing` and `moe`: what the host can see of an argument fits, or a sentence says what to do.

Works on views alone: no kernel, no contents of arrays.
"""

from collections.abc import Sequence
from typing import Any

from . import _checks
from ._arrays import Site, View
from ._rowwise import ITEM_BYTES, MAX_EXPERTS, MAX_ROWS
from .errors import ArgumentError, DtypeError

__all__ = [
    "assignment_rows", "contiguous", "expert_ids", "gate_up_extents", "gate_up_rows", "of_shape", "result", "routes",
    "row_dtype", "tokens_of", "weights_of",
]  # fmt: skip


def row_dtype(name: str, view: View, allowed: Sequence[str] = tuple(ITEM_BYTES)) -> None:
    _checks.dtype(name, view, allowed)


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
    _checks.dtype("expert_idx", ids, _checks.INDEX_DTYPES)
    experts = _checks.whole_number("num_experts", num_experts, "the number of experts")
    if not 0 <= experts <= MAX_EXPERTS:
        hint = "; spread them over several layers" if experts > 0 else ""
        raise ArgumentError(f"`num_experts` is {experts}: expected 0 to {MAX_EXPERTS}{hint}.")
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
        _checks.rank(f"routing.{name}", view, 1, "one axis", "pass it as `route` returns it")
        _checks.dtype(f"routing.{name}", view, ("int32",))
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
    _checks.rank(name, view, 2, "(tokens * slots, h)")
    row_dtype(name, view)
    if view.shape[0] != assignments:
        raise ArgumentError(
            f"`{name}` has shape {view.shape}: expected ({assignments}, h), a row for each element of "
            "`routing.order`; pass rows as `permute` arranges them."
        )


def weights_of(view: View, assignments: int, known: int | None) -> int:
    """Checks the weights (tokens, slots); returns the number of tokens."""
    one = "for one expert a token pass `weights[:, None]`" if len(view.shape) == 1 else None
    _checks.rank("weights", view, 2, "(tokens, slots)", one)
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
    rows, inner = gate_up_extents(view)
    if rows > MAX_ROWS:
        raise ArgumentError(f"`gate_up` has shape {view.shape}: expected less than 2^31 rows; split the call.")
    return rows, inner


def gate_up_extents(view: View) -> tuple[int, int]:
    """Checks shape and dtype of `gate_up`, whose rows may be a symbol; returns them and half its width."""
    _checks.rows("gate_up", view, "(rows, 2 * inner)")
    row_dtype("gate_up", view)
    rows, width = view.shape
    if width % 2:
        raise ArgumentError(
            f"`gate_up` has shape {view.shape}: expected an even last axis, [gate | up]; pass both halves."
        )
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
    _checks.no_overlap(name, view)
    return out, view
