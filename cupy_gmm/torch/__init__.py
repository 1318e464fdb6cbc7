"""The library for PyTorch training: autograd, `torch.compile`, and the arguments of `torch.nn.functional`.

    from cupy_gmm.torch import grouped_mm     # instead of torch.nn.functional
    y = grouped_mm(x, w, offs=offs)

Operators registered with `torch.library` under `torch.ops.cupy_gmm`. Importing this imports PyTorch; `import cupy_gmm`
does not import this.
"""

from .layer import combine as combine
from .layer import expert_ffn as expert_ffn
from .layer import permute as permute
from .layer import route as route
from .layer import silu_mul as silu_mul
from .products import grouped_mm as grouped_mm
from .products import grouped_mm_wgrad as grouped_mm_wgrad
