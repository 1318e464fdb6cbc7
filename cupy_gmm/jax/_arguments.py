"""Checks of traced arguments: what shapes and dtypes tell, before anything is staged out. Sentences as everywhere."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _checks, _problem, _schedule
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


def offset(value: Any, groups: int) -> tuple[int, Any]:
    """(host value, None), or (-1, int32 array of one element).

    Args:
        value: What the caller passed as `group_offset`.
        groups: Of the offsets or sizes.
    """
    if value is None:
        return 0, None
    host, operand = _schedule.split_group_offset(value)
    if operand is None:
        _problem.group_offset_in(groups, host or 0)
        return host or 0, None
    operand = array("group_offset", operand)
    _schedule.check_group_offset(view(operand))
    return -1, operand.reshape(())


def local_groups(num_groups: Any, groups: int, host_offset: int) -> int:
    """Groups of a weight gradient: said, or all from the offset on."""
    if num_groups is not None:
        count = _checks.whole_number("num_groups", num_groups, "the number of groups of the result")
        if count < 0:
            raise ArgumentError(f"`num_groups` is {count}: expected 0 or more, the number of groups of the result.")
        return count
    if host_offset < 0:
        raise ArgumentError(
            "`num_groups` is None and `group_offset` is an array: pass `num_groups=`, the number of groups of the "
            "result."
        )
    return groups - host_offset


def group_range(weights: str, groups: int, offs: str, schedule_groups: int, group_offset: int, exact: bool) -> None:
    """Checks the groups with local weights against the groups of `offs`.

    Args:
        weights: Who has them, "`rhs` has".
        groups: How many.
        offs: Name of the sizes.
        schedule_groups: Their length.
        group_offset: The first local one, or -1 where the host does not know it.
        exact: Whether all groups must be local.
    """
    last = max(group_offset, 0) + groups
    if exact and groups != schedule_groups:
        raise ArgumentError(
            f"`{offs}` has length {schedule_groups}: expected {groups}, as {weights} {groups} groups; where these are "
            "some of all groups, pass the index of the first one as `group_offset`."
        )
    if last > schedule_groups:
        where = f" from `group_offset` {group_offset} on" if group_offset > 0 else ""
        raise ArgumentError(
            f"`{offs}` has length {schedule_groups}: expected at least {last}, as {weights} {groups} groups{where}; "
            "pass the sizes of all groups, not only the local ones."
        )


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
