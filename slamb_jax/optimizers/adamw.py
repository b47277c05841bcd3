"""AdamW whose workers exchange codes of their momentum instead of gradients."""

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
from slamb_jax.links.moments import NuOf
from slamb_jax.links.momentum import mask_momentum
from slamb_jax.optimizers.order import mean_first, within_workers


def adamw(
    learning_rate: optax.ScalarOrSchedule,
    exchange: Exchange,
    *,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-8,
    eps_root: ArrayLike = 0.0,
    mu_dtype: DTypeLike | None = None,
    weight_decay: optax.ScalarOrSchedule = 1e-4,
    mask: Any = None,
    nesterov: bool = False,
    nu_of: NuOf = "momentum",
    nu_dtype: DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""AdamW whose workers exchange codes of their momentum instead of gradients.

    Gradients are **not** averaged. At step :math:`t = 1, 2, \ldots` the workers agree
    on the mean M of their momenta, as :func:`average_momentum` describes, and then all
    of them take the same step:

    .. math::

      m_i &\leftarrow \beta_1 m_i + (1-\beta_1) g_i, \quad
      M = \text{mean over workers of } m_i \text{, in codes} \\
      \hat M &= M / (1-\beta_1^t), \quad
      v \leftarrow \beta_2 v + (1-\beta_2) \hat M^2 \\
      p &\leftarrow p - lr\,\left(
        \frac{\hat M}{\sqrt{v/(1-\beta_2^t) + \epsilon_{root}} + \varepsilon}
        + \lambda p\right)

    Parameters and v are equal on all workers, to the bit; m alone is a worker's own.
    With ``average_payload=None``, float32, these are the steps of dense AdamW with v of
    the momentum, whichever worker has which data.

    **Workers that step by themselves.** With ``sync_every`` above 1, an ``outer``
    optimizer or a ``compress_ratio`` in the exchange each worker steps along its own
    direction, and the parameters are averaged as :func:`average_parameters_every`
    describes. Then the workers should draw from the same data. With :math:`M_t` the
    coordinates of the momentum that the exchange selects, if any:

    .. math::

      m &\leftarrow \beta_1 m + (1-\beta_1) g, \quad
      m[M_t] \leftarrow \text{mean over workers of } m[M_t] \\
      \hat m &= m / (1-\beta_1^t), \quad
      v \leftarrow \beta_2 v + (1-\beta_2) \hat m^2 \\
      u &= \frac{\hat m}{\sqrt{v/(1-\beta_2^t) + \epsilon_{root}} + \varepsilon} \\
      p &\leftarrow p - lr\,\left(\left(r + \frac{1-r}{\sqrt n}\right) u
        + \lambda p\right), \quad r = \beta_3^\tau

    with :math:`\tau` the steps since the coordinate was exchanged. A single worker with
    ``nu_of="gradient"`` takes the steps of ``optax.adamw``.

    Args:
      learning_rate: a number, or a schedule of the step from 0: the one that suits n
        workers' batches together. With ``nu_of="momentum"`` try half of dense AdamW's
        too: m is less noisy than g, so that steps are longer.
      exchange: between whom, what, how much and how often: an :class:`Exchange`.
      b1: decay rate of the momentum, in [0, 1).
      b2: decay rate of the second moment, in [0, 1).
      eps: added to the root of the second moment, positive.
      eps_root: added under the root, not negative.
      mu_dtype: dtype of m, None (float32) or bfloat16.
      weight_decay: :math:`\lambda`, as in ``optax.adamw``.
      mask: which leaves decay, as in ``optax.adamw``. None: all.
      nesterov: look one step ahead, as in ``optax.adamw``.
      nu_of: what v is the second moment of: ``"momentum"``, or ``"gradient"``, the
        worker's own, as in AdamW, for workers that step by themselves.
      nu_dtype: dtype of v, None (float32) or bfloat16 with stochastic rounding.

    Returns:
      ``optax.chain(average_momentum(..., directions.adam(...)),
      links.add_decayed_weights(...), optax.scale_by_learning_rate(...))``; for workers
      that step by themselves a chain of :func:`average_gradients`,
      :func:`mask_momentum`, :func:`elementwise_rescale`, decay, rate and
      :func:`average_parameters_every`.

    Raises:
      ValueError: for an argument out of range; for ``nu_of="gradient"`` where all
        workers step alike; in ``update``, without ``params``, for an unbound axis, and
        for gradients that were averaged already where the types show it (``shard_map``
        with ``check_vma=True``).

    Examples:
      >>> import jax, jax.numpy as jnp, optax, slamb_jax
      >>> rate = optax.linear_schedule(0.1, 0.0, 100)
      >>> tx = slamb_jax.adamw(rate, slamb_jax.Exchange("data"), weight_decay=0.0)
      >>> def train(params, target):  # what one worker does, with data of its own
      ...     def step(carry, _):
      ...         params, state = carry
      ...         grads = jax.grad(lambda p: jnp.sum((p - target) ** 2))(params)
      ...         updates, state = tx.update(grads, state, params)
      ...         return (optax.apply_updates(params, updates), state), None
      ...     carry = (params, tx.init(params))
      ...     return jax.lax.scan(step, carry, length=101)[0][0]
      >>> targets = jnp.array([2.0, 2.5, 3.5, 4.0])
      >>> params = jax.vmap(train, axis_name="data")(jnp.ones((4, 5, 3)), targets)
      >>> print(params.mean((1, 2)).round())  # near the mean of the targets
      [3. 3. 3. 3.]

    References:
      Loshchilov and Hutter, `Decoupled Weight Decay Regularization
      <https://arxiv.org/abs/1711.05101>`_, 2017.
    """
    check_range("learning_rate", learning_rate, schedule=True)
    if mean_first(exchange, nu_of):
        direction = directions.adam(b2, eps, eps_root, nu_of="shared")
        return optax.chain(
            *within_workers(exchange),
            average_momentum(
                exchange,
                direction,
                b1,
                b2,
                nesterov=nesterov,
                mu_dtype=mu_dtype,
                nu_dtype=nu_dtype,
            ),
            add_decayed_weights(weight_decay, mask),
            optax.scale_by_learning_rate(learning_rate),
        )
    direction = directions.adam(b2, eps, eps_root, nu_of=nu_of, nu_dtype=nu_dtype)
    return optax.chain(
        average_gradients(exchange),
        mask_momentum(exchange, direction, b1, nesterov=nesterov, mu_dtype=mu_dtype),
        elementwise_rescale(exchange),
        add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
        average_parameters_every(exchange),
    )
