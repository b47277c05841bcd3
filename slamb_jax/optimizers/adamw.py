"""AdamW whose workers average parameters instead of gradients."""

from typing import Any

import optax
from jax.typing import ArrayLike, DTypeLike

from slamb_jax._tree.checks import check_range
from slamb_jax.exchange.settings import Exchange
from slamb_jax.links import directions
from slamb_jax.links.average import average_parameters_every
from slamb_jax.links.decay import add_decayed_weights
from slamb_jax.links.dense import average_gradients
from slamb_jax.links.freshness import elementwise_rescale
from slamb_jax.links.moments import NuOf
from slamb_jax.links.momentum import mask_momentum


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
    r"""AdamW whose workers average parameters instead of gradients.

    n workers, each with its own parameters p, moments m and v, and its own gradient
    g, which is **not** averaged. At step :math:`t = 1, 2, \ldots`, with :math:`M_t` the
    coordinates of the momentum that the exchange selects, by default none:

    .. math::

      m &\leftarrow \beta_1 m + (1-\beta_1) g, \quad
      m[M_t] \leftarrow \text{mean over workers of } m[M_t] \\
      \hat m &= m / (1-\beta_1^t), \quad
      v \leftarrow \beta_2 v + (1-\beta_2) \hat m^2 \\
      u &= \frac{\hat m}{\sqrt{v/(1-\beta_2^t) + \epsilon_{root}} + \varepsilon} \\
      p &\leftarrow p - lr\,\left(\left(r + \frac{1-r}{\sqrt n}\right) u
        + \lambda p\right), \quad r = \beta_3^\tau

    with :math:`\tau` the steps since the coordinate was exchanged; then the parameters
    are averaged as :func:`average_parameters_every` describes. With
    ``nu_of="gradient"``, a single worker, or everything exchanged between workers that
    have the same gradients, it is ``optax.adamw``.

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
        worker's own, as in AdamW; see :func:`slamb_jax.directions.adam`.
      nu_dtype: dtype of v, None (float32) or bfloat16 with stochastic rounding.

    Returns:
      ``optax.chain(average_gradients(...), mask_momentum(..., directions.adam(...)),
      elementwise_rescale(...), links.add_decayed_weights(...),
      optax.scale_by_learning_rate(...), average_parameters_every(...))``.

    Raises:
      ValueError: for an argument out of range, and for a selection that keeps a state
        (``"top_k"``), which :func:`slamb` alone can follow; in ``update``, without
        ``params``, for an unbound axis, and for gradients that were averaged already
        where the types show it (``shard_map`` with ``check_vma=True``).

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
    direction = directions.adam(b2, eps, eps_root, nu_of=nu_of, nu_dtype=nu_dtype)
    return optax.chain(
        average_gradients(exchange),
        mask_momentum(exchange, direction, b1, nesterov=nesterov, mu_dtype=mu_dtype),
        elementwise_rescale(exchange),
        add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
        average_parameters_every(exchange),
    )
