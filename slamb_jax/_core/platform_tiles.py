"""Arrays in the order of a TPU's tiles, in which no element need move.

A TPU keeps arrays in tiles of 8 x 128, and writes an array that is reshaped otherwise.
As in ``platform``, all functions here equal a plain reference on every platform.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from slamb_jax._core.platform import (
    LARGE,
    materialized,
    recompute_barrier,
    reduce_blocks,
)

_ROWS, _LANES = 8, 128  # of a TPU's tile of 32-bit elements


def flat_size(shape: tuple[int, ...]) -> int:
    """The number of elements of :func:`flatten`'s result, without its padding."""
    return math.prod(_in_tiles(shape))


def flatten(x: jax.Array, size: int) -> jax.Array:
    """All elements of ``x``, padded with zeros to ``size``.

    In row-major order; on a TPU tile after tile, the order of its memory, where a
    row-major reshape would move every element.
    """

    def in_order(x: jax.Array) -> jax.Array:
        return jnp.pad(x.reshape(-1), (0, size - x.size))

    def by_tiles(x: jax.Array) -> jax.Array:
        return in_order(_tiles_of(x))

    if not _has_tiles(x.shape):
        return in_order(x)
    return lax.platform_dependent(x, tpu=by_tiles, default=in_order)


def unflatten(flat: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Undoes :func:`flatten`."""

    def in_order(flat: jax.Array) -> jax.Array:
        return flat[: math.prod(shape)].reshape(shape)

    def from_tiles(flat: jax.Array) -> jax.Array:
        tile, tiles = _ROWS * _LANES, math.prod(_in_tiles(shape)) // (_ROWS * _LANES)
        if flat.size % tile:
            flat = flat[: tiles * tile]
        # Whole tiles are cut off as such: of a flat array that would be a copy.
        return _of_tiles(flat.reshape(-1, _ROWS, _LANES)[:tiles], shape)

    if not _has_tiles(shape):
        return in_order(flat)
    return lax.platform_dependent(flat, tpu=from_tiles, default=in_order)


def by_tiles(
    of_elements: Callable[..., Any], stored: Sequence[Any], others: Sequence[Any]
) -> Any:
    """``of_elements(*stored, *others)`` of arrays of a leaf's shape, or None.

    The function works element by element. On a TPU it gets the tiles of a large leaf:
    what :func:`unflatten` made of codes is then decoded in the kernel that uses it,
    where each array was written and read. ``stored`` are arrays that are in memory.
    """

    def in_tiles(stored: Any, others: Any) -> Any:
        # Behind barriers, or XLA turns back what is computed of them.
        stored = recompute_barrier(jax.tree.map(_tiles_of, stored))
        out = of_elements(*stored, *jax.tree.map(_tiles_of, others))
        return jax.tree.map(lambda x: _of_tiles(x, shape), out)

    def plain(stored: Any, others: Any) -> Any:
        return of_elements(*stored, *others)

    shape = stored[0].shape
    whole = _has_tiles(shape) and _in_tiles(shape) == shape  # else each is padded
    if not whole or math.prod(shape) < LARGE:
        return plain(stored, others)
    return lax.platform_dependent(stored, others, tpu=in_tiles, default=plain)


def digits_by_tiles(digits: jax.Array) -> jax.Array:
    """Digits (..., rows, width), which a TPU keeps as bytes, in the order of tiles.

    It would keep them in 16 or 32 bits, or broadcast their scales to all elements.
    """

    def keep(x: jax.Array) -> jax.Array:
        return materialized(x.reshape(-1, _ROWS, _LANES)).reshape(x.shape)

    if digits.shape[-2:] != (_ROWS, _LANES):
        return digits
    return lax.platform_dependent(digits, tpu=keep, default=lambda x: x)


def planes_of(groups: jax.Array, flat: jax.Array) -> list[jax.Array]:
    """The planes of groups (..., groups, planes, rows, width).

    ``flat`` is the array that was padded to ``groups``. A TPU takes every so manieth of
    its tiles, where the padded array would be written first.
    """
    *lead, count, planes, _, _ = groups.shape

    def slices(groups: jax.Array, flat: jax.Array) -> list[jax.Array]:
        del flat
        return [groups[..., i, :, :] for i in range(planes)]

    def strided(groups: jax.Array, flat: jax.Array) -> list[jax.Array]:
        del groups
        tiles = [_tiles_of(flat)[i::planes] for i in range(planes)]
        rest = [((0, count - len(x)), (0, 0), (0, 0)) for x in tiles]
        return [jnp.pad(x, widths) for x, widths in zip(tiles, rest, strict=True)]

    if lead or not _fills_tiles(groups, flat):
        return slices(groups, flat)
    return lax.platform_dependent(groups, flat, tpu=strided, default=slices)


def block_sizes(
    groups: jax.Array,
    flat: jax.Array,
    two: Callable[[jax.Array, jax.Array], jax.Array],
    many: Callable[..., jax.Array],
) -> jax.Array:
    """Reduces the magnitudes of each block, as :func:`reduce_blocks` does.

    From (..., planes, rows, width) to (..., rows, 1). ``flat`` has the elements of
    ``groups``, without the padding after them. A GPU or TPU reduces its rows first: the
    kernel that computes an array can do that, and saves one reading.
    """
    *shape, width = groups.shape

    def planes_first(groups: jax.Array, flat: jax.Array) -> jax.Array:
        del flat
        planes = [jnp.abs(groups[..., i, :, :]) for i in range(shape[-2])]
        return reduce_blocks(planes, two, many)

    def of_rows(rows: jax.Array) -> jax.Array:
        rows = jnp.pad(rows, (0, math.prod(shape) - rows.size)).reshape(shape)
        return many(rows, -2)[..., None]

    def rows_first(groups: jax.Array, flat: jax.Array) -> jax.Array:
        del groups
        return of_rows(many(jnp.abs(flat).reshape(-1, width), -1))

    def tiles_first(groups: jax.Array, flat: jax.Array) -> jax.Array:
        del groups
        return of_rows(many(jnp.abs(_tiles_of(flat)), -1).reshape(-1))

    if flat.size % width:
        return planes_first(groups, flat)
    on_tpu = tiles_first if _fills_tiles(groups, flat) else planes_first
    return lax.platform_dependent(
        groups, flat, cuda=rows_first, rocm=rows_first, tpu=on_tpu, default=planes_first
    )


def _tiles_of(x: jax.Array) -> jax.Array:
    """An array with tiles as these, (tiles, rows, lanes)."""
    *lead, rows, columns = shape = _in_tiles(x.shape)
    x = jnp.pad(x, [(0, a - b) for a, b in zip(shape, x.shape, strict=True)])
    tiles = (*lead, rows // _ROWS, _ROWS, columns // _LANES, _LANES)
    return x.reshape(tiles).swapaxes(-3, -2).reshape(-1, _ROWS, _LANES)


def _of_tiles(tiles: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Undoes :func:`_tiles_of`."""
    *lead, rows, columns = padded = _in_tiles(shape)
    x = tiles.reshape(*lead, rows // _ROWS, columns // _LANES, _ROWS, _LANES)
    x = x.swapaxes(-3, -2).reshape(padded)
    return x[tuple(map(slice, shape))]


def _fills_tiles(groups: jax.Array, flat: jax.Array) -> bool:
    """Whether tiles of the array are rows and lanes of the groups."""
    if flat is groups or groups.shape[-2:] != (_ROWS, _LANES):
        return False
    return _has_tiles(flat.shape)


def _has_tiles(shape: tuple[int, ...]) -> bool:
    return len(shape) > 1 and shape[-2] >= _ROWS and shape[-1] % _LANES == 0


def _in_tiles(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape with its last rows of tiles filled."""
    if not _has_tiles(shape):
        return shape
    *lead, rows, columns = shape
    return (*lead, rows + -rows % _ROWS, columns)
