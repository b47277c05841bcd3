"""Adam's direction, of a momentum and a second moment that are there."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from slamb_jax._core import checks
from slamb_jax._core.leaves import map_present

_LEAST_OF_OWN_V = 1e-6  # the paper's eps


def adam(
    eps: ArrayLike = 1e-8,
    eps_root: ArrayLike = 0.0,
    *,
    eps_before_correction: bool = False,
) -> optax.GradientTransformationExtraArgs:
    r"""Divides the mean momentum by the root of its second moment.

    .. math:: u = \frac{\hat M}{\sqrt{\hat v + \epsilon_{root}} + \varepsilon}

    with :math:`\hat M` and :math:`\hat v` from :func:`slamb_jax.mask_momentum`. It
    departs from Adam, whose v is the second moment of the gradient. Workers can agree
    on v of the momentum without sending anything for it.

    Args:
      eps: added to the root of the second moment, positive. With a ``selection`` in the
        exchange at least 1e-6, the paper's: v is of a worker's own gradients there, and
        where they are 0, and those of others are not, the step is M / eps.
      eps_root: added under the root, not negative.
      eps_before_correction: add eps to the root of v before its bias is corrected, as
        the authors of SLAMB do in the sum form. Then
        :math:`\varepsilon / \sqrt{1-\beta_2^t}` stands for :math:`\varepsilon`.

    Returns:
      A direction without arrays in its state, for :func:`slamb_jax.mask_momentum`.

    Raises:
      ValueError: for a value out of range; in ``update``, without ``second_moment``.

    Examples:
      >>> import jax.numpy as jnp, slamb_jax
      >>> tx = slamb_jax.mask_momentum(
      ...     slamb_jax.Exchange(), slamb_jax.directions.adam(), b2=0.95
      ... )
      >>> params = jnp.ones(3)
      >>> updates, state = tx.update(jnp.array([1.0, -2.0, 0.0]), tx.init(params))
      >>> print(updates.round(3))
      [ 1. -1.  0.]

    References:
      Kingma and Ba, `Adam <https://arxiv.org/abs/1412.6980>`_, 2014.
    """
    checks.check_range("eps", eps, 0.0, open_low=True, holds=checks.SMALL)
    checks.check_range("eps_root", eps_root, 0.0, holds=checks.SMALL)
    checks.check_bool("eps_before_correction", eps_before_correction)

    def update(
        updates: optax.Updates,
        state: optax.EmptyState,
        params: optax.Params | None = None,
        *,
        second_moment: optax.Updates | None = None,
        of_second_moment: jax.Array | None = None,
        moments: Any = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.EmptyState]:
        del params, extra_args
        if second_moment is None:
            raise ValueError(
                "directions.adam needs second_moment, as of mask_momentum with a b2"
            )
        if moments is not None and (checks.known(eps) or 1) < _LEAST_OF_OWN_V:
            # Which mask_momentum hands over with a selection.
            warnings.warn(
                f"directions.adam(eps={eps}) takes steps of M / eps where a worker's "
                "own gradients are 0, with a selection in the exchange: give "
                f"eps={_LEAST_OF_OWN_V:g} or more",
                stacklevel=2,
            )
        # A complex v would be a square, and no square of an absolute value.
        checks.check_floating(updates, "updates")
        # As float32 arrays: optax.inject_hyperparams may give them another dtype.
        least, under_root = (jnp.asarray(x, jnp.float32) for x in (eps, eps_root))
        # v comes corrected. An eps that is added before has to be corrected with it.
        if eps_before_correction and of_second_moment is not None:
            least = least * jnp.sqrt(of_second_moment)

        # Moments may be kept in 16 bits; what is made of them is float32.
        roots = map_present(
            lambda v: jnp.sqrt(v.astype(jnp.float32) + under_root), second_moment
        )
        return map_present(
            lambda m, root: m.astype(jnp.float32) / (root + least), updates, roots
        ), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)
