"""The mean of the workers' momentum, in codes whose units all workers share."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from slamb_jax import _axes, _collectives
from slamb_jax._checks import (
    check_bool,
    check_dtype,
    check_floating,
    check_gradients,
    check_range,
    check_transformation,
)
from slamb_jax._leaves import (
    Leaf,
    Skip,
    arrays_of,
    chosen,
    keep_absent,
    present,
    unless,
)
from slamb_jax._mean import Means, mean_over_workers
from slamb_jax._moments import (
    Decays,
    bias,
    check_first_moment,
    decays,
    init_moment,
    moved,
    stored,
    weights,
)
from slamb_jax._platform import computed_again
from slamb_jax._rounding import next_step
from slamb_jax.average import average_gradients, average_parameters_every
from slamb_jax.exchange import Exchange, check_exchange
from slamb_jax.sharded import on_shards

UNIT_DECAY = 0.98
"""Decay rate of v where it is the unit of the codes and nothing else."""

_FLOOR = np.float32(0.05)  # of a unit, in roots of the leaf's mean second moment
_TINY = np.finfo(np.float32).tiny
_FORGOTTEN = np.float32(0.5)  # of what rounding took, where v is far above that floor


class AverageMomentumState(NamedTuple):
    """State of :func:`average_momentum`; all but ``mu`` is the same on all workers."""

    count: jax.Array  # type: ignore[assignment]  # int32, shape []
    mu: optax.Updates  # the worker's own momentum, as params, float32 or mu_dtype
    nu: optax.Updates | None  # second moment of the mean, as params
    nu_mean: optax.Updates | None  # float32, [] for each leaf: the mean of nu, in codes
    direction: optax.OptState


def average_momentum(
    exchange: Exchange,
    direction: optax.GradientTransformation | None = None,
    b1: Decays = 0.9,
    b2: ArrayLike | None = UNIT_DECAY,
    *,
    share: ArrayLike | None = None,
    nesterov: bool = False,
    bias_correction: bool = True,
    mu_dtype: DTypeLike | None = None,
    nu_dtype: DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Takes the mean of the workers' momentum, then steps alike on all of them.

    With worker i's own gradient :math:`g_i`, at step :math:`t = 1, 2, \ldots`, and r
    the unit of each coordinate's codes Q, the same on all workers:

    .. math::

      x_i &= \beta_1 m_i + (1-\beta_1) g_i \\
      q_i &= r\,Q(x_i / r), \quad e_i = x_i - q_i \\
      M &= \text{mean over workers of } q_i \text{, in codes again} \\
      m_i &\leftarrow x_i + \frac{1-\beta_1}{\beta_1} w\, e_i \\
      v &\leftarrow \beta_2 v + (1-\beta_2) \hat M^2, \quad
      \hat M = M / (1-\beta_1^t) \\
      r &\leftarrow \sqrt{\hat v} + 0.05\,\rho, \quad
      \hat v = v / (1-\beta_2^t) \\
      u &= \text{direction}(\hat M)

    with :math:`\rho` the root of the mean of :math:`\hat v` over the leaf, and
    :math:`r = 1` at the first step. Only m differs between workers. The mean is taken
    of what is linear in the gradients, so it does not matter which worker sees which
    data: in float32, where :math:`q_i = x_i`, M is the momentum of the mean gradient,
    and the step that of dense training.

    **What rounding takes** of a worker's momentum stays there, and is sent later; no
    memory is needed for it. With v, :math:`w = 1 - \sqrt{\hat v} / 2r`: half of it is
    forgotten where a coordinate is sent often, since noise that waits makes the memory
    of the momentum longer. Nothing is forgotten where it is sent seldom. There v falls,
    and the unit with it, so that every coordinate is sent in the end. Without v
    (``b2=None``) all of it waits, :math:`w = 1`, and what rounding takes of a mean
    waits n times with the worker that rounds it, which sends an nth of the next: the
    sum of all M is the sum of the mean gradients, up to what the momenta hold.

    With ``overlap`` in the exchange M is the mean of the momenta as the last step left
    them. Where workers step by themselves (``outer``, ``sync_every`` above 1), M is the
    worker's own momentum. Where a worker is a group of devices, put
    :func:`average_gradients` in front.

    Args:
      exchange: between whom, and in what wire format (``payload``).
      direction: what is done with :math:`\hat M`: any optax transformation. One whose
        ``update`` has an argument ``second_moment`` gets :math:`\hat v` if there is a
        v. None: :math:`\hat M` itself, for links that follow.
      b1: decay rate of the momentum, in [0, 1); or a tree of them, a prefix of it, or a
        function of the parameters that returns one.
      b2: decay rate of v, in [0, 1). None: no v is kept, and r is 1.
      share: the share of the momentum in what is exchanged, in [0, 1), as in Lion:
        :math:`x_i = share\,m_i + (1-share)\,g_i`. None: ``b1``.
      nesterov: exchange the momentum one step ahead, as optax's optimizers do.
      bias_correction: False leaves out the powers of t.
      mu_dtype: dtype of m, None (float32) or bfloat16.
      nu_dtype: dtype of v, None (float32) or bfloat16 with stochastic rounding.

    Returns:
      A :class:`optax.GradientTransformationExtraArgs` whose updates are float32.

    Raises:
      ValueError: for a value out of range; in ``update``, for an unbound axis, for
        gradients of another shape or kind than the parameters, and for gradients that
        were averaged already where the types show it (``check_vma=True``).

    Examples:
      >>> import jax, jax.numpy as jnp, optax, slamb_jax
      >>> exchange = slamb_jax.Exchange("data", payload=None)
      >>> tx = slamb_jax.average_momentum(exchange, optax.scale_by_sign(), b1=0.0)
      >>> step = lambda g: tx.update(g, tx.init(g), g)[0]
      >>> print(jax.vmap(step, axis_name="data")(jnp.array([1.0, -3.0])))
      [-1. -1.]

    References:
      Seide et al., 1-bit stochastic gradient descent, Interspeech 2014, and Stich et
      al., `Sparsified SGD with Memory <https://arxiv.org/abs/1809.07599>`_, 2018: error
      feedback; Xu et al., `SLAMB <https://proceedings.mlr.press/v202/xu23q.html>`_,
      ICML 2023: what is not sent waits in the momentum; Tang et al., `1-bit Adam
      <https://arxiv.org/abs/2102.02888>`_, 2021: the mean of momenta in units of v.
    """
    check_exchange(exchange)
    check_first_moment(b1, mu_dtype)
    check_dtype("nu_dtype", nu_dtype)
    check_bool("nesterov", nesterov)
    check_bool("bias_correction", bias_correction)
    if share is not None:
        check_range("share", share, 0.0, 1.0, open_high=True)
    if b2 is not None:
        check_range("b2", b2, 0.0, 1.0, open_high=True)
    if direction is None:
        direction = optax.identity()
    check_transformation("direction", direction)
    then = optax.with_extra_args_support(direction)
    if exchange.selection is not None:
        raise ValueError(
            f"selection={exchange.selection!r} exchanges a share of the momentum, as "
            "slamb_jax.slamb and scale_by_slamb do: give an exchange without one"
        )
    in_codes = _in_codes(exchange)
    overlap = exchange.overlap and exchange.averages_momentum
    rule = _Rule(share, nesterov, bias_correction, overlap)

    def init(params: optax.Params) -> AverageMomentumState:
        check_floating(params, "params")
        mu = init_moment(params, "mu_dtype", mu_dtype)
        nu = nu_mean = None
        if b2 is not None:
            nu = init_moment(params, "nu_dtype", nu_dtype)
        if b2 is not None and in_codes:
            shards = frozenset(exchange.shard_axes)
            nu_mean = jax.tree.map(lambda p: _axes.zero_of_sum(p, shards), params)
        count = jnp.zeros([], jnp.int32)
        return AverageMomentumState(count, mu, nu, nu_mean, then.init(params))

    def update(
        updates: optax.Updates,
        state: AverageMomentumState,
        params: optax.Params | None = None,
        skip: Skip | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, AverageMomentumState]:
        _check_update(exchange, updates, state.mu)
        if b2 is not None and in_codes and state.nu_mean is None:
            raise ValueError(
                f"payload={exchange.payload!r} needs units for its codes, got a state "
                "without nu_mean, as of a single worker or of payload=None: set it to "
                "jax.tree.map(jnp.mean, state.nu)"
            )
        step = next_step(state.count)
        like = updates if params is None else params
        rows, rebuild = present(
            updates, state.mu, decays(b1, state.mu), like=like, layout=exchange.layout
        )
        leaves, gs, ms, bs = ([row[i] for row in rows] for i in range(4))
        second = None
        if b2 is not None:
            nus, nu_means = (
                None if tree is None else arrays_of(updates, tree, like)
                for tree in (state.nu, state.nu_mean)
            )
            second = SecondMoment(nus or [], nu_means, b2)

        def in_units() -> tuple[list[_Momentum], list[Unit], list[jax.Array]]:
            own = [_Momentum(*row, step, rule) for row in zip(gs, ms, bs, strict=True)]
            units = [Unit(jnp.float32(1), jnp.float32(1))] * len(own)
            if second is not None and second.means is not None:
                units = second.units(step)
            sent = [m.sent / unit.size for m, unit in zip(own, units, strict=True)]
            return own, units, sent

        own, units, sent = in_units()
        found = Means(sent, None, None)  # where workers step by themselves
        if exchange.averages_momentum:
            found = mean_over_workers(
                found.means, leaves, exchange, exchange.payload, step, with_errors=True
            )
        if in_codes:
            # What was sent is computed once more: to keep it takes a GPU another copy.
            gs, ms = computed_again(gs), computed_again(ms)
            if second is not None:
                second = second._replace(nus=computed_again(second.nus))
            own, units, sent = in_units()
        means = [unit.size * x for unit, x in zip(units, found.means, strict=True)]
        mus = []
        for i, (momentum, unit) in enumerate(zip(own, units, strict=True)):
            error = None
            if (taken := found.taken(i, with_lost=second is None)) is not None:
                error = unit.size * unit.waits * (sent[i] - taken)
            mus.append(momentum.kept(error))
        mus = unless(skip, ms, mus)
        new = state._replace(count=step, mu=keep_absent(rebuild(mus), state.mu))
        if second is not None:
            second = second.after(means, leaves, step, skip)
            # With overlap M is of the momenta that the last step left.
            of_means = step - 1 if overlap else step
            corrected = rebuild(second.corrected(of_means))
            extra_args = extra_args | {"second_moment": corrected}
            new = new._replace(nu=keep_absent(rebuild(second.nus), state.nu))
            if second.means is not None:
                nu_mean = keep_absent(rebuild(second.means), state.nu_mean)
                new = new._replace(nu_mean=nu_mean)
        if skip is not None:
            extra_args = extra_args | {"skip": skip}
        u, inner = then.update(rebuild(means), state.direction, params, **extra_args)
        count, inner = unless(skip, (state.count, state.direction), (new.count, inner))
        return u, chosen(skip, new._replace(count=count, direction=inner))

    tx = optax.GradientTransformationExtraArgs(init, update)
    return tx if exchange.param_specs is None else on_shards(tx, exchange)


def chain_between(
    exchange: Exchange, *links: optax.GradientTransformation
) -> optax.GradientTransformationExtraArgs:
    """The chain of links, with those at its ends that only some exchanges need.

    Where workers are groups of devices, the mean of a group's gradients comes first.
    Where workers step by themselves, the average of their parameters comes last.
    """
    grouped = check_exchange(exchange).local_axis_name is not None
    return optax.chain(
        *((average_gradients(exchange),) if grouped else ()),
        *links,
        *(() if exchange.averages_momentum else (average_parameters_every(exchange),)),
    )


def unit_decay(exchange: Exchange) -> float | None:
    """The ``b2`` of an optimizer that has no second moment of its own."""
    return UNIT_DECAY if _in_codes(check_exchange(exchange)) else None


def _in_codes(exchange: Exchange) -> bool:
    """Whether the mean of the momentum is rounded, so that its codes need units."""
    rounds = exchange.payload is not None and exchange.axis_name is not None
    return rounds and exchange.averages_momentum


def _check_update(
    exchange: Exchange, updates: optax.Updates, mu: optax.Updates
) -> None:
    """Raises for gradients that do not fit the momentum or were averaged already."""
    axis_name = exchange.axis_name
    _axes.check_workers(exchange)
    _axes.check_local(updates, axis_name, exchange.shard_axes)
    check_gradients(updates, mu)


class _Rule(NamedTuple):
    """How the momentum is exchanged; see :func:`average_momentum`."""

    share: ArrayLike | None
    nesterov: bool
    bias_correction: bool
    overlap: bool


class _Momentum:
    r"""The momentum of one leaf: what a worker sends of it, and what it keeps.

    It keeps c m, where c is the share of m in what is sent, so that errors have a place
    where c is 0. With ``overlap``, which sends what the last step left, it keeps m.

    Attributes:
      sent: :math:`x_i / (1-\beta_1^t)`, float32.
    """

    def __init__(
        self, g: jax.Array, m: jax.Array, b1: ArrayLike, step: jax.Array, rule: _Rule
    ) -> None:
        self._g, self._m = g.astype(jnp.float32), m.astype(jnp.float32)
        self._dtype, self._rule = m.dtype, rule
        self._b1, self._new = weights(b1)
        self._c = weights(b1 if rule.share is None else rule.share)[0]
        if rule.nesterov and not rule.overlap:
            self._c = self._b1 * self._b1

        def fix(t: jax.Array) -> jax.Array:
            # At t = 0, the first step with overlap, it would divide 0 by 0.
            one = jnp.float32(1)
            return jnp.maximum(bias(b1, t), 1e-7) if rule.bias_correction else one

        if rule.overlap:
            self._fix = fix(step - 1)
            self.sent = self._m / self._fix
        elif rule.nesterov:
            self._fix = fix(next_step(step))
            of_g = self._b1 * self._new / self._fix + self._new / fix(step)
            self.sent = self._m / self._fix + of_g * self._g
        else:
            self._fix = fix(step)
            self.sent = (self._m + (1 - self._c) * self._g) / self._fix

    def kept(self, error: jax.Array | None) -> jax.Array:
        """The momentum to keep; ``error`` is what rounding took of what was sent."""
        weight = self._new if self._rule.overlap else self._c * self._new
        kept = self._b1 * self._m + weight * self._g
        if error is not None:
            # The recurrence adds (1 - b1) / b1 of the error to m, and b1 m is stored.
            # ``fix`` undoes the bias correction of what was sent.
            kept = kept + self._new * self._fix * error
        return kept.astype(self._dtype)


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


def _means_of(arrays: Sequence[jax.Array], leaves: Sequence[Leaf]) -> list[jax.Array]:
    """The mean of each leaf, over all of its shards."""
    pairs = [(jnp.sum(x), jnp.float32(x.size)) for x in arrays]
    sums = _collectives.psum_each(pairs, [leaf.sharded for leaf in leaves])
    return [lax.div(total, jnp.maximum(count, np.float32(1))) for total, count in sums]
