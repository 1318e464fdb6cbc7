"""Checks of traced arguments: what shapes and dtypes tell, before anything is staged out. Sentences as everywhere."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _checks, _problem, _schedule
from .._arrays.site import View
from ..errors import ArgumentError, DtypeError
from . import _wire


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
    return _wire.view(tuple(value.shape), str(value.dtype))


def offset(value: Any, groups: int, offs: str = "offs") -> tuple[int, Any]:
    """(host value, None), or (-1, int32 array of one element).

    Args:
        value: What the caller passed as `group_offset`.
        groups: Of the offsets or sizes.
        offs: Name of these.
    """
    if value is None:
        return 0, None
    host, operand = _schedule.split_group_offset(value)
    if host is not None:
        _problem.group_offset_in(groups, host, offs)
        return host, None
    operand = array("group_offset", operand)
    _schedule.check_group_offset(view(operand))
    return -1, operand.reshape(())


def ragged_groups(groups: int, sizes: int, group_offset: int, exact: bool) -> None:
    """Checks the groups of `rhs` against the length of `group_sizes`.

    Args:
        groups: Of `rhs`.
        sizes: Length of `group_sizes`.
        group_offset: The first local one, or -1 where the host does not know it.
        exact: Whether all groups must be local.
    """
    last = max(group_offset, 0) + groups
    if exact and groups != sizes:
        raise ArgumentError(
            f"`group_sizes` has length {sizes}: expected {groups}, as `rhs` has {groups} groups; where these are "
            "some of all groups, pass the index of the first one as `group_offset`."
        )
    if last > sizes:
        where = f" from `group_offset` {group_offset} on" if group_offset > 0 else ""
        raise ArgumentError(
            f"`group_sizes` has length {sizes}: expected at least {last}, as `rhs` has {groups} groups{where}; "
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
