"""Grouped matrix products for mixture-of-experts layers: one launch for all experts, any group sizes.

    y = grouped_mm(x, w, offs)            x (rows, K) sorted by group, w (G, K, N), offs (G,) end offsets
    dx = grouped_mm(dy, w.mT, offs)
    dw = grouped_mm_wgrad(x, dy, offs)

Arrays of CuPy, PyTorch, JAX and NumPy; results come in the family of `x`. Importing this touches no device
and no framework; `cupy_gmm.counts`, `cupy_gmm.jax` and `cupy_gmm.torch` are imported when first named.
"""

from typing import Any as _Any

from ._version import __version__ as __version__
from .errors import ArgumentError as ArgumentError
from .errors import CompileError as CompileError
from .errors import DtypeError as DtypeError
from .errors import GmmError as GmmError
from .errors import UnsupportedError as UnsupportedError
from .moe import expert_ffn as expert_ffn
from .moe import expert_ffn_backward as expert_ffn_backward
from .moe import silu_mul as silu_mul
from .moe import silu_mul_backward as silu_mul_backward
from .ops import Schedule as Schedule
from .ops import async_status as async_status
from .ops import grouped_mm as grouped_mm
from .ops import grouped_mm_wgrad as grouped_mm_wgrad
from .ops import make_schedule as make_schedule
from .ops import offs_from_sizes as offs_from_sizes
from .routing import Routing as Routing
from .routing import combine as combine
from .routing import combine_backward as combine_backward
from .routing import permute as permute
from .routing import permute_backward as permute_backward
from .routing import route as route


def __getattr__(name: str) -> _Any:
    """Modules that cost time or need a framework, on first use."""
    if name in ("counts", "jax", "torch"):
        import importlib

        try:
            return importlib.import_module(f"{__name__}.{name}")
        except ImportError as error:  # so that `hasattr` says no
            raise AttributeError(f"`{__name__}.{name}` cannot be imported: {error}") from error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
