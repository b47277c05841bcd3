"""Directions: what an optimizer does with an exchanged momentum."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike, DTypeLike

from slamb_jax._checks import check_range
from slamb_jax._leaves import keep_absent, map_present
from slamb_jax._rounding import next_step
from slamb_jax._skip import Skip
from slamb_jax.links.moments import (
    Form,
    OwnOrShared,
    adam_direction,
    bias,
    check_second_moment,
    corrections,
    init_moment,
    update_second_moment,
)


class AdamState(NamedTuple):
    """State of :func:`adam`."""

    count: jax.Array  # type: ignore[assignment]  # int32, shape []
    nu: optax.Updates | None  # as params, float32 or nu_dtype; None if it is shared


def adam(
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    eps_root: ArrayLike = 0.0,
    *,
    form: Form = "product",
    bias_correction: bool = True,
    nu_of: OwnOrShared = "gradient",
    nu_dtype: DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Divides the momentum by the root of a second moment, which is never exchanged.

    With the exchanged, bias-corrected momentum :math:`\hat m` and the worker's own
    gradient g, at step :math:`t = 1, 2, \ldots`:

    .. math::

      v &\leftarrow \beta_2 v + (1-\beta_2) g^2 \\
      u &= \frac{\hat m}{\sqrt{v/(1-\beta_2^t) + \epsilon_{root}} + \varepsilon}
        \quad\text{(product form)} \\
      u &= \frac{\hat m}{\sqrt{v} + \varepsilon}\sqrt{1-\beta_2^t}
        \quad\text{(sum form)}

    ``nu_of="momentum"`` takes the second moment of the momentum,

    .. math:: v \leftarrow \beta_2 v + (1-\beta_2) \hat m^2

    The workers agree on it as far as they agree on m, while v of their own gradients
    differs, most in the first steps. It is also less noisy, and bounds the update at
    :math:`1/\sqrt{1-\beta_2}` where a worker's own gradient is next to nothing and the
    mean momentum is not: under a ReLU that is off for its few samples, or for a row of
    an embedding that they lack. It departs from Adam.

    Args:
      b2: decay rate of the second moment, in [0, 1).
      eps: added to the root of the second moment, positive.
      eps_root: added under the root, not negative.
      form: ``"product"``, as in Adam, or ``"sum"``, SLAMB's: where eps stands.
      bias_correction: False leaves out the power of t (product form only).
      nu_of: what v is the second moment of: ``"gradient"``, the worker's own,
        ``"momentum"``, or ``"shared"``: that of the mean momentum, which
        :func:`slamb_jax.average_momentum` keeps for all workers.
      nu_dtype: dtype of v: None (float32) or bfloat16, with stochastic rounding: a
        change of :math:`1 - \beta_2` of itself would round to none.

    Returns:
      A direction for :func:`slamb_jax.mask_momentum`: a
      :class:`optax.GradientTransformationExtraArgs` whose ``update`` takes the momentum
      as its updates and the worker's gradient as ``grad``. Its updates are float32.

    Raises:
      ValueError: for a value out of range; in ``update``, for ``nu_of="gradient"``
        without ``grad``.

    Examples:
      >>> import jax.numpy as jnp, slamb_jax
      >>> tx = slamb_jax.mask_momentum(
      ...     slamb_jax.Exchange(), slamb_jax.directions.adam(b2=0.95)
      ... )
      >>> params = jnp.ones(3)
      >>> updates, state = tx.update(jnp.array([1.0, -2.0, 0.0]), tx.init(params))
      >>> print(updates.round(3))
      [ 1. -1.  0.]

    References:
      Kingma and Ba, `Adam <https://arxiv.org/abs/1412.6980>`_, 2014.
    """
    check_second_moment(b2, eps, form, bias_correction, nu_of, nu_dtype)
    check_range("eps_root", eps_root, 0.0)

    def init(params: optax.Params) -> AdamState:
        nu = None if nu_of == "shared" else init_moment(params, "nu_dtype", nu_dtype)
        return AdamState(jnp.zeros([], jnp.int32), nu)

    def update(
        updates: optax.Updates,
        state: AdamState,
        params: optax.Params | None = None,
        *,
        grad: optax.Updates | None = None,
        second_moment: optax.Updates | None = None,
        skip: Skip | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, AdamState]:
        del params, extra_args
        if nu_of == "shared" or state.nu is None:
            return shared(updates, second_moment, next_step(state.count))
        if grad is None:
            if nu_of != "momentum":
                raise ValueError(
                    f"nu_of={nu_of!r} needs the worker's gradient as the argument "
                    "grad, which slamb_jax.mask_momentum passes to its direction"
                )
            grad = updates
        step = next_step(state.count)
        nu = update_second_moment(grad, updates, state.nu, step, b2, nu_of, skip)
        at = corrections(form, step, None, b2, eps, bias_correction)
        at = at._replace(eps_root=jnp.asarray(eps_root, jnp.float32))
        u = map_present(lambda m, v: adam_direction(at, m, v), updates, nu)
        return u, AdamState(step, keep_absent(nu, state.nu))

    def shared(
        updates: optax.Updates, second_moment: optax.Updates | None, step: jax.Array
    ) -> tuple[optax.Updates, AdamState]:
        if second_moment is None:
            raise ValueError(
                "nu_of='shared' needs the argument second_moment, which "
                "slamb_jax.average_momentum passes to its direction"
            )
        at = corrections(form, step, None, b2, eps, bias_correction)
        at = at._replace(eps_root=jnp.asarray(eps_root, jnp.float32))
        plain = form == "product" and bias_correction
        left = jnp.float32(1) if plain else bias(b2, step)
        at = at._replace(v=None)
        u = map_present(
            lambda m, v: adam_direction(at, m, left * v), updates, second_moment
        )
        return u, AdamState(step, None)

    return optax.GradientTransformationExtraArgs(init, update)
