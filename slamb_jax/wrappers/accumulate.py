"""Gradient accumulation without communication on the mini-steps between."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from slamb_jax._core import axes, checks
from slamb_jax._core.leaves import keep_absent, map_present, unless


class AccumulateState(NamedTuple):
    """State of :func:`accumulate`."""

    mini_step: jax.Array  # int32, shape [], in [0, every)
    mean: optax.Updates  # of the gradients so far, as params, float32
    inner: optax.OptState


def accumulate(
    tx: optax.GradientTransformation, every: int
) -> optax.GradientTransformationExtraArgs:
    r"""Steps ``tx`` with the mean of ``every`` gradients, inside a real conditional.

    On mini-step :math:`i = 0, \ldots, \text{every} - 1` the mean becomes

    .. math:: a \leftarrow a + (g - a)/(i + 1)

    and updates are zero, but on the last, where ``tx`` gets a: its collectives stand in
    a branch of the program (computed always under ``vmap`` with a batched count).
    ``optax.MultiSteps`` gives the same numbers, but runs ``tx`` on every mini-step.

    Args:
      tx: the optimizer to step.
      every: mini-steps per step, a positive integer.

    Raises:
      ValueError: for ``every`` out of range, or a ``tx`` that is no transformation.

    Examples:
      >>> import jax.numpy as jnp, optax, slamb_jax
      >>> tx = slamb_jax.accumulate(optax.sgd(1.0), every=2)
      >>> params = jnp.zeros(1)
      >>> state = tx.init(params)
      >>> for g in (1.0, 3.0):
      ...     updates, state = tx.update(jnp.array([g]), state, params)
      ...     print(updates)
      [0.]
      [-2.]
    """
    checks.check_transformation("tx", tx)
    checks.check_integer("every", every, 1)
    tx = optax.with_extra_args_support(tx)

    def init(params: optax.Params) -> AccumulateState:
        mean = optax.tree.zeros_like(params, dtype=jnp.float32)
        return AccumulateState(jnp.zeros([], jnp.int32), mean, tx.init(params))

    def update(
        updates: optax.Updates,
        state: AccumulateState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, AccumulateState]:
        checks.check_real(updates, "updates")
        share = 1 / (state.mini_step + 1).astype(jnp.float32)

        def add(g: jax.Array, a: jax.Array) -> jax.Array:
            return a + (g.astype(a.dtype) - a) * share.astype(a.dtype)

        mean = map_present(add, updates, state.mean)

        def step(mean: optax.Updates, inner: optax.OptState) -> tuple[Any, ...]:
            gradients = map_present(lambda a, g: a.astype(g.dtype), mean, updates)
            u, new = tx.update(gradients, inner, params, **extra_args)
            inner = unless(extra_args.get("skip"), inner, new)
            # Not of state.mean: of arrays from outside jax forgets the sharding here.
            zeros = map_present(jnp.zeros_like, mean)
            return u, keep_absent(zeros, state.mean), inner

        def wait(mean: optax.Updates, inner: optax.OptState) -> tuple[Any, ...]:
            # Of arrays: the shape of one that varies over an axis may have no zeros.
            u = map_present(lambda x, g: jnp.zeros_like(g, x.dtype), shapes, updates)
            return u, keep_absent(mean, state.mean), inner

        # Of the gradients themselves, whose types tx may have to check.
        shapes, _ = jax.eval_shape(
            lambda g: tx.update(g, state.inner, params, **extra_args), updates
        )
        last = state.mini_step == every - 1
        u, mean, inner = axes.cond(last, step, wait, mean, state.inner)
        mini_step = jnp.where(last, 0, state.mini_step + 1)
        return u, AccumulateState(mini_step, mean, inner)

    return optax.GradientTransformationExtraArgs(init, update)
