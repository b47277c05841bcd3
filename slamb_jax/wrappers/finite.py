"""Steps whose gradients are not finite: skipped by all workers, and counted."""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from slamb_jax._core import axes as _axes
from slamb_jax._core.checks import check_integer, check_transformation
from slamb_jax._core.leaves import chosen, unless
from slamb_jax._core.platform import materialized
from slamb_jax._core.rounding import upcast_f32
from slamb_jax.compressors.of_exchange import OfExchangeState
from slamb_jax.exchange.collectives import pany
from slamb_jax.exchange.settings import Exchange, check_exchange
from slamb_jax.links.mask_momentum import MaskMomentumState


class SkipNotFiniteState(NamedTuple):
    """State of :func:`skip_not_finite`; the same on every worker except ``inner``."""

    notfinite_count: jax.Array  # int32, shape []: steps skipped in a row, up to now
    last_finite: jax.Array  # bool, shape []: whether the last step was taken
    total_notfinite: jax.Array  # int32, shape []: steps skipped in all
    inner: optax.OptState


def skip_not_finite(
    tx: optax.GradientTransformation, exchange: Exchange
) -> optax.GradientTransformationExtraArgs:
    r"""Skips a step on all workers if the gradients of one are not finite.

    With the gradients :math:`g_i` of worker i, leaf by leaf:

    .. math::

      (u, state) \leftarrow \begin{cases}
        (0, state) & \text{if any } \|g_i\|^2 \text{ is NaN or infinite in float32} \\
        tx(g_i, state) & \text{otherwise}
      \end{cases}

    Where the workers agree on a mean of their momenta at each step, no message is sent
    for this: a worker with such a gradient sends NaN, which is in the mean of all.
    Elsewhere (a ``selection`` hides it, and between averages of the parameters nothing
    is sent; in another wrapper, of sharded parameters, and where types say that the
    state is the same on all workers) they agree through an all-reduce of one number,
    over all mesh axes of the exchange: workers, devices of a group, and shards where
    they are bound. A skipped step leaves parameters and state untouched, to the bit;
    anything else that a training step changes, such as batch statistics, it has to keep
    by itself. :func:`check_finite` raises after too many. (``optax.apply_if_finite``,
    around a transformation that communicates, deadlocks as soon as one worker skips and
    another does not.)

    ``tx`` runs in a skipped step too, which exchanges as much as any other, and its
    results are dropped. So there is no conditional, at which a GPU would wait for the
    host, and XLA would copy all that it hands on. The links of this library choose
    between their old and their new state in place, which takes one more pass over the
    gradients. The old state of another optimizer is kept until the new one is there.

    Put it around all that must not get the gradient: around ``slamb``, a chain, or
    :func:`accumulate` (then one mini-step is skipped; inside, the step).
    A transformation of one's own in between takes no extra arguments, or hands on all.

    For float16 with a loss scale, divide the gradients by it in float32; halve it after
    a step with ``last_finite`` False, and double it after 2000 finite ones.

    Args:
      tx: the optimizer to step.
      exchange: that of ``tx``; ``Exchange()`` for a single worker.

    Returns:
      A :class:`optax.GradientTransformationExtraArgs`.

    Raises:
      ValueError: for a ``tx`` that is no transformation; in ``update``, for an unbound
        axis, or gradients whose types vary over an axis that the exchange lacks.

    Examples:
      >>> import jax, jax.numpy as jnp, slamb_jax
      >>> exchange = slamb_jax.Exchange("data")
      >>> tx = slamb_jax.skip_not_finite(slamb_jax.lamb(0.1, exchange), exchange)
      >>> def step(g):
      ...     params = jnp.ones(3)
      ...     updates, state = tx.update(g * params, tx.init(params), params)
      ...     return params + updates, state.total_notfinite
      >>> params, skipped = jax.vmap(step, axis_name="data")(jnp.array([1.0, jnp.nan]))
      >>> print(params, skipped)
      [[1. 1. 1.]
       [1. 1. 1.]] [1 1]
    """
    check_transformation("tx", tx)
    check_exchange(exchange)
    # One that takes no extra arguments cannot be told to send NaN.
    can_be_told = isinstance(tx, optax.GradientTransformationExtraArgs)
    tx = optax.with_extra_args_support(tx)

    def init(params: optax.Params) -> SkipNotFiniteState:
        in_a_row, in_all = jnp.zeros([], jnp.int32), jnp.zeros([], jnp.int32)  # donated
        return SkipNotFiniteState(in_a_row, jnp.array(True), in_all, tx.init(params))

    def update(
        updates: optax.Updates,
        state: SkipNotFiniteState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, SkipNotFiniteState]:
        telling = can_be_told and _mean_tells(state, exchange)
        poisoned = _any_device(_not_finite(updates), exchange, between=not telling)
        given = {"poisoned" if telling else "skip": poisoned}
        u, inner = tx.update(updates, state.inner, params, **extra_args, **given)
        if telling:
            # The mean told all workers alike, and what is skipped is not counted.
            (old,), (new,) = _momenta(state.inner), _momenta(inner)
            poisoned = new.count == old.count
            chosen(poisoned, new)
        # p + -0.0 is p, where -0.0 + 0.0 is not.
        u = jax.tree.map(lambda x: jnp.where(poisoned, -jnp.zeros_like(x), x), u)
        in_a_row = optax.safe_increment(state.notfinite_count)
        in_all = optax.safe_increment(state.total_notfinite)
        return u, SkipNotFiniteState(
            jnp.where(poisoned, in_a_row, jnp.zeros_like(in_a_row)),
            _axes.vary_over(~poisoned, _axes.varying_axes(state.last_finite)),
            jnp.where(poisoned, in_all, state.total_notfinite),
            unless(poisoned, state.inner, inner),
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _momenta(inner: optax.OptState) -> list[MaskMomentumState]:
    """The momenta in a chain that the library's exchange averages."""
    parts = inner if type(inner) is tuple else (inner,)
    if any(isinstance(x, jax.Array) for x in parts):
        return []  # no chain
    momenta = [x for x in parts if isinstance(x, MaskMomentumState)]
    return [x for x in momenta if isinstance(x.compressor, OfExchangeState)]


def _mean_tells(state: SkipNotFiniteState, exchange: Exchange) -> bool:
    """Whether a mean of this step tells all workers of a NaN that one of them has."""
    if exchange.axis_name is None or exchange.param_specs is not None:
        return False
    if not exchange.averages_momentum:
        return False
    # What it tells varies over the workers, to types. The state may not come to.
    tracked = _axes.tracked_axes(exchange.axis_name)
    varies = all(tracked <= _axes.varying_axes(x) for x in jax.tree.leaves(state))
    return varies and len(_momenta(state.inner)) == 1


def _any_device(flag: jax.Array, exchange: Exchange, *, between: bool) -> jax.Array:
    """Whether ``flag`` is set on any device of this worker, or ``between`` workers."""
    workers = _axes.as_tuple(exchange.axis_name)
    within = _axes.as_tuple(exchange.local_axis_name)
    within += tuple(filter(_axes.is_bound, exchange.shard_axes))
    agreed = pany(flag, (workers + within if between else within) or None)
    for axis in _axes.missed_axes(agreed, workers + within):
        raise ValueError(
            f"updates vary over the mesh axis {axis!r}, over which skip_not_finite has "
            f"no agreement: give it the exchange of the optimizer, got {exchange!r}"
        )
    return agreed


def _not_finite(updates: optax.Updates) -> jax.Array:
    """Whether the square of any leaf's norm is NaN or infinite, on this worker."""
    # A sum of squares is one vectorized pass; isfinite of each element takes seven
    # times as long on a CPU. Without the barrier the squares would be kept for v.
    squares = [
        jnp.sum(jnp.square(jnp.abs(upcast_f32(g)))).astype(jnp.float32)
        for g in map(materialized, jax.tree.leaves(updates))
        if jnp.issubdtype(g.dtype, jnp.inexact)
    ]
    return ~jnp.all(jnp.isfinite(jnp.array(squares, jnp.float32)))


def check_finite(state: chex.ArrayTree, max_consecutive_errors: int = 10) -> None:
    """Raises if :func:`skip_not_finite` skipped too many steps in a row.

    Call it in the training loop, at every tenth step for example: it waits for the step
    that computed its number. All processes raise together.

    Args:
      state: a tree that contains the state of :func:`skip_not_finite`, such as a
        ``TrainState``; of one worker, or with a leading replica axis.
      max_consecutive_errors: skipped steps in a row that are accepted, not negative.

    Raises:
      FloatingPointError: if more were skipped, the last step among them.
      ValueError: for a ``state`` without a state of :func:`skip_not_finite`, or
        ``max_consecutive_errors`` out of range.

    Examples:
      >>> import jax.numpy as jnp, optax, slamb_jax
      >>> tx = slamb_jax.skip_not_finite(optax.sgd(0.1), slamb_jax.Exchange())
      >>> params = jnp.ones(3)
      >>> _, state = tx.update(jnp.full(3, jnp.nan), tx.init(params), params)
      >>> slamb_jax.check_finite(state, 0)  # doctest: +ELLIPSIS
      Traceback (most recent call last):
      FloatingPointError: gradients were not finite for 1 steps in a row (1 in all), ...
    """
    check_integer("max_consecutive_errors", max_consecutive_errors, 0)

    skippers = optax.tree.get_all_with_path(state, "SkipNotFiniteState")
    if not skippers:
        got = type(state).__name__
        raise ValueError(
            f"state must hold that of skip_not_finite, got a {got} without it"
        )
    for _, x in skippers:
        in_a_row, in_all = _number(x.notfinite_count), _number(x.total_notfinite)
        if in_a_row > max_consecutive_errors:
            raise FloatingPointError(
                f"gradients were not finite for {in_a_row} steps in a row ({in_all} in "
                f"all), more than max_consecutive_errors={max_consecutive_errors}; "
                "no step was taken by them: lower the rate, or look at the data"
            )


def _number(x: jax.Array) -> int:
    """A number on which all workers agree."""
    here = x.addressable_data(0) if isinstance(x, jax.Array) else x
    return int(np.ravel(here)[0])
