"""SGD with momentum whose workers exchange codes of it instead of gradients."""

import optax
from jax.typing import DTypeLike

from slamb_jax._checks import check_range
from slamb_jax.exchange import Exchange
from slamb_jax.links.average import average_parameters_every
from slamb_jax.links.decay import add_decayed_weights
from slamb_jax.links.dense import average_gradients
from slamb_jax.links.freshness import elementwise_rescale
from slamb_jax.links.mean_momentum import average_momentum
from slamb_jax.links.momentum import mask_momentum
from slamb_jax.optimizers.order import mean_first, within_workers


def sgd(
    learning_rate: optax.ScalarOrSchedule,
    exchange: Exchange,
    *,
    momentum: float | None = None,
    nesterov: bool = False,
    accumulator_dtype: DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""SGD whose workers exchange codes of their momentum instead of gradients.

    The workers agree on the mean M of their momenta, in codes, as
    :func:`average_momentum` describes, and then all of them take the same step:

    .. math::

      m_i \leftarrow \mu m_i + (1-\mu) g_i, \quad
      p \leftarrow p - lr\,M / (1-\mu)

    In float32 these are the steps of ``optax.sgd`` on the mean gradient. Workers that
    step by themselves, as with ``sync_every`` above 1, should draw from the same data.
    With the worker's own gradient g and :math:`M_t` the coordinates of the momentum
    that the exchange selects at step t, if any:

    .. math::

      m &\leftarrow \mu m + (1-\mu) g, \quad
      m[M_t] \leftarrow \text{mean over workers of } m[M_t] \\
      p &\leftarrow p - lr\,\left(r + \frac{1-r}{\sqrt n}\right) \frac{m}{1-\mu},
      \quad r = \beta_3^\tau

    then the parameters are averaged as :func:`average_parameters_every` describes.
    :math:`m/(1-\mu)` is the trace of ``optax.sgd``, whose steps a single worker takes.

    Args:
      learning_rate: a number, or a schedule of the step from 0.
      exchange: between whom, what, how much and how often: an :class:`Exchange`.
      momentum: :math:`\mu`, in [0, 1). None: 0, and what is exchanged is the gradient.
      nesterov: look one step ahead, as in ``optax.sgd``.
      accumulator_dtype: dtype of m, None (float32) or bfloat16.

    Returns:
      ``optax.chain(average_momentum(..., optax.scale(...)),
      links.add_decayed_weights(), optax.scale_by_learning_rate(...))``; for workers
      that step by themselves as :func:`adamw`.

    Raises:
      ValueError: as :func:`adamw`.

    Examples:
      >>> import slamb_jax
      >>> tx = slamb_jax.sgd(0.1, slamb_jax.Exchange("data"), momentum=0.9)
    """
    check_range("learning_rate", learning_rate, schedule=True)
    decay = 0.0 if momentum is None else momentum
    check_range("momentum", decay, 0.0, 1.0, open_high=True)
    if mean_first(exchange):
        return optax.chain(
            *within_workers(exchange),
            average_momentum(
                exchange,
                optax.scale(1 / (1 - decay)),
                decay,
                nesterov=nesterov,
                bias_correction=False,
                mu_dtype=accumulator_dtype,
            ),
            add_decayed_weights(),  # none, in the parameters' dtype
            optax.scale_by_learning_rate(learning_rate),
        )
    return optax.chain(
        average_gradients(exchange),
        mask_momentum(
            exchange,
            optax.scale(1 / (1 - decay)),
            decay,
            nesterov=nesterov,
            bias_correction=False,
            mu_dtype=accumulator_dtype,
        ),
        elementwise_rescale(exchange),
        optax.scale_by_learning_rate(learning_rate),
        average_parameters_every(exchange),
    )
