"""Steps whose gradients are not finite: skipped by all workers, and counted."""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from slamb_jax import _axes, _collectives
from slamb_jax._checks import check_axis_name, check_integer, check_transformation


class SkipNotFiniteState(NamedTuple):
    """State of :func:`skip_not_finite`; the same on every worker, ``inner`` apart."""

    notfinite_count: jax.Array  # int32, shape []: steps skipped in a row, up to now
    last_finite: jax.Array  # bool, shape []: whether the last step was taken
    total_notfinite: jax.Array  # int32, shape []: steps skipped in all
    inner: optax.OptState


def skip_not_finite(
    tx: optax.GradientTransformation, axis_name: _axes.AxisName | None
) -> optax.GradientTransformationExtraArgs:
    r"""Skips a step on all workers if the gradients of one are not finite.

    With the gradients :math:`g_i` of worker i, leaf by leaf:

    .. math::

      (u, state) \leftarrow \begin{cases}
        (0, state) & \text{if any } \|g_i\|^2 \text{ is NaN or infinite} \\
        tx(g_i, state) & \text{otherwise}
      \end{cases}

    The workers agree through an all-reduce of one number; ``tx`` stands behind it in a
    real conditional, so that a skipped step sends nothing more. It leaves parameters,
    moments, counts, schedules and the selection's turn untouched, to the last bit.
    (The square, in float32: a norm beyond 1.8e19 is finite, but v might not be.)

    ``optax.apply_if_finite`` does this for one worker. Around a transformation that
    exchanges it hangs as soon as one worker skips and another does not; and it takes
    the step after too many errors, where this one goes on skipping until
    :func:`check_finite` is asked.

    Put it outside of everything that must not see the gradient: outside ``slamb``, a
    chain, or :func:`accumulate` (then one mini-step is skipped; inside, the step).

    **Float16 with a loss scale** s takes the same path: divide the gradients by s in
    float32, step, and then, all workers alike,

    .. math::

      s \leftarrow \begin{cases} s / 2 & \text{if not } last\_finite \\
        2 s & \text{after 2000 finite steps} \end{cases}

    Args:
      tx: the optimizer to step.
      axis_name: the mesh axis (or axes) over which gradients differ or are cut: those
        of the workers, and with them the ``local_axis_name`` of :func:`slamb` and the
        axes of ``param_specs``; None for a single worker. Whoever is left out may wait
        in an exchange for those that skip it.

    Returns:
      A :class:`optax.GradientTransformationExtraArgs`; the zeros that it returns are
      negative ones, which change no parameter's bits.

    Raises:
      ValueError: for a ``tx`` that is no transformation; in ``update``, for an unbound
        axis.

    Examples:
      >>> import jax, jax.numpy as jnp, slamb_jax
      >>> tx = slamb_jax.skip_not_finite(slamb_jax.slamb(0.1, axis_name="data"), "data")
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
    check_axis_name(axis_name)
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
        def take(updates: optax.Updates, inner: optax.OptState) -> tuple[Any, Any]:
            return tx.update(updates, inner, params, **extra_args)

        def skip(updates: optax.Updates, inner: optax.OptState) -> tuple[Any, Any]:
            del updates
            # p + -0.0 is p, where -0.0 + 0.0 is not.
            zeros = jax.tree.map(lambda x: jnp.full(x.shape, -0.0, x.dtype), shapes)
            return zeros, inner

        shapes, _ = jax.eval_shape(take, updates, state.inner)
        poisoned = _collectives.on_any(_not_finite(updates), axis_name)
        u, inner = _axes.cond(poisoned, skip, take, updates, state.inner)
        finite = _axes.vary_over(~poisoned, _axes.varying_axes(state.last_finite))
        in_a_row = optax.safe_increment(state.notfinite_count)
        in_all = optax.safe_increment(state.total_notfinite)
        return u, SkipNotFiniteState(
            jnp.where(poisoned, in_a_row, jnp.zeros_like(in_a_row)),
            finite,
            jnp.where(poisoned, in_all, state.total_notfinite),
            inner,
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _not_finite(updates: optax.Updates) -> jax.Array:
    """Whether the square of any leaf's norm is NaN or infinite, on this worker."""
    # A sum of squares is one vectorized pass; isfinite of each takes seven times as
    # long on a CPU.
    squares = [
        jnp.sum(jnp.square(g.astype(jnp.float32)))
        for g in jax.tree.leaves(updates)
        if jnp.issubdtype(g.dtype, jnp.floating)
    ]
    return ~jnp.all(jnp.isfinite(jnp.array(squares, jnp.float32)))


def check_finite(state: chex.ArrayTree, max_consecutive_errors: int = 10) -> None:
    """Gives up if too many steps in a row were skipped by :func:`skip_not_finite`.

    Nothing can raise inside a compiled step: call this in the training loop. It reads
    one number, so it waits for the step that made it; every tenth step will do, since
    skipped steps lose nothing but their time. All processes see the same number, and
    raise together.

    Args:
      state: what holds the state of :func:`skip_not_finite`: its own, a chain's, a
        ``TrainState``; of one worker, or with a leading replica axis.
      max_consecutive_errors: skipped steps in a row that are let pass, not negative.

    Raises:
      FloatingPointError: if more were skipped, the last step among them.
      ValueError: for a ``state`` without a state of :func:`skip_not_finite`, or
        ``max_consecutive_errors`` out of range.

    Examples:
      >>> import jax.numpy as jnp, optax, slamb_jax
      >>> tx = slamb_jax.skip_not_finite(optax.sgd(0.1), axis_name=None)
      >>> params = jnp.ones(3)
      >>> _, state = tx.update(jnp.full(3, jnp.nan), tx.init(params), params)
      >>> slamb_jax.check_finite(state, 0)  # doctest: +ELLIPSIS
      Traceback (most recent call last):
      FloatingPointError: gradients were not finite for 1 steps in a row (1 in all), ...
    """
    check_integer("max_consecutive_errors", max_consecutive_errors, 0)
    found = [x for x in jax.tree.leaves(state, is_leaf=_is_state) if _is_state(x)]
    if not found:
        raise ValueError(
            "state must hold the state of slamb_jax.skip_not_finite, got "
            f"{jax.tree.structure(state)}"
        )
    for one in found:
        in_a_row = _number(one.notfinite_count)
        if in_a_row > max_consecutive_errors:
            raise FloatingPointError(
                f"gradients were not finite for {in_a_row} steps in a row "
                f"({_number(one.total_notfinite)} in all), more than "
                f"max_consecutive_errors={max_consecutive_errors}: the parameters are "
                "as the last finite step left them; lower the learning rate or the "
                "loss scale, or look at the data"
            )


def _is_state(x: Any) -> bool:
    return isinstance(x, SkipNotFiniteState)


def _number(x: jax.Array) -> int:
    """What all workers agree on, of one or of many."""
    here = x.addressable_data(0) if isinstance(x, jax.Array) else x
    return int(np.asarray(here).reshape(-1)[0])
