"""AdamW whose workers exchange codes of their momentum instead of gradients."""

from typing import Any

import optax
from jax.typing import ArrayLike, DTypeLike

from slamb_jax import links
from slamb_jax._core import checks
from slamb_jax.exchange import Exchange
from slamb_jax.optimizers._chain import chain_between, check_agrees, step_by


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
) -> optax.GradientTransformationExtraArgs:
    r"""AdamW whose workers exchange codes of their momentum instead of gradients.

    Gradients are **not** averaged. At step :math:`t = 1, 2, \ldots` the workers agree
    on the mean M of their momenta, as :func:`mask_momentum` describes, and then all
    of them take the same step:

    .. math::

      m_i &\leftarrow \beta_1 m_i + (1-\beta_1) g_i, \quad
      M = \text{mean over workers of } m_i \text{, quantized} \\
      \hat M &= M / (1-\beta_1^t), \quad
      v \leftarrow \beta_2 v + (1-\beta_2) \hat M^2 \\
      p &\leftarrow p - lr\,\left(
        \frac{\hat M}{\sqrt{v/(1-\beta_2^t) + \epsilon_{root}} + \varepsilon}
        + \lambda p\right)

    Parameters and v are equal on all workers, to the bit; m alone is a worker's own.
    With ``payload=None``, float32, these are the steps of dense AdamW with v of
    the momentum, whichever worker has which data.

    With an ``outer`` optimizer or a ``sync_every`` above 1 in the exchange each worker
    takes these steps by itself, with its own momentum in place of M, and the parameters
    are averaged as :func:`average_parameters_every` describes. Then the workers should
    draw from the same data.

    Args:
      learning_rate: a number, or a schedule of the step from 0: the one that suits n
        workers' batches together. Start from half of dense AdamW's, from 1,000 steps on
        from a quarter: the second moment of the momentum is smaller than that of the
        gradient, so that steps are longer.
      exchange: between whom, in what wire format and how often: an :class:`Exchange`.
      b1: decay rate of the momentum, in [0, 1).
      b2: decay rate of the second moment, in [0, 1).
      eps: added to the root of the second moment, positive.
      eps_root: added under the root, not negative.
      mu_dtype: dtype of m, None (float32) or bfloat16.
      weight_decay: :math:`\lambda`, as in ``optax.adamw``.
      mask: which leaves decay, as in ``optax.adamw``. None: all.
      nesterov: look one step ahead, as in ``optax.adamw``.

    Returns:
      ``optax.chain(mask_momentum(..., directions.adam(...)),
      add_decayed_weights(...), optax.scale_by_learning_rate(...))``, with
      :func:`average_gradients` in front where workers are groups of devices, and
      :func:`average_parameters_every` at the end where they step by themselves.

    Raises:
      ValueError: for an argument out of range, and for an exchange with a
        ``selection``; in ``update``, without ``params``, for an unbound axis, and for
        gradients that were averaged already where the types show it (``shard_map``
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
    checks.check_decay_rate("b2", b2)
    momentum = links.mask_momentum(
        check_agrees(exchange), links.directions.adam(eps, eps_root), b1, b2,
        nesterov=nesterov, mu_dtype=mu_dtype,
    )  # fmt: skip
    return chain_between(
        "adamw", exchange, momentum, step_by(learning_rate, weight_decay, mask)
    )
