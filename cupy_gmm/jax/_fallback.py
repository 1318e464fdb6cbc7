"""The products through `jax.lax.ragged_dot`: on every platform but CUDA, and for the dtypes that the kernels lack.

`_lowering` calls it. Adds what `ragged_dot` alone does not keep of the contract: any sizes are safe, rows past the end
are zero and unused, the weights of an empty group are unused, a range of groups can be local. Differentiable by JAX.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..reference import HEADER_WORDS
from . import _axes

GROUP_OFFSET = 3  # word of the table's header that holds the first local group (kernels/params.cuh)


def schedule(offs: Any, group_offset: Any, *, rows: int, sizes: bool, words: int) -> Any:
    """What of the kernels' table the products below read, in its places: the group offset and the bounds."""
    ends = _running_sum(offs, rows) if sizes else jnp.clip(offs, 0, rows).astype("int32")
    header = jnp.zeros(HEADER_WORDS + 1, "int32").at[GROUP_OFFSET].set(group_offset)
    return jnp.concatenate([header, lax.cummax(ends), jnp.zeros(words - header.size - ends.size, "int32")])


def _running_sum(sizes: Any, rows: int) -> Any:
    """Running sums clamped to [0, rows], exact whatever the sizes are.

    Halves of 16 bits are summed apart: int32 would wrap, and int64 is an option of JAX. (For up to 2^15 groups.)
    """
    if sizes.dtype == jnp.int64:
        return jnp.clip(jnp.cumsum(sizes), 0, rows).astype("int32")
    low, high = jnp.cumsum(sizes & 0xFFFF), jnp.cumsum(sizes >> 16)
    high = high + (low >> 16)
    within = (jnp.clip(high, 0, 0x7FFF) << 16) | (low & 0xFFFF)
    return jnp.where(high < 0, 0, jnp.where(high > 0x7FFF, rows, jnp.minimum(within, rows)))


def _local_sizes(table: Any, groups: int, schedule_groups: int) -> tuple[Any, Any, Any]:
    """First row, end row and sizes of the groups with local weights; a group that `offs` lacks is empty."""
    bounds = lax.slice(table, (HEADER_WORDS,), (HEADER_WORDS + 1 + schedule_groups,))
    edges = jnp.clip(jnp.arange(groups + 1) + table[GROUP_OFFSET], 0, schedule_groups)
    local = bounds[edges]
    return local[0], local[-1], local[1:] - local[:-1]


def grouped_mm(x: Any, w: Any, table: Any, *, schedule_groups: int, out_dtype: Any, precision: Any = None) -> Any:
    """Forward product of the local groups; `w` as (groups, k, n). An `out_dtype` of None is that of `ragged_dot`."""
    groups = w.shape[0]
    first, end, sizes = _local_sizes(table, groups, schedule_groups)
    row = lax.broadcasted_iota("int32", (x.shape[0], 1), 0)
    own = (row >= first) & (row < end)
    # Rows before the local ones make a group of their own, whose weights are zeros.
    inside = jnp.where((sizes > 0)[:, None, None], w, jnp.zeros((), w.dtype))
    padded = jnp.concatenate([jnp.zeros((1, *w.shape[1:]), w.dtype), inside])
    used = jnp.where(own, x, jnp.zeros((), x.dtype))
    y = lax.ragged_dot(
        used,
        padded,
        jnp.concatenate([first[None], sizes]).astype("int32"),
        precision=precision,
        preferred_element_type=_accumulator(out_dtype),
    )
    y = jnp.where(own, y, jnp.zeros((), y.dtype))
    return y if out_dtype is None else y.astype(out_dtype)


def grouped_mm_wgrad(x: Any, dy: Any, table: Any, *, groups: int, schedule_groups: int, out_dtype: Any) -> Any:
    """Weight gradient of the local groups: the transpose of the forward product in its weights."""
    sizes = _local_sizes(table, groups, schedule_groups)[2]
    x, dy = x.astype("float32"), dy.astype("float32")
    precision = lax.Precision.HIGHEST  # the operands hold more bits than a bfloat16, if they were float16

    def forward(w: Any) -> Any:
        return grouped_mm(x, w, table, schedule_groups=schedule_groups, out_dtype="float32", precision=precision)

    weights = jnp.zeros((groups, x.shape[1], dy.shape[1]), "float32")
    (dw,) = jax.vjp(forward, _axes.varying(weights, _axes.of(x, dy, table)))[1](dy)  # XLA drops the forward product
    return jnp.where((sizes > 0)[:, None, None], dw, 0.0).astype(out_dtype)


def _accumulator(out_dtype: Any) -> Any:
    """float32 for what is narrower."""
    if out_dtype is None or not jnp.issubdtype(out_dtype, jnp.floating):
        return out_dtype
    return jnp.promote_types(out_dtype, "float32")
