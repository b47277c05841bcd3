"""What a worker has of its momentum, what a step takes of it, and what it keeps.

With x what a worker has, q what it sends of x, e = x - q and M the mean of all q:

    agree:  the step takes M,      the worker keeps q + e / b1
    alone:  the step takes M + e,  and so does the worker
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.typing import ArrayLike

from slamb_jax._core.checks import check_range
from slamb_jax._core.joining import spread_over, sum_parts
from slamb_jax._core.leaves import Leaf, check_mask, unless
from slamb_jax._core.recompute import recompute
from slamb_jax._core.rounding import next_step, step_seed, stochastic_round
from slamb_jax.compressors.codec import Sent
from slamb_jax.compressors.of_exchange import Unit
from slamb_jax.exchange.collectives import psum_each

_FLOOR = np.float32(0.05)  # of a unit, in roots of the leaf's mean second moment
_TINY = np.finfo(np.float32).tiny
_FORGOTTEN = np.float32(0.5)  # of a quantization error, where v is far above that floor
Form = Literal["sum", "product"]
Decays: TypeAlias = ArrayLike | chex.ArrayTree
"""A decay rate for all leaves, or a tree of them: a prefix of the parameters'."""


class Moments(NamedTuple):
    """Two moments as they lie in memory, and the factors that correct their bias.

    ``mask_momentum`` hands them to its direction as the argument ``moments``, so that
    ``layerwise_trust_ratio`` can compute a direction twice in place of keeping it.
    """

    mu: optax.Updates
    nu: optax.Updates
    of_mu: optax.Updates  # a factor for each leaf, whose b1 may be its own
    of_nu: jax.Array


class Row(NamedTuple):
    """A leaf at one step, or several small ones that are joined."""

    leaf: Leaf
    g: jax.Array  # the worker's own gradient
    m: jax.Array  # the momentum in the state
    b1: ArrayLike  # its decay rate
    nu: jax.Array | None  # the second moment; None: there is none
    nu_mean: jax.Array | None  # its mean over the leaf, or each part; None: no units

    def read_anew(self) -> "Row":
        """The same, of which the compiler computes anew what it computed before."""
        g, m, nu = recompute((self.g, self.m, self.nu))
        return self._replace(g=g, m=m, nu=nu)


class Rule(NamedTuple):
    """Which of the two kinds of exchange it is, and what of the momentum is sent."""

    agrees: bool  # workers agree at each step: the step takes M, and e waits
    selects: bool  # a selection of the momentum is sent, and the momentum is M + e
    overlaps: bool  # what is sent is what the last step left
    share: ArrayLike | None
    nesterov: bool
    bias_correction: bool
    skips: bool = False  # a step may be skipped

    @property
    def keeps_what_it_sends(self) -> bool:
        """Whether the momentum in the state is a multiple of x, whose place x can take.

        A step that may be skipped needs the old momentum once more.
        """
        others = self.nesterov or self.overlaps or self.selects or self.skips
        return self.share is None and not others

    def sent_share(self, b1: ArrayLike) -> jax.Array:
        """The share of the momentum in x."""
        if self.nesterov and not self.overlaps:
            return weights(b1)[0] * weights(b1)[0]
        return weights(b1 if self.share is None else self.share)[0]

    def scale(self, b1: ArrayLike) -> jax.Array:
        """What the momentum is multiplied by in the state.

        By its share in x, so that an e has a place where that share is 0.
        """
        as_it_is = self.selects or self.overlaps
        return jnp.float32(1) if as_it_is else self.sent_share(b1)

    def correction(self, b1: ArrayLike, step: jax.Array) -> jax.Array:
        """The bias correction of the momentum; 1 without one."""
        if not self.bias_correction:
            return jnp.float32(1)
        # At step 0, the first with overlap, it would divide 0 by 0.
        return jnp.maximum(bias(b1, step), 1e-7)


class Ahead(NamedTuple):
    """What a worker has of a leaf to send."""

    x: jax.Array
    correction: jax.Array  # of the momentum's bias, by which x is divided


def ahead(rule: Rule, row: Row, step: jax.Array) -> Ahead:
    """The momentum after this step's gradient, as far as it is sent."""
    g, m = row.g.astype(jnp.float32), row.m.astype(jnp.float32)
    if rule.selects:  # corrected after the exchange, since e stays in the momentum
        x = m if rule.overlaps else moved(m, g, row.b1)
        return Ahead(x.astype(row.m.dtype), jnp.float32(1))
    if rule.overlaps:
        correction = rule.correction(row.b1, step - 1)
        return Ahead(m / correction, correction)
    correction = rule.correction(row.b1, step)
    if rule.nesterov:
        # As optax has it: m is corrected as at the next step, g as at this one.
        b1, new = weights(row.b1)
        later = rule.correction(row.b1, next_step(step))
        of_g = b1 * new / later + new / correction
        return Ahead(m / later + of_g * g, later)
    x = m + (1 - rule.sent_share(row.b1)) * g
    return Ahead(x / correction, correction)


def take_and_keep(
    rule: Rule, row: Row, ahead: Ahead, sent: Sent | jax.Array
) -> tuple[jax.Array, jax.Array]:
    """What the step takes of a leaf, and the momentum that the worker keeps.

    ``sent`` is M and e, which is None where all was sent; or one array, M + e, by which
    workers step by themselves.
    """
    g, m = row.g.astype(jnp.float32), row.m.astype(jnp.float32)
    (b1, new), scale = weights(row.b1), rule.scale(row.b1)
    kept = b1 * m + scale * new * g  # as if all of x had been sent
    if rule.keeps_what_it_sends:
        kept = scale * (ahead.correction * ahead.x)
    if isinstance(sent, Sent):
        # The step takes M. It took nothing of e, which so counts 1 / b1 in the
        # momentum; the recurrence adds (1 - b1) / b1 of it.
        mean, unsent = sent
        if unsent is not None:
            kept = kept + new * ahead.correction * unsent
        return mean, kept.astype(row.m.dtype)
    # The step takes M + e, and the worker keeps it.
    if rule.selects:
        kept = moved(sent, g, row.b1) if rule.overlaps else sent
    elif sent is not ahead.x:  # optax.identity() leaves the momentum as it is
        kept = kept + scale * ahead.correction * (sent - ahead.x)
    return kept if rule.selects else sent, kept.astype(row.m.dtype)


def unit_of(row: Row, b2: ArrayLike | None, step: jax.Array) -> Unit | None:
    r"""The unit of a row's codes, :math:`r = \sqrt{\hat v} + 0.05 \rho`."""
    if row.nu is None or row.nu_mean is None or b2 is None:
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


def correct_v(rule: Rule, b2: ArrayLike, step: jax.Array) -> jax.Array:
    """The factor that corrects the bias of v."""
    if rule.selects and not rule.bias_correction:
        return jnp.float32(1)
    # With overlap M is of the momenta that the last step left.
    late = rule.agrees and rule.overlaps
    return 1 / jnp.maximum(bias(b2, step - 1 if late else step), _TINY)


def _whole(leaf: Leaf) -> Leaf:
    """The leaf as one array, also where it is a stack of layers."""
    return dataclasses.replace(leaf, stacked=False)


def _elements(leaf: Leaf) -> jax.Array:
    """The elements of the leaf, or of each of its parts, float32."""
    sizes = [part.size for part in leaf.parts] if leaf.parts else leaf.size
    return jnp.asarray(sizes, jnp.float32)


def check_decay(weight_decay: Any, mask: Any) -> None:
    """Raises for a decay that is negative, and for a mask that is not of bools."""
    check_range("weight_decay", weight_decay, 0.0, schedule=True)
    check_mask("mask", mask)


def weights(b: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """The decay b and 1 - b, in float32; of a number, constants of the program."""
    as_array = jnp.asarray if isinstance(b, jax.Array) else np.asarray
    both = as_array(b, np.float32), as_array(1 - b, np.float32)
    return cast(tuple[jax.Array, jax.Array], both)


def bias(b: ArrayLike, step: jax.Array) -> jax.Array:
    r""":math:`1-\beta^t`, rounded as in optax."""
    return 1 - weights(b)[0] ** step.astype(jnp.float32)


def moved(old: jax.Array, x: jax.Array, b: ArrayLike) -> jax.Array:
    r""":math:`\beta\,old + (1-\beta)\,x`, in float32."""
    keep, new = weights(b)
    return keep * old.astype(jnp.float32) + new * x.astype(jnp.float32)


def stored(v: jax.Array, dtype: jnp.dtype, step: jax.Array, leaf: Leaf) -> jax.Array:
    r"""A second moment in the dtype it is kept in.

    To bfloat16 it is rounded at random: a change of :math:`1-\beta_2` of itself would
    be rounded to none.
    """
    if dtype != jnp.bfloat16:
        return v
    return stochastic_round(v, step_seed(step, leaf.index))


def decay_at(
    weight_decay: optax.ScalarOrSchedule, count: jax.Array
) -> jax.Array | None:
    """The decay at a step counted from 0; None where it is the constant 0."""
    if isinstance(weight_decay, int | float) and weight_decay == 0:
        return None
    decay = weight_decay(count) if callable(weight_decay) else weight_decay
    return jnp.asarray(decay, jnp.float32)
