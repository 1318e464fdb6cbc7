"""QuACK's varlen products (`quack-kernels`), with its static and its dynamic scheduler, otherwise as it chooses."""

from typing import Any

import torch

from bench.peers import Calls, Unavailable
from bench.work import Work


def grouped(work: Work) -> Calls:
    """`quack.gemm_interface.gemm`: groups along M, in a weight gradient along K."""
    try:
        from quack.gemm_interface import gemm
    except ImportError as error:
        raise Unavailable(f"QuACK cannot be imported: {error}") from error
    starts = torch.nn.functional.pad(work.offs, (1, 0))  # a leading 0, as it wants
    if work.is_wgrad:
        a, groups = work.x.t(), {"cu_seqlens_k": starts}
    else:
        a, groups = work.x, {"cu_seqlens_m": starts}

    def call(dynamic: bool) -> Any:
        out = work.poisoned()
        return lambda: gemm(a, work.other, out=out, **groups, dynamic_scheduler=dynamic, tuned=False)

    return {"static": call(False), "dynamic": call(True)}
