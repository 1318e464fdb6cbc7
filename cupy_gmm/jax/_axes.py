"""Inside `jax.shard_map`: over which axes of the mesh a value differs from device to device.

Used where operands meet and where a foreign call gives a result, of which JAX cannot know it. Elsewhere, and in
versions of JAX that do not keep count, all of this does nothing.
"""

from typing import Any

import jax
from jax import lax


def of(*operands: Any) -> frozenset[str]:
    """Axes over which some operand differs."""
    return frozenset().union(*map(_of_one, operands))


def _of_one(operand: Any) -> frozenset[str]:
    typeof = getattr(jax, "typeof", None)
    if typeof is None:
        return frozenset()
    found = typeof(operand)
    kept = getattr(found, "manual_axis_type", None)  # what later versions have instead of `vma`
    return frozenset(getattr(found, "vma", ()) if kept is None else kept.varying)


def varying(value: Any, axes: frozenset[str]) -> Any:
    """`value` as one that may differ over `axes`; its gradient is summed over those that are new."""
    new = tuple(sorted(axes - of(value)))
    if not new:
        return value
    if hasattr(lax, "pcast"):
        return lax.pcast(value, new, to="varying")
    return lax.pvary(value, new)


def alike(*operands: Any) -> tuple[Any, ...]:
    """All operands as ones that differ over the same axes."""
    axes = of(*operands)
    return tuple(varying(operand, axes) for operand in operands)
