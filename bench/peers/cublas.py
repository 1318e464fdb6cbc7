"""Peers that torch brings: the dense roof, its grouped product, and one cuBLAS product per expert in a CUDA graph."""

from collections.abc import Callable
from typing import Any

import torch

from bench.work import Work


def dense(work: Work) -> Callable[[], Any]:
    """cuBLAS at the same FLOPs; weight gradient: batched over G groups of rows / G rows."""
    problem, like = work.problem, {"device": work.x.device, "dtype": work.x.dtype}
    if work.is_wgrad:
        mean = max(1, problem.rows // problem.groups)
        a, b = work.x[: problem.groups * mean], work.other[: problem.groups * mean]
        if len(a) < problem.groups * mean:  # fewer rows than groups
            a = torch.randn(problem.groups, problem.k, **like)
            b = torch.randn(problem.groups, problem.n, **like)
        a, b = a.view(problem.groups, mean, problem.k).mT, b.view(problem.groups, mean, problem.n)
        out = torch.empty(problem.groups, problem.k, problem.n, **like)
        return lambda: torch.bmm(a, b, out=out)
    out = torch.empty(problem.rows, problem.n, **like)
    return lambda: torch.mm(work.x, work.other[0], out=out)


def grouped(work: Work) -> Callable[[], Any]:
    """torch's grouped product."""
    product = getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm
    if work.is_wgrad:
        return lambda: product(work.x.t(), work.other, offs=work.offs)
    return lambda: product(work.x, work.other, offs=work.offs)


def loop(work: Work) -> Callable[[], Any]:
    """One cuBLAS product per expert that has rows, in a CUDA graph: launched by the host, the gaps would dominate."""
    out = work.poisoned()

    def products() -> None:
        if work.is_wgrad:
            for group, count in enumerate(work.problem.counts):
                if not count:
                    out[group].zero_()
            for group, start, end in work.spans():
                torch.mm(work.x[start:end].t(), work.other[start:end], out=out[group])
        else:
            for group, start, end in work.spans():
                torch.mm(work.x[start:end], work.other[group], out=out[start:end])

    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        products()  # cuBLAS takes its workspace outside the capture
        stream.synchronize()
        out.fill_(torch.nan)
        graph.capture_begin(capture_error_mode="thread_local")
        products()
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)

    def replay() -> torch.Tensor:
        graph.replay()
        return out

    return replay
