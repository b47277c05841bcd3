"""The second moment of what the workers agree on, and the units of their codes."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from slamb_jax._core.leaves import Leaf, Skip, unless
from slamb_jax._core.moments import bias, moved, stored
from slamb_jax.exchange import collectives

_FLOOR = np.float32(0.05)  # of a unit, in roots of the leaf's mean second moment
_TINY = np.finfo(np.float32).tiny
_FORGOTTEN = np.float32(0.5)  # of what rounding took, where v is far above that floor


class Unit(NamedTuple):
    """The unit of each coordinate's codes, the same on all workers."""

    size: jax.Array
    waits: jax.Array  # the share of what rounding took that is kept for later


class SecondMoment(NamedTuple):
    """The second moment of the mean momentum, one array for each leaf."""

    nus: list[jax.Array]
    means: list[jax.Array] | None  # [], of each: no pass over v must end first
    b2: ArrayLike

    def units(self, step: jax.Array) -> list[Unit]:
        """The units of each leaf; 1, and all waits, as long as v is unknown."""
        fix = jnp.maximum(bias(self.b2, step - 1), _TINY)

        def unit(nu: jax.Array, mean: jax.Array) -> Unit:
            root = jnp.sqrt(nu.astype(jnp.float32) / fix)
            # Of a coordinate whose v is 0 the unit is the floor: x / r stays finite.
            floor = _FLOOR * jnp.sqrt(mean / fix)
            size = jnp.where(floor > 0, root + floor, jnp.float32(1))
            return Unit(size, 1 - _FORGOTTEN * (root / size))

        return list(map(unit, self.nus, self.means or ()))

    def after(
        self,
        means: Sequence[jax.Array],
        leaves: Sequence[Leaf],
        step: jax.Array,
        skip: Skip | None,
    ) -> "SecondMoment":
        """After a step whose mean momentum is ``means``."""
        squares = [jnp.square(x) for x in means]
        nus = [
            stored(moved(nu, square, self.b2), nu.dtype, step, leaf)
            for leaf, square, nu in zip(leaves, squares, self.nus, strict=True)
        ]
        nus = unless(skip, self.nus, nus)
        if self.means is None:
            return self._replace(nus=nus)
        of_leaves = zip(self.means, _means_of(squares, leaves), strict=True)
        new = [moved(old, x, self.b2) for old, x in of_leaves]
        return SecondMoment(nus, unless(skip, self.means, new), self.b2)

    def corrected(self, step: jax.Array) -> list[jax.Array]:
        """Divided by :math:`1 - b_2^t`."""
        fix = 1 / jnp.maximum(bias(self.b2, step), _TINY)
        return [fix * nu.astype(jnp.float32) for nu in self.nus]


def units_of_codes(
    second: SecondMoment | None, step: jax.Array, count: int
) -> list[Unit]:
    """The units of so many leaves; 1 where there are no codes, or no second moment."""
    if second is None or second.means is None:
        return [Unit(jnp.float32(1), jnp.float32(1))] * count
    return second.units(step)


def _means_of(arrays: Sequence[jax.Array], leaves: Sequence[Leaf]) -> list[jax.Array]:
    """The mean of each leaf, over all of its shards."""
    pairs = [(jnp.sum(x), jnp.float32(x.size)) for x in arrays]
    sums = collectives.psum_each(pairs, [leaf.sharded for leaf in leaves])
    return [lax.div(total, jnp.maximum(count, np.float32(1))) for total, count in sums]
