"""LAMB whose workers exchange codes of their momentum, and SLAMB as published."""

from typing import Any

import jax
import optax
from jax.typing import ArrayLike, DTypeLike

from slamb_jax._core.checks import check_range, check_static
from slamb_jax._core.moments import Form
from slamb_jax.exchange.settings import Exchange, check_exchange
from slamb_jax.links import directions
from slamb_jax.links.average_parameters import average_parameters_every
from slamb_jax.links.decay import add_decayed_weights
from slamb_jax.links.layerwise_trust_ratio import layerwise_trust_ratio
from slamb_jax.links.mask_momentum import average_momentum, chain_between
from slamb_jax.links.scale_by_slamb import scale_by_slamb


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
    bias_correction: bool = True,
    mu_dtype: DTypeLike | None = None,
    nu_dtype: DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""LAMB whose workers exchange codes of their momentum; with a selection, SLAMB.

    Under the default exchange it is LAMB on the mean of the workers' momenta, which
    they agree on in codes as :func:`average_momentum` describes, with v of that mean.
    All workers take the same step:

    .. math::

      u &= \frac{\hat M}{\sqrt{\hat v} + \varepsilon}, \quad
      p \leftarrow p - lr\,\phi\,(u + \lambda p), \quad
      \phi = \operatorname{clip}(\|p\| / \|u\|, c_{min}, c_{max})

    for each layer; see :func:`layerwise_trust_ratio`, also for ``form="product"``, the
    form of ``optax.lamb``.

    With a ``selection``, as in ``Exchange.paper``, it is SLAMB as published. n workers
    have their own parameters p, moments m and v, and gradients g, which are **not**
    averaged. A step is that of :func:`scale_by_slamb`, and every H steps

    .. math::

      p \leftarrow \text{mean over workers of } p
      \quad\text{at } t = 1, H + 1, 2H + 1, \ldots

    Each worker must hold its own copy of the parameters and of this state, and must
    pass its own gradient: :func:`replicate` and :func:`per_worker_step` arrange that.

    It departs from the paper in three ways: :math:`M_t` is computed instead of stored
    (:class:`slamb_jax.selections.Strided`); ``sync_every=1`` averages at every step,
    where the authors' code never does; k is 1/c with ``c = round(1/k)``.

    Args:
      learning_rate: a number, or a schedule of the step from 0. The large-batch rate:
        the one that suits n workers' batches together.
      exchange: between whom, in what wire format and how often: an :class:`Exchange`.
      b1: decay rate of the first moment, in [0, 1).
      b2: decay rate of the second moment, in [0, 1).
      b3: decay rate of a coordinate's freshness, in [0, 1], with a selection; tune it
        together with the rate. The paper's are 0.93 to 0.999.
      eps: added to the root of the second moment, positive.
      weight_decay: :math:`\lambda`, not negative, or a schedule of the step from 0.
      mask: which leaves decay, as in ``optax.adamw``. None: all.
      form: ``"sum"`` or ``"product"``.
      c_min: lower bound of the trust ratio, not negative.
      c_max: upper bound of the trust ratio, at least ``c_min``; may be infinite.
      bias_correction: False, with a selection and the product form, leaves it out.
      mu_dtype: dtype of m, None (float32) or bfloat16; with a selection also its wire
        format.
      nu_dtype: dtype of v, None (float32) or bfloat16 with stochastic rounding.

    Returns:
      ``optax.chain(average_momentum(..., directions.adam(...)),
      layerwise_trust_ratio(...), optax.scale_by_learning_rate(...))``; with a selection
      ``optax.chain(scale_by_slamb(...), optax.scale_by_learning_rate(...),
      average_parameters_every(...))``.

    Raises:
      ValueError: for an argument out of range; in ``update``, without ``params``, for
        an unbound axis, and for gradients that were averaged already where the types
        show it (``shard_map`` with ``check_vma=True``).

    .. warning::
      Do not wrap it in ``optax.apply_if_finite``, ``optax.conditionally_transform``
      or ``optax.MultiSteps(should_skip_update_fn=...)``: when one worker skips and
      another does not, the exchange waits for ever. To skip gradients that are not
      finite use :func:`skip_not_finite`, to accumulate gradients :func:`accumulate`.
      Under ``optax.inject_hyperparams`` pass ``static_args="exchange"`` and, with
      16-bit parameters, ``hyperparam_dtype=jnp.float32``: in bfloat16 0.999 is 1.

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
    check_range("learning_rate", learning_rate, schedule=True)
    check_range("b2", b2, 0.0, 1.0, open_high=True)
    if isinstance(learning_rate, jax.Array):  # a schedule's value takes u's dtype
        learning_rate = optax.constant_schedule(learning_rate)
    static = ("form", "mask", "bias_correction", "mu_dtype", "nu_dtype")
    check_static(static, locals())
    rate = optax.scale_by_learning_rate(learning_rate)
    ratios = {
        "weight_decay": weight_decay,
        "mask": mask,
        "form": form,
        "c_min": c_min,
        "c_max": c_max,
    }
    if check_exchange(exchange).selection is not None:
        masked = scale_by_slamb(
            exchange, b1, b2, b3, eps, **ratios,
            bias_correction=bias_correction, mu_dtype=mu_dtype, nu_dtype=nu_dtype,
        )  # fmt: skip
        return optax.chain(masked, rate, average_parameters_every(exchange))
    if not bias_correction:
        raise ValueError(
            f"bias_correction=False needs a selection in the exchange, got {exchange!r}"
        )
    return chain_between(
        exchange,
        average_momentum(
            exchange,
            directions.adam(eps),
            b1,
            b2,
            mu_dtype=mu_dtype,
            nu_dtype=nu_dtype,
        ),
        layerwise_trust_ratio(exchange, **ratios),
        add_decayed_weights(),  # none, in the parameters' dtype
        rate,
    )
