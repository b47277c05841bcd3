"""SGD with momentum whose workers average parameters instead of gradients."""

import optax
from jax.typing import DTypeLike

from slamb_jax._tree.checks import check_range
from slamb_jax.exchange.settings import Exchange
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
    r"""SGD whose workers average parameters instead of gradients.

    With the worker's own gradient g and :math:`M_t` the coordinates of the momentum
    that the exchange selects at step t, by default none:

    .. math::

      m &\leftarrow \mu m + (1-\mu) g, \quad
      m[M_t] \leftarrow \text{mean over workers of } m[M_t] \\
      p &\leftarrow p - lr\,\left(r + \frac{1-r}{\sqrt n}\right) \frac{m}{1-\mu},
      \quad r = \beta_3^\tau

    then the parameters are averaged as :func:`average_parameters_every` describes.
    :math:`m/(1-\mu)` is the trace of ``optax.sgd``, whose steps a single worker takes,
    and n workers that exchange everything at every step.

    Args:
      learning_rate: a number, or a schedule of the step from 0.
      exchange: between whom, what, how much and how often: an :class:`Exchange`.
      momentum: :math:`\mu`, in [0, 1). None: 0, and then what is exchanged is the
        gradient, and what is not exchanged does not wait.
      nesterov: look one step ahead, as in ``optax.sgd``.
      accumulator_dtype: dtype of m, None (float32) or bfloat16.

    Returns:
      ``optax.chain(average_gradients(...), mask_momentum(..., optax.scale(...)),
      elementwise_rescale(...), optax.scale_by_learning_rate(...),
      average_parameters_every(...))``.

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
