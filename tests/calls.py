"""One checked call of a product: poisoned memory in, every bit and every guard byte compared afterwards."""

import dataclasses
from typing import Any

import numpy as np

import cupy_gmm
from tests import layouts, oracle
from tests.backends import DTYPES, POISON, Backend, Placed

Spans = list[tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class Case:
    """What a call is made of. `kn` is what the call sees: x is (rows, k), the result's last axis is n."""

    groups: layouts.Groups
    kn: tuple[int, int]
    dtype: str = "bfloat16"
    out_dtype: str | None = None
    group_offset: int = 0
    local: int | None = None  # groups in `w` or in the weight gradient; None: all from `group_offset` on
    offs: np.ndarray | None = None  # instead of the group's own, e.g. malformed
    accumulate: bool = False

    @property
    def ends(self) -> np.ndarray:
        return self.groups.offs if self.offs is None else self.offs

    @property
    def spans(self) -> Spans:
        return oracle.bounds_of(self.ends, self.groups.rows)

    @property
    def locals(self) -> int:
        return len(self.ends) - self.group_offset if self.local is None else self.local

    @property
    def kind(self) -> str:
        return self.out_dtype or self.dtype

    def local_spans(self) -> Spans:
        """Rows of each local group; (0, 0) for one past the end of `offs`."""
        spans = self.spans
        wanted = range(self.group_offset, self.group_offset + self.locals)
        return [spans[group] if group < len(spans) else (0, 0) for group in wanted]


def rows_operand(rng: np.random.Generator, backend: Backend, case: Case, width: int, layout: layouts.Layout) -> Placed:
    """(rows, width) integers; NaN in every row that no local group owns."""
    shape = (case.groups.rows, width)
    if layout is layouts.broadcast:
        return backend.place(np.broadcast_to(oracle.integers(rng, shape[1:], case.dtype), shape), layout)
    values = oracle.integers(rng, shape, case.dtype)
    unused = np.ones(len(values), bool)
    for start, end in case.local_spans():
        unused[start:end] = False
    values[unused] = np.nan
    return backend.place(values, layout)


def weight_operand(rng: np.random.Generator, backend: Backend, case: Case, layout: layouts.Layout) -> Placed:
    """(local groups, k, n) integers; NaN in the weights of every group without rows."""
    shape = (case.locals, *case.kn)
    if layout is layouts.broadcast:
        return backend.place(np.broadcast_to(oracle.integers(rng, shape[1:], case.dtype), shape), layout)
    values = oracle.integers(rng, shape, case.dtype)
    values[[start == end for start, end in case.local_spans()]] = np.nan
    return backend.place(values, layout)


def mm(
    backend: Backend,
    rng: np.random.Generator,
    case: Case,
    *,
    x_layout: layouts.Layout = layouts.contiguous,
    w_layout: layouts.Layout = layouts.contiguous,
    out_layout: layouts.Layout | None = None,
    **options: Any,
) -> None:
    """Run `grouped_mm` and compare. A given `out_layout` asks for `out=`."""
    x = rows_operand(rng, backend, case, case.kn[0], x_layout)
    w = weight_operand(rng, backend, case, w_layout)
    expected = oracle.expected_mm(x.values, w.values, case.spans, case.kind, case.group_offset)
    out = None if out_layout is None else backend.output(expected.shape, case.kind, out_layout)
    _run("grouped_mm", backend, case, [x, w], expected, out, options)


def wgrad(
    backend: Backend,
    rng: np.random.Generator,
    case: Case,
    *,
    x_layout: layouts.Layout = layouts.contiguous,
    dy_layout: layouts.Layout = layouts.contiguous,
    out_layout: layouts.Layout | None = None,
    **options: Any,
) -> None:
    """Run `grouped_mm_wgrad` and compare. A given `out_layout`, or accumulation, asks for `out=`."""
    x = rows_operand(rng, backend, case, case.kn[0], x_layout)
    dy = rows_operand(rng, backend, case, case.kn[1], dy_layout)
    shape = (case.locals, *case.kn)
    out, before = None, None
    if case.accumulate:
        before = oracle.integers(rng, shape, case.kind)
        blank = np.full(before.dtype.itemsize // 2, POISON, np.uint16).view(before.dtype)[0]
        before[[start == end for start, end in case.local_spans()]] = blank
        out = backend.place(before, out_layout or layouts.contiguous)
        options["accumulate"] = True
    elif out_layout is not None:
        out = backend.output(shape, case.kind, out_layout)
    if case.local is not None:
        options["num_groups"] = case.local
    expected = oracle.expected_wgrad(x.values, dy.values, case.spans, case.kind, case.locals, case.group_offset, before)
    _run("grouped_mm_wgrad", backend, case, [x, dy], expected, out, options)


def _run(
    name: str,
    backend: Backend,
    case: Case,
    inputs: list[Placed],
    expected: np.ndarray,
    out: Placed | None,
    options: dict[str, Any],
) -> None:
    offs = options.pop("schedule", None)
    if offs is None:
        offs = backend.ints(case.ends, case.ends.dtype.name)
    if case.out_dtype is not None:
        options["out_dtype"] = DTYPES[case.out_dtype]
    if case.group_offset:
        options.setdefault("group_offset", case.group_offset)
    if out is None:
        backend.poison_allocator(expected.shape, case.kind)
    else:
        options["out"] = out.array
    result = getattr(cupy_gmm, name)(*(placed.array for placed in inputs), offs, **options)
    what = f"{name} {case} {sorted(options.keys() - {'out'})} {options.get('config', '')}"
    oracle.assert_same_bits(backend.get(result), expected, what)
    for placed in inputs:
        placed.check_untouched()
    if out is not None:
        assert result is out.array, f"{what}: `out` is not what came back"
        oracle.assert_same_bits(out.read(), expected, f"{what}, read from the buffer of `out`")
        out.check_guards()
