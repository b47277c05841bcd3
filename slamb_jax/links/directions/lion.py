"""Lion's direction: the sign of the momentum, with the gradient's own share."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from slamb_jax._checks import check_range
from slamb_jax._leaves import map_present


def lion(
    b1: ArrayLike = 0.9, b2: ArrayLike = 0.99
) -> optax.GradientTransformationExtraArgs:
    r"""The sign of the momentum, in which the worker's own gradient weighs more.

    With the exchanged momentum m, which already has this step's gradient g:

    .. math:: u = \operatorname{sign}(\beta_1 m + (\beta_2 - \beta_1) g)

    For a single worker, whose momentum was :math:`m'` before this step, that is Lion's
    :math:`\operatorname{sign}(\beta_1 m' + (1-\beta_1) g)`. With n workers the gradient
    here is the worker's own, where dense Lion has the mean: the workers' signs may
    differ where the momentum is small.

    Args:
      b1: the share of the momentum before this step, in [0, 1).
      b2: decay rate of the momentum, in (0, 1): ``b1`` of
        :func:`slamb_jax.mask_momentum`, with ``bias_correction=False``. With 0 the
        momentum would hold nothing of the steps before, and the sum would be 0.

    Returns:
      A direction for :func:`slamb_jax.mask_momentum`, without state.

    Raises:
      ValueError: for a value out of range; in ``update``, without ``grad``.

    Examples:
      >>> import jax.numpy as jnp, slamb_jax
      >>> tx = slamb_jax.mask_momentum(
      ...     slamb_jax.Exchange(),
      ...     slamb_jax.directions.lion(0.9, 0.99),
      ...     b1=0.99,
      ...     bias_correction=False,
      ... )
      >>> params = jnp.ones(3)
      >>> updates, _ = tx.update(jnp.array([1.0, -2.0, 0.0]), tx.init(params))
      >>> print(updates)
      [ 1. -1.  0.]

    References:
      Chen et al., `Symbolic Discovery of Optimization Algorithms
      <https://arxiv.org/abs/2302.06675>`_, 2023.
    """
    check_range("b1", b1, 0.0, 1.0, open_high=True)
    check_range("b2", b2, 0.0, 1.0, open_low=True, open_high=True)

    def init(params: optax.Params) -> optax.EmptyState:
        del params
        return optax.EmptyState()

    def update(
        updates: optax.Updates,
        state: optax.EmptyState,
        params: optax.Params | None = None,
        *,
        grad: optax.Updates | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.EmptyState]:
        del params, extra_args
        if grad is None:
            raise ValueError(
                "grad must be the worker's gradient, got None: slamb_jax.mask_momentum "
                "passes it to its direction"
            )
        of_m, of_g = (jnp.asarray(x, jnp.float32) for x in (b1, b2 - b1))  # type: ignore[operator]

        def sign(m: jax.Array, g: jax.Array) -> jax.Array:
            return jnp.sign(of_m * m + of_g * g.astype(jnp.float32))

        return map_present(sign, updates, grad), state

    return optax.GradientTransformationExtraArgs(init, update)
