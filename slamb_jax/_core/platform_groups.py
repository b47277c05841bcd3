"""Platform branches for arrays that are coded in groups, as those of ``platform``."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from slamb_jax._core.platform import opaque
from slamb_jax._core.platform_tiles import flat_size, flatten

_CACHED = 2**17  # elements, with what is computed of them in the caches of a CPU


def in_groups(
    code: Callable[[jax.Array, jax.Array, jax.Array], Any],
    x: jax.Array,
    group: tuple[int, ...],
) -> Any:
    """``code(groups, flat, first)`` of an array cut into groups, padded with zeros.

    ``groups`` is (number, *group), ``flat`` has its elements without the padding, and
    ``first`` is the number of the first of them, uint32. A CPU codes a few at a time,
    in its caches, and the last group by itself: padded, the array would be copied.
    """
    size = math.prod(group)
    count = -(-flat_size(x.shape) // size)

    def at_once(x: jax.Array) -> Any:
        flat = flatten(x, count * size)
        return code(flat.reshape(count, *group), x, jnp.uint32(0))

    def in_a_loop(x: jax.Array) -> Any:
        flat, full = x.reshape(-1), (x.size - 1) // size
        few = min(full, max(1, _CACHED // size))
        rest = jnp.pad(flat[full * size :], (0, count * size - x.size))
        last = code(rest.reshape(-1, *group), flat[full * size :], jnp.uint32(full))
        if not full:
            return last

        def some(i: jax.Array, out: Any) -> Any:
            # The last turn begins earlier, and codes some groups once more.
            place = jnp.minimum(i * np.int32(few), np.int32(full - few))
            first = place.astype(jnp.uint32)
            start, sizes = (first * np.uint32(size),), (few * size,)
            part = opaque(flat, lambda x: lax.dynamic_slice(x, start, sizes))
            coded = opaque(code(part.reshape(few, *group), part, first))
            # In jax 0.7 vmap of an update loses it, if where it starts is unsigned.
            update = functools.partial(lax.dynamic_update_slice_in_dim, axis=0)
            return jax.tree.map(lambda x, y: update(x, y, place), out, coded)

        def behind_zeros(x: jax.Array) -> jax.Array:
            return jnp.pad(x, ((full, 0), *((0, 0),) * (x.ndim - 1)))

        turns = jnp.int32(-(-full // few))
        zeros = jax.tree.map(behind_zeros, last)
        return lax.fori_loop(jnp.int32(0), turns, some, zeros)

    return lax.platform_dependent(x, cpu=in_a_loop, default=at_once)


def of_rows(
    fun: Callable[[jax.Array, jax.Array], jax.Array], x: jax.Array, each: jax.Array
) -> jax.Array:
    """``fun(x, each)``, which reads one of ``each`` for a row, or for several rows.

    ``x`` is (..., row, width), and ``each`` broadcasts to (..., row, 1). On a CPU every
    row has its own: the place of one that several rows share is not found in vectors
    where the rows are read in another shape.
    """

    def one_each(x: jax.Array, each: jax.Array) -> jax.Array:
        each = opaque(jnp.broadcast_to(each, (*x.shape[:-1], 1)))
        rows = fun(x.reshape(-1, x.shape[-1]), each.reshape(-1, 1))
        return rows.reshape(x.shape)

    return lax.platform_dependent(x, each, cpu=one_each, default=fun)
