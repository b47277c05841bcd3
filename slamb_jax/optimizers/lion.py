"""Lion whose workers exchange codes of their momentum instead of gradients."""

from typing import Any

import optax
from jax.typing import ArrayLike, DTypeLike

from slamb_jax import links
from slamb_jax._core import checks
from slamb_jax.exchange import Exchange
from slamb_jax.optimizers._chain import chain_between, check_agrees, step_by, unit_decay


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

    The workers agree on the mean of what Lion takes the sign of, quantized, as
    :func:`mask_momentum` describes, and then all of them take the same step:

    .. math::

      C &= \text{mean over workers of } \beta_1 m_i + (1-\beta_1) g_i, \quad
      m_i \leftarrow \beta_2 m_i + (1-\beta_2) g_i \\
      p &\leftarrow p - lr\,(\operatorname{sign}(C) + \lambda p)

    In codes of three values C may be 0, where nothing is stepped, so that Lion is
    slower where workers' data differ: give ``payload="uniform8"`` there. See ``python
    -m benchmarks.train --grid different_data``.

    A single worker's steps are those of ``optax.lion``. Where workers step by
    themselves, as with an ``outer`` optimizer, C is of the worker's own momentum; see
    :func:`adamw`.

    Args:
      learning_rate: a number, or a schedule of the step from 0.
      exchange: between whom, in what wire format and how often: an :class:`Exchange`.
      b1: the share of the momentum in the sign, in [0, 1).
      b2: decay rate of the momentum, in (0, 1).
      mu_dtype: dtype of m, None (float32) or bfloat16.
      weight_decay: :math:`\lambda`, as in ``optax.lion``.
      mask: which leaves decay, as in ``optax.lion``. None: all.

    Returns:
      A chain like that of :func:`adamw`, whose direction is ``optax.scale_by_sign()``.

    Raises:
      ValueError: as :func:`adamw`.

    Examples:
      >>> import slamb_jax
      >>> tx = slamb_jax.lion(1e-4, slamb_jax.Exchange("data"), weight_decay=0.1)

    References:
      Chen et al., `Symbolic Discovery of Optimization Algorithms
      <https://arxiv.org/abs/2302.06675>`_, 2023.
    """
    checks.check_decay_rate("b1", b1)
    checks.check_decay_rate("b2", b2, open_low=True)
    momentum = links.mask_momentum(
        check_agrees(exchange), optax.scale_by_sign(), b2,
        unit_decay(exchange), share=b1, bias_correction=False, mu_dtype=mu_dtype,
    )  # fmt: skip
    step = step_by(learning_rate, weight_decay, mask)
    return chain_between("lion", exchange, momentum, step)
