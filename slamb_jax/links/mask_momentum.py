"""The mean of the workers' momentum, in codes whose units all workers share."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike, DTypeLike

from slamb_jax._core import axes as _axes
from slamb_jax._core.checks import (
    check_bool,
    check_dtype,
    check_floating,
    check_gradients,
    check_range,
    check_transformation,
)
from slamb_jax._core.leaves import (
    Skip,
    arrays_of,
    chosen,
    keep_absent,
    present,
    unless,
)
from slamb_jax._core.moments import Decays, check_first_moment, decays, init_moment
from slamb_jax._core.platform import computed_again
from slamb_jax._core.rounding import next_step
from slamb_jax.exchange.mean import Means, mean_over_workers
from slamb_jax.exchange.settings import Exchange, check_exchange
from slamb_jax.links._own_momentum import OwnMomentum, Rule
from slamb_jax.links._second_moment import SecondMoment, units_of_codes
from slamb_jax.links.average_parameters import (
    average_gradients,
    average_parameters_every,
)
from slamb_jax.links.on_shards import on_shards

UNIT_DECAY = 0.98
"""Decay rate of v where it is the unit of the codes and nothing else."""


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
    rule = Rule(share, nesterov, bias_correction, overlap)

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

        units = units_of_codes(second, step, len(leaves))
        own = [OwnMomentum(*row, step, rule) for row in zip(gs, ms, bs, strict=True)]
        sent = [m.sent / unit.size for m, unit in zip(own, units, strict=True)]
        found = Means(sent, None, None)  # where workers step by themselves
        if exchange.averages_momentum:
            found = mean_over_workers(
                found.means, leaves, exchange, exchange.payload, step, with_errors=True
            )
        if in_codes:
            if second is not None:
                second = second._replace(nus=computed_again(second.nus))
            units = units_of_codes(second, step, len(leaves))
            of_each = zip(own, units, sent, strict=True)
            again = [
                m.again(unit.size, x, skips=skip is not None) for m, unit, x in of_each
            ]
            sent, kept = [x for x, _ in again], [x for _, x in again]
        else:
            kept = [m.kept() for m in own]
        means = [unit.size * x for unit, x in zip(units, found.means, strict=True)]
        mus = []
        for i, (momentum, unit) in enumerate(zip(own, units, strict=True)):
            mu = kept[i]
            if (taken := found.taken(i, with_lost=second is None)) is not None:
                mu += momentum.of_error(unit.size * unit.waits * (sent[i] - taken))
            mus.append(mu.astype(ms[i].dtype))
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
    _axes.check_local(updates, axis_name, exchange.shard_axes)
    check_gradients(updates, mu)
