"""Decoupled weight decay, at a rate that may follow a schedule."""

from typing import Any, NamedTuple

import jax
import optax

from slamb_jax._core.checks import check_params, check_same_kind
from slamb_jax._core.hyperparameters import static
from slamb_jax._core.leaves import map_present, mask_tree
from slamb_jax._core.moments import add_decay, check_decay, init_decay, step_decay
from slamb_jax._core.rounding import float32_of


class AddDecayedWeightsState(NamedTuple):
    """State of :func:`add_decayed_weights` with a schedule."""

    count: jax.Array  # type: ignore[assignment]  # int32, shape []


@static("mask")
def add_decayed_weights(
    weight_decay: optax.ScalarOrSchedule = 0.0, mask: Any = None
) -> optax.GradientTransformationExtraArgs:
    r"""Adds decay to the updates, :math:`u \leftarrow u + \lambda p`.

    As ``optax.add_decayed_weights``, and also where gradients are None and with a mask
    that is a prefix of the parameters' tree.

    Args:
      weight_decay: :math:`\lambda`, not negative, or a schedule of the step from 0.
      mask: which leaves decay: a tree of bools with the structure of the parameters or
        a prefix of it, or a function of the parameters that returns one. None: all.

    Returns:
      A :class:`optax.GradientTransformationExtraArgs`; it needs ``params``, whose dtype
      its updates have. It counts steps only for a schedule.

    Raises:
      ValueError: for a value out of range; in ``update``, without ``params``.

    Examples:
      >>> import jax.numpy as jnp
      >>> from slamb_jax.links.decay import add_decayed_weights
      >>> tx = add_decayed_weights(0.5)
      >>> params = jnp.array([2.0])
      >>> print(tx.update(jnp.zeros(1), tx.init(params), params)[0])
      [1.]
    """
    check_decay(weight_decay, mask)

    def init(params: optax.Params) -> optax.OptState:
        del params
        return init_decay(weight_decay, AddDecayedWeightsState)

    def update(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        del extra_args
        check_params(params)
        check_same_kind(updates, params)
        rate, state = step_decay(weight_decay, state)

        def add(u: jax.Array, p: jax.Array, decays: bool) -> jax.Array:
            # Rounded once, to the parameters' dtype: links before this are in float32.
            wide = p.astype(float32_of(p))
            of_p = rate.astype(wide.dtype) if decays and rate is not None else None
            return add_decay(wide, u.astype(wide.dtype), of_p).astype(p.dtype)

        decayed = map_present(add, updates, params, mask_tree(mask, params))
        return decayed, state

    return optax.GradientTransformationExtraArgs(init, update)
