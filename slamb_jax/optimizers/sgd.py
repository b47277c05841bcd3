"""SGD with momentum whose workers exchange codes of it instead of gradients."""

import optax
from jax.typing import DTypeLike

from slamb_jax import links
from slamb_jax._core import checks
from slamb_jax.exchange import Exchange
from slamb_jax.optimizers._chain import chain_between, check_agrees, step_by, unit_decay


def sgd(
    learning_rate: optax.ScalarOrSchedule,
    exchange: Exchange,
    *,
    momentum: float | None = None,
    nesterov: bool = False,
    accumulator_dtype: DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""SGD whose workers exchange codes of their momentum instead of gradients.

    The workers agree on the mean M of their momenta, quantized, as
    :func:`mask_momentum` describes, and then all of them take the same step:

    .. math::

      m_i \leftarrow \mu m_i + (1-\mu) g_i, \quad
      p \leftarrow p - lr\,M / (1-\mu)

    In float32 these are the steps of ``optax.sgd`` on the mean gradient, whose trace is
    :math:`m/(1-\mu)`. Of a schedule of :math:`\mu` they are those of the formula above,
    and not of a trace. Where workers step by themselves, as with an ``outer``
    optimizer, M is the worker's own momentum; see :func:`adamw`.

    Args:
      learning_rate: a number, or a schedule of the step from 0.
      exchange: between whom, in what wire format and how often: an :class:`Exchange`.
      momentum: :math:`\mu`, in [0, 1). None: 0, and what is exchanged is the gradient.
      nesterov: look one step ahead, as in ``optax.sgd``.
      accumulator_dtype: dtype of m, None (float32) or bfloat16.

    Returns:
      A chain like that of :func:`adamw`, whose direction is ``optax.scale(...)``.

    Raises:
      ValueError: as :func:`adamw`.

    Examples:
      >>> import slamb_jax
      >>> tx = slamb_jax.sgd(0.1, slamb_jax.Exchange("data"), momentum=0.9)
    """
    decay = 0.0 if momentum is None else momentum
    checks.check_decay_rate("momentum", decay)
    checks.check_dtype("accumulator_dtype", accumulator_dtype)
    mean_momentum = links.mask_momentum(
        check_agrees(exchange), optax.scale(1 / (1 - decay)), decay,
        unit_decay(exchange), nesterov=nesterov, bias_correction=False,
        mu_dtype=accumulator_dtype,
    )  # fmt: skip
    return chain_between("sgd", exchange, mean_momentum, step_by(learning_rate))
