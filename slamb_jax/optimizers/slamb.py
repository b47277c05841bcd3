"""SLAMB as published: the chain of the four links."""

from typing import Any

import optax
from jax.typing import ArrayLike, DTypeLike

from slamb_jax import links
from slamb_jax._core import checks
from slamb_jax.exchange import Exchange
from slamb_jax.exchange.settings import check_exchange
from slamb_jax.links.layerwise_trust_ratio import Form
from slamb_jax.optimizers._chain import chain_between, step_by


def slamb(
    learning_rate: optax.ScalarOrSchedule,
    exchange: Exchange,
    *,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    b3: ArrayLike = 0.93,
    eps: ArrayLike = 1e-6,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Any = None,
    form: Form = "sum",
    c_min: ArrayLike = 0.01,
    c_max: ArrayLike = 1000.0,
    mu_dtype: DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""SLAMB: LAMB whose workers exchange a share of their momentum at each step.

    n workers have their own parameters p, moments m and v, and gradients g, which are
    **not** averaged. With :math:`M_t` the coordinates that the exchange selects at step
    :math:`t = 1, 2, \ldots`, and :math:`\tau` the steps since a coordinate was:

    .. math::

      m &\leftarrow \beta_1 m + (1-\beta_1) g, \quad
      v \leftarrow \beta_2 v + (1-\beta_2) g^2 \\
      m[M_t] &\leftarrow \text{mean over workers of } m[M_t], \quad r = \beta_3^\tau \\
      u_0 &= \frac{m}{\sqrt v + \varepsilon} \frac{\sqrt{1-\beta_2^t}}{1-\beta_1^t} \\
      p &\leftarrow p - lr \Big(\phi_{hi}\,r + \phi_{lo}\,\frac{1-r}{\sqrt n}\Big)
        (u_0 + \lambda p) \\
      p &\leftarrow \text{mean over workers of } p
        \quad\text{at } t = 1, H + 1, 2H + 1, \ldots

    with the trust ratios of :func:`layerwise_trust_ratio`, which also has the product
    form. What is not exchanged keeps accumulating in m: the paper's local error
    compensation. Each worker must hold its own copy of the parameters and of this
    state, and must pass its own gradient: :func:`replicate` and :func:`per_worker_step`
    arrange that.

    It departs from the paper in three ways: :math:`M_t` is computed instead of stored,
    and takes turns (:class:`slamb_jax.selections.Strided`); ``sync_every=1`` averages
    at every step, where the authors' code never does; k is 1/c with ``c = round(1/k)``.
    With a ``payload`` the exchange sends few bits, and what rounding takes stays in m.

    Args:
      learning_rate: a number, or a schedule of the step from 0. The large-batch rate:
        the one that suits n workers' batches together.
      exchange: between whom, which share and how often: ``Exchange.paper("data")``, or
        another with a ``selection``.
      b1: decay rate of the first moment, in [0, 1).
      b2: decay rate of the second moment, in [0, 1).
      b3: decay rate of a coordinate's freshness r per step since it was exchanged, in
        [0, 1]; tune it together with the rate. The paper's are 0.93 to 0.999.
      eps: added to the root of the second moment, positive; in the sum form before its
        bias is corrected.
      weight_decay: :math:`\lambda`, not negative, or a schedule of the step from 0.
      mask: which leaves decay, as in ``optax.adamw``. None: all.
      form: ``"sum"`` or ``"product"``.
      c_min: lower bound of the trust ratio, not negative.
      c_max: upper bound of the trust ratio, at least ``c_min``; may be infinite.
      mu_dtype: dtype of m, None (float32) or bfloat16; without a ``payload`` also its
        wire format.

    Returns:
      The numbers of this chain, with ``direction = directions.adam(eps,
      eps_before_correction=form == "sum")``. The ratio is the direction of the
      momentum, which keeps no direction in memory::

        optax.chain(
            mask_momentum(exchange, direction, b1, b2),
            layerwise_trust_ratio(exchange, b3=b3, ...),
            elementwise_rescale(exchange, b3=b3),
            optax.scale_by_learning_rate(learning_rate),
            average_parameters_every(exchange),
        )

    Raises:
      ValueError: for an argument out of range, and for an exchange without a
        ``selection``, with which :func:`lamb` is LAMB; in ``update``, without
        ``params``, for an unbound axis, and for gradients that were averaged already
        where the types show it (``shard_map`` with ``check_vma=True``).

    .. warning::
      Do not wrap it in ``optax.apply_if_finite``, ``optax.conditionally_transform``
      or ``optax.MultiSteps(should_skip_update_fn=...)``: when one worker skips and
      another does not, the exchange waits for ever. To skip gradients that are not
      finite use :func:`skip_not_finite`, to accumulate gradients :func:`accumulate`.
      Under ``optax.inject_hyperparams`` pass ``hyperparam_dtype=jnp.float32`` with
      16-bit parameters: in bfloat16 0.999 is 1.

    Examples:
      >>> import jax, jax.numpy as jnp, optax, slamb_jax
      >>> rate = optax.linear_schedule(0.1, 0.0, 100)
      >>> exchange = slamb_jax.Exchange.paper("data", sync_every=10)
      >>> tx = slamb_jax.slamb(rate, exchange, b3=0.7)
      >>> def train(params, target):  # what one worker does, with data of its own
      ...     def step(carry, _):
      ...         params, state = carry
      ...         grads = jax.grad(lambda p: jnp.sum((p - target) ** 2))(params)
      ...         updates, state = tx.update(grads, state, params)
      ...         return (optax.apply_updates(params, updates), state), None
      ...     carry = (params, tx.init(params))
      ...     return jax.lax.scan(step, carry, length=101)[0][0]
      >>> targets = jnp.array([1.0, 2.0, 3.0, 6.0])
      >>> params = jax.vmap(train, axis_name="data")(jnp.ones((4, 5, 3)), targets)
      >>> print(params.mean((1, 2)).round())  # near the mean of the targets
      [3. 3. 3. 3.]

    References:
      Xu et al., `SLAMB: Accelerated Large Batch Training with Sparse Communication
      <https://proceedings.mlr.press/v202/xu23q.html>`_, ICML 2023.
    """
    checks.check_decay_rate("b2", b2)
    if check_exchange(exchange).selection is None:
        raise ValueError(
            f"exchange must have a selection, got {exchange!r}: slamb_jax.Exchange."
            "paper has one; slamb_jax.lamb is LAMB under an exchange without"
        )
    adam = links.directions.adam(eps, eps_before_correction=form == "sum")
    ratio = links.layerwise_trust_ratio(
        exchange, adam, b3=b3, weight_decay=weight_decay, mask=mask, form=form,
        c_min=c_min, c_max=c_max,
    )  # fmt: skip
    momentum = links.mask_momentum(exchange, ratio, b1, b2, mu_dtype=mu_dtype)
    rescale = links.elementwise_rescale(exchange, b3=b3)
    return chain_between("slamb", exchange, momentum, rescale, step_by(learning_rate))
