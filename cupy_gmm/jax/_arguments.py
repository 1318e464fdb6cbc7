"""Checks of traced arguments: what shapes and dtypes tell, before anything is staged out. Sentences as everywhere."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _checks, _problem
from .._arrays.dlpack import dense
from .._arrays.site import View
from ..errors import ArgumentError, DtypeError


def array(name: str, value: Any) -> Any:
    """`value` as a jax.Array or tracer with extents that are numbers."""
    _checks.required((name, value))
    if not isinstance(value, jax.Array | np.ndarray):
        if not hasattr(value, "__jax_array__"):
            raise ArgumentError(
                f"`{name}` is a {type(value).__name__}: expected a jax.Array, a NumPy array or a value that JAX is "
                "tracing; pass `jax.numpy.asarray` of it."
            )
        value = jnp.asarray(value)
    if not all(isinstance(extent, int) for extent in value.shape):
        raise ArgumentError(
            f"`{name}` has the symbolic shape {value.shape}: expected extents that are numbers, as kernels are chosen "
            "by them; export the function once for each shape."
        )
    return jnp.asarray(value)


def view(value: Any) -> View:
    """What the shared checks read of an array."""
    shape = tuple(value.shape)
    return View(0, shape, dense(shape), str(value.dtype), -1, True, None)


def offset(value: Any) -> tuple[int, Any]:
    """(host value, operand): -1 and an int32 array of one element, or the host value and None."""
    if value is None:
        return 0, None
    if isinstance(value, int | np.integer) and not isinstance(value, bool):
        return int(value), None
    if not hasattr(value, "shape"):
        raise ArgumentError(f"`group_offset` is {value!r}: expected an int, or an int32 array of one element.")
    found = array("group_offset", value)
    if found.shape not in ((), (1,)):
        raise ArgumentError(f"`group_offset` has shape {found.shape}: expected one element, shape () or (1,).")
    _checks.dtype("group_offset", found, ("int32",))
    return -1, found.reshape(())


def group_range(weights: str, groups: int, offs: str, schedule_groups: int, group_offset: int, exact: bool) -> None:
    """Checks the groups with local weights against the groups of `offs`."""
    if group_offset >= 0 and group_offset + groups > schedule_groups or exact and groups != schedule_groups:
        wanted = f"{groups}" if exact else f"at least {max(group_offset, 0) + groups}"
        hint = "; name the first of them by `group_offset` where the weights are those of some groups" if exact else ""
        raise ArgumentError(
            f"`{offs}` has length {schedule_groups}: expected {wanted}, as {weights} {groups} groups"
            f"{f' from `group_offset` {group_offset} on' if group_offset > 0 else ''}{hint}."
        )


def negative_offset(group_offset: Any, groups: int) -> None:
    """Checks a `group_offset` of the host."""
    if isinstance(group_offset, int | np.integer) and not isinstance(group_offset, bool):
        _problem.group_offset_in(groups, int(group_offset))


def ragged(lhs: Any, rhs: Any, group_sizes: Any) -> None:
    """Shapes of `ragged_dot`, and the dtype of its sizes."""
    _checks.rows("lhs", view(lhs), "(rows, k)")
    _checks.rank("rhs", view(rhs), 3, "(groups, k, n)", "for one group pass `rhs[None]`" if rhs.ndim == 2 else None)
    if rhs.shape[1] != lhs.shape[1]:
        hint = "; pass `rhs.mT`" if rhs.shape[2] == lhs.shape[1] else ""
        raise ArgumentError(
            f"`rhs` has shape {rhs.shape}: expected (groups, k, n) with k = {lhs.shape[1]}, as `lhs` has shape "
            f"{lhs.shape}{hint}."
        )
    _checks.rank("group_sizes", view(group_sizes), 1, "(groups,) rows of each group", "pass `group_sizes.reshape(-1)`")
    if not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise DtypeError(
            f"`group_sizes` has dtype {group_sizes.dtype}: expected integers, rows of each group; cast it, for example "
            '`group_sizes.astype("int32")`.'
        )
