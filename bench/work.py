"""One grouped product to be timed: operands, the bytes it must move, and a judge of results that never waits.

The benchmark and the comparison of trees use it; it knows no contender.
"""

import dataclasses
import functools
from typing import Any

import numpy as np
import torch

from bench.shapes import Problem

OPS = ("forward", "input-gradient", "weight-gradient")


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """Operands of one product, and what the result must be.

    Attributes:
        problem: Extents and counts.
        op: One of `OPS`.
        x: (rows, k).
        other: Weights (groups, k, n), in an input gradient the `.mT` of (groups, n, k); or dy (rows, n).
        offs: int32 end offsets.
        want: Products of each group in float32.
        bound: How far a right result may lie from `want`, element by element.
    """

    problem: Problem
    op: str
    x: torch.Tensor
    other: torch.Tensor
    offs: torch.Tensor
    want: torch.Tensor
    bound: torch.Tensor

    @property
    def is_wgrad(self) -> bool:
        return self.op == OPS[2]

    def spans(self) -> list[tuple[int, int, int]]:
        """(group, first row, end row) of every group that has rows."""
        ends = np.cumsum(self.problem.counts).tolist()
        return [
            (g, end - count, end) for g, (end, count) in enumerate(zip(ends, self.problem.counts, strict=True)) if count
        ]

    def poisoned(self) -> torch.Tensor:
        """An output that is NaN all over."""
        return torch.full(self.want.shape, torch.nan, device=self.x.device, dtype=self.x.dtype)

    def error(self, result: torch.Tensor) -> torch.Tensor:
        """Largest |error| / bound as a device scalar; NaN where something was not written."""
        assert result.shape == self.want.shape, (result.shape, self.want.shape)
        if not result.numel():
            return torch.zeros((), device=result.device)
        parts = zip(result.flatten().chunk(8), self.want.flatten().chunk(8), self.bound.flatten().chunk(8), strict=True)
        return torch.stack([((got.float() - want).abs_() / bound).max() for got, want, bound in parts]).max()


def make(problem: Problem, op: str, device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> Work:
    """Random operands of `problem`, drawn on the device, with the products to compare with."""
    generator = torch.Generator(device).manual_seed(1)
    random = functools.partial(torch.randn, device=device, dtype=dtype, generator=generator)
    x = random(problem.rows, problem.k)
    if op == "weight-gradient":
        other, shape = random(problem.rows, problem.n), (problem.groups, problem.k, problem.n)
    else:
        weights = (problem.groups, problem.k, problem.n) if op == "forward" else (problem.groups, problem.n, problem.k)
        other, shape = random(*weights), (problem.rows, problem.n)
        other = other if op == "forward" else other.mT
    offs = torch.tensor(np.cumsum(problem.counts), dtype=torch.int32, device=device)
    want, bound = (torch.zeros(shape, device=device) for _ in range(2))
    work = Work(problem, op, x, other, offs, want, bound)
    for group, start, end in work.spans():
        if work.is_wgrad:
            a, b, place = x[start:end].T, other[start:end], group
        else:
            a, b, place = x[start:end], other[group], slice(start, end)
        terms = a.shape[1]
        torch.mm(a.float(), b.float(), out=want[place])
        # The reference carries float32 rounding of its own, hence twice the accumulation term.
        torch.mul((a.abs() @ b.abs()).float(), 8 * terms**0.5 * 2.0**-23 * 1.01, out=bound[place])
    bound.add_(want.abs(), alpha=2.0**-8).add_(1e-30)
    return work


def moved_bytes(problem: Problem, op: str) -> int:
    """Bytes that must cross the memory bus: rows once, each used weight once (weight gradient: every dw once)."""
    rows = 2 * problem.rows * (problem.k + problem.n)
    used = problem.groups if op == "weight-gradient" else sum(1 for count in problem.counts if count)
    return rows + 2 * used * problem.k * problem.n


def call_of(library: Any, work: Work, offs: Any, **options: Any) -> torch.Tensor:
    """Our product from a copy of the library; `offs` may be a Schedule of it."""
    call = library.grouped_mm_wgrad if work.is_wgrad else library.grouped_mm
    return call(work.x, work.other, offs, **options)
