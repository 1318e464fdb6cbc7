"""What travels with a call of routing or activation, and its launches. Pure: no device, no JAX.

`_rows` writes the text of a call into the program (`_wire.text`), `_row_handler` makes its launches when the program is
loaded.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from .. import _rowwise
from ._wire import NONE, view

OPS = ("route", "permute", "permute_backward", "combine", "combine_backward", "silu_mul", "silu_mul_backward")
TARGET = {op: f"cupy_gmm.{op}" for op in OPS}

Array = tuple[tuple[int, ...], str]  # shape and dtype


@dataclass(frozen=True, slots=True)
class RowsCall:
    """A call on row-major arrays.

    Attributes:
        op: One of OPS.
        tokens: Tokens; rows of an activation.
        slots: Assignments of a token; 1 for an activation.
        experts: Of the routing; 0 for an activation.
        width: Columns of the rows; of one half of them for an activation; 0 for `route`.
        dtype: Of the rows; of the ids for `route`.
        weights: dtype of the weights, or "-".
    """

    op: str
    tokens: int
    slots: int
    experts: int
    width: int
    dtype: str
    weights: str = NONE

    @property
    def operands(self) -> tuple[Array, ...]:
        """What XLA passes, in its order."""
        rows, assigned, weights = self._rows()
        routes = (((self.tokens * self.slots,), "int32"),) * 2 + (((self.experts,), "int32"),)
        wide: Array = ((self.tokens, 2 * self.width), self.dtype)
        return {
            "route": (((self.tokens, self.slots), self.dtype),),
            "permute": (rows, *routes),
            "permute_backward": (assigned, *routes),
            "combine": (assigned, *routes, weights),
            "combine_backward": (rows, assigned, *routes, weights),
            "silu_mul": (wide,),
            "silu_mul_backward": (wide, rows),
        }[self.op]

    @property
    def results(self) -> tuple[Array, ...]:
        """What XLA allocates, in its order; the scratch of `route` is the fifth."""
        rows, assigned, weights = self._rows()
        of_each, of_expert = ((self.tokens * self.slots,), "int32"), ((self.experts,), "int32")
        words = _rowwise.route_scratch((self.tokens, self.slots), self.experts) // 4
        return {
            "route": (of_each, of_each, of_expert, of_expert, *([((words,), "int32")] if words else ())),
            "permute": (assigned,),
            "permute_backward": (rows,),
            "combine": (rows,),
            "combine_backward": (assigned, (weights[0], "float32")),
            "silu_mul": (rows,),
            "silu_mul_backward": (((self.tokens, 2 * self.width), self.dtype),),
        }[self.op]

    def _rows(self) -> tuple[Array, Array, Array]:
        """A row for each token, a row for each assignment, the weights."""
        assigned = (self.tokens * self.slots, self.width), self.dtype
        return ((self.tokens, self.width), self.dtype), assigned, ((self.tokens, self.slots), self.weights)

    def launches(self, addresses: Sequence[int]) -> tuple[_rowwise.Launch, ...]:
        """What the CuPy face launches for row-major arrays at these addresses.

        Args:
            addresses: Of the operands, then of the results.
        """
        arrays = (*self.operands, *self.results)
        views = [view(*array, address) for address, array in zip(addresses, arrays, strict=True)]
        match self.op:
            case "route":
                return _rowwise.route(views[0], views[1:5], views[5].ptr if len(views) > 5 else 0)
            case "permute":
                return _rowwise.permute(views[1:4], views[0], views[4])
            case "permute_backward":
                return _rowwise.combine(views[1:4], views[0], None, views[4])
            case "combine":
                return _rowwise.combine(views[1:4], views[0], views[4], views[5])
            case "combine_backward":
                return _rowwise.combine_backward(views[2:5], views[0], views[1], views[5], views[6], views[7])
            case "silu_mul":
                return _rowwise.silu_mul(views[0], views[1])
        return _rowwise.silu_mul_backward(views[0], views[1], views[2])
