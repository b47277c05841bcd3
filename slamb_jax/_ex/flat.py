"""Large arrays as flat ones, in the order in which a chip's memory has them."""

import math

import jax
import jax.numpy as jnp
from jax import lax

_ROWS, _LANES = 8, 128  # of a TPU's tile of 32-bit elements


def flat_size(shape: tuple[int, ...]) -> int:
    """Elements of a flat array, with those that fill its last rows of tiles."""
    return math.prod(_filled(shape))


def flatten(x: jax.Array, size: int) -> jax.Array:
    """All elements and zeros behind them, at least :func:`flat_size` in all.

    On a TPU tile after tile, which moves nothing there.
    """

    def in_order(x: jax.Array) -> jax.Array:
        return jnp.pad(x.reshape(-1), (0, size - x.size))

    def by_tiles(x: jax.Array) -> jax.Array:
        *lead, rows, columns = shape = _filled(x.shape)
        x = jnp.pad(x, [(0, a - b) for a, b in zip(shape, x.shape, strict=True)])
        tiles = (*lead, rows // _ROWS, _ROWS, columns // _LANES, _LANES)
        return in_order(x.reshape(tiles).swapaxes(-3, -2))

    if not _has_tiles(x.shape):
        return in_order(x)
    return lax.platform_dependent(x, tpu=by_tiles, default=in_order)


def unflatten(flat: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Undoes :func:`flatten`."""

    def in_order(flat: jax.Array) -> jax.Array:
        return flat[: math.prod(shape)].reshape(shape)

    def from_tiles(flat: jax.Array) -> jax.Array:
        *lead, rows, columns = filled = _filled(shape)
        tiles = (*lead, rows // _ROWS, columns // _LANES, _ROWS, _LANES)
        x = flat[: math.prod(filled)].reshape(tiles).swapaxes(-3, -2).reshape(filled)
        return x[tuple(map(slice, shape))]

    if not _has_tiles(shape):
        return in_order(flat)
    return lax.platform_dependent(flat, tpu=from_tiles, default=in_order)


def _has_tiles(shape: tuple[int, ...]) -> bool:
    return len(shape) > 1 and shape[-2] >= _ROWS and shape[-1] % _LANES == 0


def _filled(shape: tuple[int, ...]) -> tuple[int, ...]:
    if not _has_tiles(shape):
        return shape
    *lead, rows, columns = shape
    return (*lead, rows + -rows % _ROWS, columns)
