"""The second moment of what a step takes, and the units of codes from it."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from slamb_jax._core.joining import spread_over, sum_parts
from slamb_jax._core.leaves import Leaf, unless
from slamb_jax._core.moments import bias, moved, stored
from slamb_jax.compressors.of_exchange import Unit
from slamb_jax.exchange.collectives import psum_each

_FLOOR = np.float32(0.05)  # of a unit, in roots of the leaf's mean second moment
_TINY = np.finfo(np.float32).tiny
_FORGOTTEN = np.float32(0.5)  # of a quantization error, where v is far above that floor


class Row(NamedTuple):
    """A leaf at one step, or several small ones that are joined."""

    leaf: Leaf
    g: jax.Array  # the worker's own gradient
    m: jax.Array  # the momentum in the state
    b1: ArrayLike  # its decay rate
    nu: jax.Array | None  # the second moment; None: there is none
    nu_mean: jax.Array | None  # its mean over the leaf, or each part; None: no units


def unit_of(row: Row, b2: ArrayLike, step: jax.Array) -> Unit | None:
    r"""The unit of a row's codes, :math:`r = \sqrt{\hat v} + 0.05 \rho`."""
    if row.nu is None or row.nu_mean is None:
        return None
    # v of the step before, on which all workers agree already: that of this step
    # follows from the mean that the units are for.
    correction = jnp.maximum(bias(b2, step - 1), _TINY)
    root = jnp.sqrt(row.nu.astype(jnp.float32) / correction)
    # Of a coordinate whose v is 0 the unit is the floor: x / r stays finite.
    rho = spread_over(_whole(row.leaf), jnp.sqrt(row.nu_mean / correction))
    floor = _FLOOR * rho
    size = jnp.where(floor > 0, root + floor, jnp.float32(1))  # 1 as long as v is 0
    return Unit(size, 1 - _FORGOTTEN * (root / size))


def second_moments(
    rows: Sequence[Row],
    xs: Sequence[jax.Array],
    b2: ArrayLike | None,
    step: jax.Array,
    skip: jax.Array | None,
) -> tuple[list[jax.Array | None], list[jax.Array | None]]:
    r""":math:`v \leftarrow \beta_2 v + (1-\beta_2) x^2` of each row, and its means.

    In a skipped step as they were: the new v can then take the old one's memory.
    """
    nothing: list[jax.Array | None] = [None] * len(rows)
    if b2 is None:
        return nothing, nothing
    squares = [jnp.square(x) for x in xs]
    nus = [
        stored(moved(row.nu, square, b2), row.nu.dtype, step, row.leaf)
        for row, square in zip(rows, squares, strict=True)
        if row.nu is not None
    ]
    nus = unless(skip, [row.nu for row in rows], nus)
    if not rows or rows[0].nu_mean is None:
        return nus, nothing
    # A mean over v itself would be a pass that must end before the next step's first
    # code is made. The moving mean of means is the same number.
    pairs = [
        (sum_parts(_whole(row.leaf), square), _elements(row.leaf))
        for row, square in zip(rows, squares, strict=True)
    ]
    sums = psum_each(pairs, [row.leaf.sharded for row in rows])
    means = [
        moved(row.nu_mean, lax.div(total, jnp.maximum(count, np.float32(1))), b2)
        for row, (total, count) in zip(rows, sums, strict=True)
        if row.nu_mean is not None
    ]
    return nus, unless(skip, [row.nu_mean for row in rows], means)


def correction_of_v(b2: ArrayLike, step: jax.Array) -> jax.Array:
    """The factor that corrects the bias of v; 0 or more steps were taken."""
    return 1 / jnp.maximum(bias(b2, step), _TINY)


def _whole(leaf: Leaf) -> Leaf:
    """The leaf as one array, also where it is a stack of layers."""
    return dataclasses.replace(leaf, stacked=False)


def _elements(leaf: Leaf) -> jax.Array:
    """The elements of the leaf, or of each of its parts, float32."""
    sizes = [part.size for part in leaf.parts] if leaf.parts else leaf.size
    return jnp.asarray(sizes, jnp.float32)
