r"""The momentum of workers that agree at each step: ahead, sent, kept, and v.

With x what a worker has, q what it sends of x, e = x - q and M the mean of all q, the
step takes M and the worker keeps :math:`m \leftarrow q + e / \beta_1`. In e the step
took nothing, so it counts :math:`1 / \beta_1`: the next x has all of it.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.typing import ArrayLike

from slamb_jax._core.axes import axis_size
from slamb_jax._core.leaves import Leaf, keep_absent, unless
from slamb_jax._core.moments import Moments, bias, moved, stored, weights
from slamb_jax._core.platform import computed_apart, recompute_barrier
from slamb_jax._core.rounding import next_step
from slamb_jax.exchange.codecs import codec_of
from slamb_jax.exchange.collectives import psum_each
from slamb_jax.exchange.mean import mean_over_workers
from slamb_jax.exchange.settings import Exchange
from slamb_jax.links._packed import Pack, alone, packs_by_type, split

_FLOOR = np.float32(0.05)  # of a unit, in roots of the leaf's mean second moment
_TINY = np.finfo(np.float32).tiny
_FORGOTTEN = np.float32(0.5)  # of what rounding took, where v is far above that floor


class Rule(NamedTuple):
    """What of the momentum is sent; see :func:`slamb_jax.mask_momentum`."""

    share: ArrayLike | None
    nesterov: bool
    bias_correction: bool
    overlap: bool

    def kept_share(self, b1: ArrayLike) -> jax.Array:
        """c, the share of m in x. The state has c m, where e has a place if c is 0."""
        if self.nesterov and not self.overlap:
            return weights(b1)[0] * weights(b1)[0]
        return weights(b1 if self.share is None else self.share)[0]


class Row(NamedTuple):
    """One leaf: its gradient, the momentum in the state, and its decay rate."""

    leaf: Leaf
    g: jax.Array
    m: jax.Array
    b1: ArrayLike


class Ahead(NamedTuple):
    """What a worker has of a leaf to send, float32: x over its bias correction."""

    x: jax.Array
    fix: jax.Array  # the bias correction


def ahead(row: Row, step: jax.Array, rule: Rule) -> Ahead:
    """The momentum after this step's gradient, as far as the rule sends it."""
    g, m = row.g.astype(jnp.float32), row.m.astype(jnp.float32)
    b1, new = weights(row.b1)

    def fix(t: jax.Array) -> jax.Array:
        # At t = 0, the first step with overlap, it would divide 0 by 0.
        one = jnp.float32(1)
        return jnp.maximum(bias(row.b1, t), 1e-7) if rule.bias_correction else one

    if rule.overlap:  # what the last step left
        return Ahead(m / fix(step - 1), fix(step - 1))
    if rule.nesterov:
        # As optax has it: m is corrected as at the next step, g as at this one.
        later = fix(next_step(step))
        return Ahead(m / later + (b1 * new / later + new / fix(step)) * g, later)
    of_g = 1 - rule.kept_share(row.b1)
    return Ahead((m + of_g * g) / fix(step), fix(step))


def memory(row: Row, rule: Rule) -> jax.Array:
    """The momentum to keep where all of it is sent, float32."""
    b1, new = weights(row.b1)
    of_g = new if rule.overlap else rule.kept_share(row.b1) * new
    return b1 * row.m.astype(jnp.float32) + of_g * row.g.astype(jnp.float32)


def of_error(error: jax.Array, row: Row, fix: jax.Array) -> jax.Array:
    """What is kept of an e in x: the recurrence adds (1 - b1) / b1 of it to m."""
    return weights(row.b1)[1] * fix * error


class Unit(NamedTuple):
    """The unit of each coordinate's codes, the same on all workers."""

    size: jax.Array
    waits: jax.Array  # the share of what rounding took that is kept for later


class SecondMoment(NamedTuple):
    """The second moment of what a step takes, one array for each leaf."""

    nus: list[jax.Array]
    means: list[jax.Array] | None  # of each leaf: no pass over v must end first
    b2: ArrayLike
    packs: Sequence[Pack] = ()  # of the leaves in each array

    def unit(self, i: int, step: jax.Array, nu: jax.Array) -> Unit:
        """The unit of leaf i, whose second moment is ``nu``; 1 as long as v is 0."""
        # v of the step before, on which all workers agree already: that of this step
        # follows from the mean that the units are for.
        fix = jnp.maximum(bias(self.b2, step - 1), _TINY)
        root = jnp.sqrt(nu.astype(jnp.float32) / fix)
        # Of a coordinate whose v is 0 the unit is the floor: x / r stays finite.
        mean = (self.means or ())[i]
        floor = self.packs[i].spread(_FLOOR * jnp.sqrt(mean / fix))
        size = jnp.where(floor > 0, root + floor, jnp.float32(1))
        return Unit(size, 1 - _FORGOTTEN * (root / size))

    def after(
        self,
        steps: Sequence[jax.Array],
        leaves: Sequence[Leaf],
        step: jax.Array,
        skip: jax.Array | None,
    ) -> "SecondMoment":
        """With the squares of what this step takes."""
        squares = [jnp.square(x) for x in steps]
        nus = [
            stored(moved(nu, square, self.b2), nu.dtype, step, leaf)
            for leaf, square, nu in zip(leaves, squares, self.nus, strict=True)
        ]
        # Chosen before anything reads it: the new v can take the old one's memory.
        nus = unless(skip, self.nus, nus)
        if self.means is None:
            return self._replace(nus=nus)
        # A mean over v itself would be a pass that must end before the next step's
        # first code is made. The moving mean of means is the same number.
        of_leaves = zip(self.means, _means_of(squares, self.packs), strict=True)
        new = [moved(old, x, self.b2) for old, x in of_leaves]
        return self._replace(nus=nus, means=unless(skip, self.means, new))

    def correction(self, step: jax.Array) -> jax.Array:
        """The factor of v that corrects its bias."""
        return 1 / jnp.maximum(bias(self.b2, step), _TINY)


class Exchanged(NamedTuple):
    """What one step makes of the momenta; lists have one array for each leaf."""

    means: list[jax.Array]  # what the step takes, bias-corrected, float32
    mus: list[jax.Array]  # what the worker keeps
    of_mus: list[jax.Array] | None  # means over mus, where the step takes what is kept
    second: SecondMoment | None
    of_nu: jax.Array  # the factor that corrects the bias of v
    compressor: optax.OptState

    def split(self, packs: Sequence[Pack]) -> "Exchanged":
        """Of each leaf again, where leaves share arrays."""
        columns, second = [self.means, self.mus], self.second
        if second is None:
            (means, mus), _ = split(packs, columns, None)
            return self._replace(means=means, mus=mus)
        (means, mus, nus), of_nus = split(packs, [*columns, second.nus], second.means)
        second = second._replace(nus=nus, means=of_nus or None)
        return self._replace(means=means, mus=mus, second=second)

    def for_direction(self, rebuild: Callable[..., Any]) -> dict[str, Any]:
        """What a direction gets beside what the step takes."""
        if self.second is None:
            return {}
        nus, of_nu = self.second.nus, self.of_nu
        hats = rebuild([of_nu * nu.astype(jnp.float32) for nu in nus])
        given = {"second_moment": hats, "of_second_moment": of_nu}
        if self.of_mus is None:
            return given
        of_mus = rebuild(self.of_mus)
        moments = Moments(rebuild(self.mus), rebuild(nus), of_mus, of_nu)
        return given | {"moments": moments}

    def moments(self, rebuild: Callable[..., Any], old: Any) -> list[Any]:
        """mu, nu and nu_mean of the next state."""
        nus = means = None
        if self.second is not None:
            nus, means = self.second.nus, self.second.means
            if self.of_mus is None:  # else the direction is of what is stored
                nus = computed_apart(nus)
        pairs = zip((self.mus, nus, means), (old.mu, old.nu, old.nu_mean), strict=True)
        return [x if new is None else keep_absent(rebuild(new), x) for new, x in pairs]


def packs_of(
    rows: Sequence[Row], second: SecondMoment | None, exchange: Exchange
) -> list[Pack]:
    """Which small leaves share an array."""
    codec = codec_of(exchange.payload)
    # Without codes a leaf's step is short, and to move the leaf would take longer. What
    # is between the leaves of an array must be sent as zeros.
    one = axis_size(exchange.axis_name) == 1
    if one or codec is None or not codec.has_zero:
        return alone([row.leaf for row in rows])
    columns = [[row.g for row in rows], [row.m for row in rows]]
    if second is not None:
        columns.append(second.nus)
    leaves, rates = [row.leaf for row in rows], [row.b1 for row in rows]
    return packs_by_type(leaves, columns, rates, codec)


def join(
    packs: Sequence[Pack], rows: Sequence[Row], second: SecondMoment | None
) -> tuple[list[Row], SecondMoment | None]:
    """A row for each pack, and their second moment."""
    gs, ms = ([getattr(row, x) for row in rows] for x in "gm")
    joined = [
        Row(pack.leaf, pack.join(gs), pack.join(ms), rows[pack.places[0]].b1)
        for pack in packs
    ]
    if second is None:
        return joined, None
    nus, means = [pack.join(second.nus) for pack in packs], second.means
    if means is not None:
        means = [pack.gather(means) for pack in packs]
    return joined, second._replace(nus=nus, means=means, packs=packs)


def exchanged(
    exchange: Exchange,
    rule: Rule,
    rows: Sequence[Row],
    second: SecondMoment | None,
    step: jax.Array,
    *,
    in_codes: bool,
) -> tuple[list[jax.Array], list[jax.Array], SecondMoment | None]:
    """The mean momentum of the workers, bias-corrected, and what this worker keeps.

    Also the second moment as what follows is to read it: once, with the units.
    """
    has, nus = [ahead(row, step, rule) for row in rows], _of_units(second, len(rows))
    # In units every coordinate has about the same size, whatever its layer's scale: few
    # bits are well spent, and a scale for each block loses little.
    sent = [
        a.x / _unit(second, i, step, nu).size
        for i, (a, nu) in enumerate(zip(has, nus, strict=True))
    ]
    found = mean_over_workers(
        sent, [row.leaf for row in rows], exchange, exchange.payload, step,
        with_errors=True,
    )  # fmt: skip
    again = None
    if in_codes:
        again = functools.partial(_recomputed, rule, step)
        if second is not None:
            # v is read once more, where a GPU would keep the units.
            second = second._replace(nus=recompute_barrier(second.nus))
    means, mus = [], []
    for i, (row, nu) in enumerate(zip(rows, _of_units(second, len(rows)), strict=True)):
        unit_of = functools.partial(_unit, second, i, step)
        step_of = functools.partial(
            _taken_and_kept, rule, row, unit_of, has[i].fix, again
        )
        # Where v is the unit, rounding of the mean is left alone: n times of it, in one
        # worker's momentum, would be more noise than what it takes away.
        received = found.received_by_others(i, with_lost=second is None)
        stored, others = (row.g, row.m, nu), (sent[i], found.means[i], received)
        mean, mu = step_of(*stored, *others)
        means.append(mean)
        mus.append(mu)
    return means, mus, second


def _of_units(
    second: SecondMoment | None, leaves: int
) -> Sequence[jax.Array] | Sequence[None]:
    """The v of each leaf that its unit is of; None where its codes have no unit."""
    if second is None or second.means is None:
        return [None] * leaves
    return second.nus


def _unit(
    second: SecondMoment | None, i: int, step: jax.Array, nu: jax.Array | None
) -> Unit:
    """The unit of leaf i; 1 where there are no codes, or no second moment."""
    if second is None or nu is None:
        return Unit(jnp.float32(1), jnp.float32(1))
    return second.unit(i, step, nu)


def _taken_and_kept(
    rule: Rule,
    row: Row,
    unit_of: Callable[[jax.Array | None], Unit],
    fix: jax.Array,
    again: Callable[..., tuple[jax.Array, jax.Array]] | None,
    g: jax.Array,
    m: jax.Array,
    nu: jax.Array | None,
    sent: jax.Array,
    mean: jax.Array,
    received: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """What the step takes of a leaf, or of its tiles, and what the worker keeps."""
    row, unit = row._replace(g=g, m=m), unit_of(nu)
    kept = memory(row, rule)
    if again is not None:
        sent, kept = again(row, unit)
    if received is not None:
        error = unit.size * unit.waits * (sent - received)
        kept = kept + of_error(error, row, fix)
    return unit.size * mean, kept.astype(m.dtype)


def _recomputed(
    rule: Rule, step: jax.Array, row: Row, unit: Unit
) -> tuple[jax.Array, jax.Array]:
    """What was sent, in units, and :func:`memory`, for the step after the exchange.

    Kept from before it, each would be one more copy of the parameters.
    """
    again = row._replace(g=recompute_barrier(row.g), m=recompute_barrier(row.m))
    return ahead(again, step, rule).x / unit.size, memory(again, rule)


def _means_of(arrays: Sequence[jax.Array], packs: Sequence[Pack]) -> list[jax.Array]:
    """The mean of each leaf, over all of its shards."""
    pairs = [(pack.sums(x), pack.sizes) for pack, x in zip(packs, arrays, strict=True)]
    sums = psum_each(pairs, [pack.leaf.sharded for pack in packs])
    return [lax.div(total, jnp.maximum(count, np.float32(1))) for total, count in sums]
