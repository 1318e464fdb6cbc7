"""The schedule and the products as JAX traces them: a call of ours on CUDA, `jax.lax.ragged_dot` elsewhere.

`_gradients`, `_products` and `_rows` call these with arguments that are checked. The platform is chosen when a program
is lowered, from shapes alone: no device is asked for anything. What JAX could transform without meaning is refused
with a sentence here.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from .._config import GROUPED_MM
from ..errors import UnsupportedError
from . import _axes, _fallback, _wire
from ._wire import ProductCall, ScheduleCall

_FOLD = (
    "the rows of all examples make one matrix, so expected `x` with them folded into its rows, sorted by group; "
    "reshape instead of `vmap`, or use `jax.lax.map` over the examples."
)


def schedule(offs: Any, group_offset: Any, call: ScheduleCall) -> Any:
    """The table that all products over the same rows share, an int32 array.

    Two calls with the same arguments inside one program become one: XLA merges them. But not across `checkpoint`,
    whose barrier keeps what it recomputes apart; the name lets a policy keep the table.
    """
    operands = (offs,) if call.group_offset >= 0 else (offs, group_offset)
    table = _schedule(*_axes.alike(*map(lax.stop_gradient, operands)), call=call)
    return checkpoint_name(table, _wire.SCHEDULE_TARGET)


@functools.partial(jax.jit, static_argnames="call", inline=True)
def _schedule(*operands: Any, call: ScheduleCall) -> Any:
    def elsewhere(offs: Any, group_offset: Any = call.group_offset) -> Any:
        return _fallback.schedule(
            offs, jnp.reshape(group_offset, ()), rows=call.rows, sizes=call.sizes, words=call.words
        )

    def cuda(*operands: Any) -> Any:
        result = jax.ShapeDtypeStruct((call.words,), jnp.int32)
        return foreign(_wire.SCHEDULE_TARGET, result, operands, call)

    return by_platform("the schedule", _FOLD, cuda, elsewhere, *operands)


@functools.partial(jax.jit, static_argnames="call", inline=True)
def product(a: Any, b: Any, table: Any, call: ProductCall) -> Any:
    """y of x and w, or dw of x and dy. Not differentiable: `_gradients` gives the rules."""

    def elsewhere(a: Any, b: Any, table: Any) -> Any:
        facts: dict[str, Any] = {"schedule_groups": call.schedule_groups, "out_dtype": call.out_dtype}
        if call.op != GROUPED_MM:
            return _fallback.grouped_mm_wgrad(a, b, table, groups=call.groups, **facts)
        return _fallback.grouped_mm(a, b.swapaxes(1, 2) if call.transposed else b, table, **facts)

    def cuda(*operands: Any) -> Any:
        result = jax.ShapeDtypeStruct(call.problem.out_shape, call.out_dtype)
        scratch = jax.ShapeDtypeStruct((call.scratch_bytes,), jnp.uint8)
        return foreign(_wire.PRODUCT_TARGET[call.op], (result, scratch), operands, call)[0]

    @jax.custom_jvp
    def first_order(*operands: Any) -> Any:
        return by_platform(call.op, _FOLD, cuda, elsewhere, *operands)

    @first_order.defjvp
    def refuse(*_: Any) -> Any:
        raise UnsupportedError(
            f"{call.op} was differentiated where it has no derivative, as in a second derivative or in a derivative of "
            "`grouped_mm_wgrad`: expected `jax.grad` or `jax.vjp` of `ragged_dot` or `grouped_mm`, taken once; use "
            "`jax.lax.ragged_dot` for more."
        )

    return first_order(a, b, table)


def by_platform(name: str, advice: str, cuda: Callable[..., Any], elsewhere: Callable[..., Any], *operands: Any) -> Any:
    """One of two functions, chosen when the program is lowered; `advice` says what to do instead of `vmap`."""

    @jax.custom_batching.custom_vmap
    def chosen(*operands: Any) -> Any:
        return lax.platform_dependent(*operands, cuda=cuda, default=elsewhere)

    @chosen.def_vmap
    def refuse(*_: Any) -> Any:
        raise UnsupportedError(f"`jax.vmap` met {name}: {advice}")

    return chosen(*operands)


def foreign(target: str, results: Any, operands: Any, call: Any) -> Any:
    """A call of ours with its facts; each result differs from device to device where an operand does."""
    axes = _axes.of(*operands)
    found = jax.ffi.ffi_call(target, results)(*operands, call=_wire.text(call))
    return jax.tree.map(lambda result: _axes.varying(result, axes), found)
