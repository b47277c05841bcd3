"""LAMB whose workers exchange codes of their momentum instead of gradients."""

from typing import Any

import optax
from jax.typing import ArrayLike, DTypeLike

from slamb_jax import links
from slamb_jax._core import checks
from slamb_jax.exchange import Exchange
from slamb_jax.links.layerwise_trust_ratio import Form
from slamb_jax.optimizers._chain import chain_between, check_agrees, step_by


def lamb(
    learning_rate: optax.ScalarOrSchedule,
    exchange: Exchange,
    *,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-6,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Any = None,
    form: Form = "sum",
    c_min: ArrayLike = 0.01,
    c_max: ArrayLike = 1000.0,
    mu_dtype: DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""LAMB whose workers exchange codes of their momentum instead of gradients.

    The workers agree on the mean M of their momenta, quantized, as
    :func:`mask_momentum` describes, with v of that mean. Then all of them take the same
    step, for each layer:

    .. math::

      u &= \frac{\hat M}{\sqrt{\hat v} + \varepsilon}, \quad
      p \leftarrow p - lr\,\phi\,(u + \lambda p), \quad
      \phi = \operatorname{clip}(\|p\| / \|u\|, c_{min}, c_{max})

    See :func:`layerwise_trust_ratio`, also for ``form="product"``, the form of
    ``optax.lamb``. :func:`slamb` is SLAMB, which exchanges a share of the momentum.

    Args:
      learning_rate: a number, or a schedule of the step from 0: the one that suits n
        workers' batches together.
      exchange: between whom, in what wire format and how often: an :class:`Exchange`
        without a ``selection``.
      b1: decay rate of the momentum, in [0, 1).
      b2: decay rate of the second moment, in [0, 1).
      eps: added to the root of the second moment, positive.
      weight_decay: :math:`\lambda`, not negative, or a schedule of the step from 0.
      mask: which leaves decay, as in ``optax.lamb``. None: all.
      form: ``"sum"`` or ``"product"``.
      c_min: lower bound of the trust ratio, not negative.
      c_max: upper bound of the trust ratio, at least ``c_min``; may be infinite.
      mu_dtype: dtype of m, None (float32) or bfloat16.

    Returns:
      A chain like that of :func:`adamw`, with :func:`layerwise_trust_ratio` in the
      place of the decay.

    Raises:
      ValueError: as :func:`adamw`.

    Examples:
      >>> import slamb_jax
      >>> tx = slamb_jax.lamb(1e-2, slamb_jax.Exchange("data"), weight_decay=0.01)

    References:
      You et al., `Large Batch Optimization for Deep Learning
      <https://arxiv.org/abs/1904.00962>`_, 2019.
    """
    checks.check_decay_rate("b2", b2)
    adam = links.directions.adam(eps)
    momentum = links.mask_momentum(
        check_agrees(exchange), adam, b1, b2, mu_dtype=mu_dtype
    )
    ratio = links.layerwise_trust_ratio(
        exchange, weight_decay=weight_decay, mask=mask, form=form, c_min=c_min,
        c_max=c_max,
    )  # fmt: skip
    return chain_between("lamb", exchange, momentum, ratio, step_by(learning_rate))
