"""Lion whose workers exchange codes of their momentum instead of gradients."""

from typing import Any

import optax
from jax.typing import ArrayLike, DTypeLike

from slamb_jax._checks import check_range
from slamb_jax.exchange import Exchange
from slamb_jax.links import directions
from slamb_jax.links.average import average_parameters_every
from slamb_jax.links.decay import add_decayed_weights
from slamb_jax.links.dense import average_gradients
from slamb_jax.links.freshness import elementwise_rescale
from slamb_jax.links.mean_momentum import average_momentum
from slamb_jax.links.momentum import mask_momentum
from slamb_jax.optimizers.order import mean_first, within_workers


def lion(
    learning_rate: optax.ScalarOrSchedule,
    exchange: Exchange,
    *,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.99,
    mu_dtype: DTypeLike | None = None,
    weight_decay: optax.ScalarOrSchedule = 1e-3,
    mask: Any = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Lion whose workers exchange codes of their momentum instead of gradients.

    The workers agree on the mean of what Lion takes the sign of, in codes, as
    :func:`average_momentum` describes, and then all of them take the same step:

    .. math::

      C &= \text{mean over workers of } \beta_1 m_i + (1-\beta_1) g_i, \quad
      m_i \leftarrow \beta_2 m_i + (1-\beta_2) g_i \\
      p &\leftarrow p - lr\,(\operatorname{sign}(C) + \lambda p)

    In codes of three values C may be 0, where nothing is stepped, so that Lion is
    slower where workers' data differ: see ``python -m benchmarks.different_data``.

    Workers that step by themselves, as with ``sync_every`` above 1, should draw from
    the same data. With the worker's own gradient g and :math:`M_t` the coordinates of
    the momentum that the exchange selects at step t, if any:

    .. math::

      m &\leftarrow \beta_2 m + (1-\beta_2) g, \quad
      m[M_t] \leftarrow \text{mean over workers of } m[M_t] \\
      u &= \operatorname{sign}(\beta_1 m + (\beta_2 - \beta_1) g) \\
      p &\leftarrow p - lr\,\left(\left(r + \frac{1-r}{\sqrt n}\right) u
        + \lambda p\right), \quad r = \beta_3^\tau

    then the parameters are averaged as :func:`average_parameters_every` describes. A
    single worker's steps are those of ``optax.lion``.

    Args:
      learning_rate: a number, or a schedule of the step from 0.
      exchange: between whom, what, how much and how often: an :class:`Exchange`.
      b1: the share of the momentum in the sign, in [0, 1).
      b2: decay rate of the momentum, in (0, 1).
      mu_dtype: dtype of m, None (float32) or bfloat16.
      weight_decay: :math:`\lambda`, as in ``optax.lion``.
      mask: which leaves decay, as in ``optax.lion``. None: all.

    Returns:
      ``optax.chain(average_momentum(..., optax.scale_by_sign()),
      links.add_decayed_weights(...), optax.scale_by_learning_rate(...))``; for workers
      that step by themselves as :func:`adamw`.

    Raises:
      ValueError: as :func:`adamw`.

    Examples:
      >>> import slamb_jax
      >>> tx = slamb_jax.lion(1e-4, slamb_jax.Exchange("data"), weight_decay=0.1)

    References:
      Chen et al., `Symbolic Discovery of Optimization Algorithms
      <https://arxiv.org/abs/2302.06675>`_, 2023.
    """
    check_range("learning_rate", learning_rate, schedule=True)
    direction = directions.lion(b1, b2)
    if mean_first(exchange):
        return optax.chain(
            *within_workers(exchange),
            average_momentum(
                exchange,
                optax.scale_by_sign(),
                b2,
                share=b1,
                bias_correction=False,
                mu_dtype=mu_dtype,
            ),
            add_decayed_weights(weight_decay, mask),
            optax.scale_by_learning_rate(learning_rate),
        )
    return optax.chain(
        average_gradients(exchange),
        mask_momentum(
            exchange, direction, b2, bias_correction=False, mu_dtype=mu_dtype
        ),
        elementwise_rescale(exchange),
        add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
        average_parameters_every(exchange),
    )
