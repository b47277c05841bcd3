"""Slices of flat arrays: one for each worker, and for each device of its group."""

import jax
import jax.numpy as jnp
from jax import lax

from slamb_jax import _collectives as collectives
from slamb_jax._axes import (
    AxisName,
    axis_size,
    tracked_axes,
    varying_axes,
    worker_index,
)


def slices_of(flat: jax.Array, count: int) -> jax.Array:
    """``flat``, padded with zeros, as (count, -1)."""
    return jnp.pad(flat, (0, -flat.size % count)).reshape(count, -1)


def own_slice(slices: jax.Array, group: AxisName | None) -> tuple[jax.Array, jax.Array]:
    """The slice that this device of its group exchanges, and its index."""
    if group is None or axis_size(group) == 1:
        return slices[0], jnp.int32(0)
    place = worker_index(group)
    return lax.dynamic_index_in_dim(slices, place, keepdims=False), place


def gathered(
    x: jax.Array, place: jax.Array, group: AxisName | None, like: jax.Array
) -> jax.Array:
    """The slices of all devices of the group, flat, typed as ``like``."""
    if group is None or axis_size(group) == 1:
        return x.reshape(-1)
    if tracked_axes(group) <= varying_axes(like):
        return collectives.all_gather(x, group).reshape(-1)
    return collectives.all_gather_invariant(x, place, group).reshape(-1)
