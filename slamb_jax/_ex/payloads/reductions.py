"""What a block of codes has one of: a sum or a maximum of its elements."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def total(planes: Sequence[jax.Array]) -> jax.Array:
    """The sum of each block, over its planes and rows: (..., rows, 1)."""
    return _of_blocks(planes, jnp.add, jnp.sum)


def largest(planes: Sequence[jax.Array]) -> jax.Array:
    """The maximum of each block, likewise."""
    return _of_blocks(planes, jnp.maximum, jnp.max)


def least_sent(
    sizes: Sequence[jax.Array], threshold: float
) -> tuple[jax.Array, jax.Array]:
    """Each block's mean magnitude, and the least magnitude that counts as large.

    Of equal magnitudes all are large: their mean may be rounded upwards.
    """
    mean = total(sizes) / np.float32(len(sizes) * sizes[0].shape[-1])
    return mean, np.float32(threshold * (1 - 2**-16)) * mean


def scale_of(
    chosen: Sequence[jax.Array], count: jax.Array, mean: jax.Array
) -> jax.Array:
    """The mean of the chosen magnitudes of each block, zeros elsewhere, in bytes.

    0 where none is chosen; NaN where the ``mean`` of all of them is not finite.
    """
    zero = np.float32(0)
    scale = jnp.where(count > 0, total(chosen) / jnp.maximum(count, 1), zero)
    scale = jnp.where(jnp.isfinite(mean), scale, jnp.float32(np.nan))
    return lax.bitcast_convert_type(scale, jnp.uint8)


def _of_blocks(
    planes: Sequence[jax.Array],
    two: Callable[[jax.Array, jax.Array], jax.Array],
    many: Callable[..., jax.Array],
) -> jax.Array:
    """``two`` of all elements of a block; ``many`` is the same of an axis.

    On a CPU by halves, in vectors: XLA reduces a row there element by element.
    """

    def at_once(x: jax.Array) -> jax.Array:
        return many(x, -1, keepdims=True)

    def by_halves(x: jax.Array) -> jax.Array:
        while x.shape[-1] > 1 and x.shape[-1] % 2 == 0:
            x = two(*jnp.split(x, 2, -1))
        return at_once(x)

    x = functools.reduce(two, planes)
    return lax.platform_dependent(x, cpu=by_halves, default=at_once)
