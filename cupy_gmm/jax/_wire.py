"""What travels with a call: its facts as one line of text, and the extents of its results. Pure: no device, no JAX.

`_lowering` writes the text into the program, `_handler` reads it when the program is loaded, perhaps in another
process and by another release; `FORMAT` tells these apart.
"""

import functools
from dataclasses import dataclass, fields
from typing import Any

from .. import _heuristics, _plan, _problem, _table
from .._arrays.dlpack import dense
from .._arrays.site import View
from .._config import GROUPED_MM, HOPPER, WGRAD
from ..errors import UnsupportedError

FORMAT = 1
NONE = "-"

# Names of XLA's targets; in the text of a program they stand behind `stablehlo.custom_call`.
SCHEDULE_TARGET = "cupy_gmm.schedule"
PRODUCT_TARGET = {op: f"cupy_gmm.{op}" for op in (GROUPED_MM, WGRAD)}
TARGETS = (SCHEDULE_TARGET, *PRODUCT_TARGET.values())


@dataclass(frozen=True, slots=True)
class ScheduleCall:
    """A call that builds a table of row blocks.

    Attributes:
        rows: Rows of x.
        groups: Length of the operand.
        sizes: Whether the operand holds group sizes, else end offsets.
        wide: Whether it is int64, else int32.
        group_offset: Index of the first group with local weights; -1 when it is an operand.
    """

    rows: int
    groups: int
    sizes: bool
    wide: bool
    group_offset: int

    @property
    def words(self) -> int:
        """int32 elements of the result."""
        return table_words(self.rows, self.groups)


@dataclass(frozen=True, slots=True)
class ProductCall:
    """A product of row-major arrays.

    Attributes:
        op: "grouped_mm" or "grouped_mm_wgrad".
        rows: Rows of x.
        k: Columns of x.
        n: Columns of the result's matrices.
        groups: Groups of the weights or of their gradient.
        schedule_groups: Groups in the schedule.
        dtype: Of the operands.
        out_dtype: Of the result.
        transposed: Whether the weights lie as (groups, n, k).
        config: Name of a forced tuning point, or "-".
    """

    op: str
    rows: int
    k: int
    n: int
    groups: int
    schedule_groups: int
    dtype: str
    out_dtype: str
    transposed: bool
    config: str

    @property
    def forced(self) -> str | None:
        return None if self.config == NONE else self.config

    @property
    def problem(self) -> _problem.Problem:
        x = view((self.rows, self.k), self.dtype)
        if self.op != GROUPED_MM:
            dy = view((self.rows, self.n), self.dtype)
            return _problem.weight_gradient(x, dy, None, self.out_dtype, self.groups, False)
        w = view((self.groups, self.n, self.k) if self.transposed else (self.groups, self.k, self.n), self.dtype)
        if self.transposed:
            group, row, column = w.strides
            w = w._replace(shape=(self.groups, self.k, self.n), strides=(group, column, row))
        return _problem.forward(x, w, None, self.out_dtype)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the second result: fixed by the shapes, so that lowering needs no device."""
        return _plan.most_scratch(self.problem, self.forced)


def view(shape: tuple[int, ...], dtype: str, address: int = 0) -> View:
    """A row-major array of XLA's, whose buffers are aligned; 0 where the address is not known yet."""
    return View(address, shape, dense(shape), dtype, -1, False, None)


def table_words(rows: int, groups: int) -> int:
    """int32 elements that the table takes on any architecture."""
    shapes = {_heuristics.block_shape(rows, groups, arch) for arch in ("", HOPPER)}
    return max(_table.table_shape(groups, rows, shape).words for shape in shapes)


def text(call: Any) -> str:
    """`call` as the value of its attribute."""
    pairs = (f"{field.name}={_plain(getattr(call, field.name))}" for field in fields(call))
    return " ".join((f"format={FORMAT}", *pairs))


def _plain(value: Any) -> str:
    return str(int(value)) if isinstance(value, int) else value


@functools.lru_cache(4096)
def parsed(line: bytes, kind: type) -> Any:
    """The call of which `text` made `line`.

    Raises:
        UnsupportedError: Another release wrote it.
    """
    pairs = dict(part.partition("=")[::2] for part in line.decode().split(" "))
    if pairs.pop("format", None) != str(FORMAT) or set(pairs) != {field.name for field in fields(kind)}:
        raise UnsupportedError(
            f"this call carries `{line.decode()}`, which another release of this library wrote: expected format "
            f"{FORMAT}; lower or export the function again."
        )
    return kind(**{field.name: _read(field.type, pairs[field.name]) for field in fields(kind)})


def _read(kind: Any, word: str) -> int | bool | str:
    return word if kind is str else kind(int(word))
