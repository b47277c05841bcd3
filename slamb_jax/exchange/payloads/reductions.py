"""What a block of codes has one of: a sum or a maximum of its elements."""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax


def total(planes: Sequence[jax.Array]) -> jax.Array:
    """The sum of each block, over its planes and rows: (..., rows, 1)."""
    return _of_blocks(planes, jnp.add, jnp.sum)


def largest(planes: Sequence[jax.Array]) -> jax.Array:
    """The maximum of each block, likewise."""
    return _of_blocks(planes, jnp.maximum, jnp.max)


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
