"""SLAMB: LAMB whose workers exchange a share of their state."""

from typing import Any

import jax
import optax
from jax.typing import ArrayLike, DTypeLike

from slamb_jax._checks import check_range, check_static
from slamb_jax.exchange import Exchange
from slamb_jax.links import directions
from slamb_jax.links.average import average_parameters_every
from slamb_jax.links.decay import add_decayed_weights
from slamb_jax.links.mean_momentum import average_momentum
from slamb_jax.links.moments import Form, NuOf
from slamb_jax.links.scale_by_slamb import scale_by_slamb
from slamb_jax.links.trust_ratio import layerwise_trust_ratio
from slamb_jax.optimizers.order import mean_first, within_workers


def slamb(
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
    bias_correction: bool = True,
    mu_dtype: DTypeLike | None = None,
    nu_of: NuOf | None = None,
    nu_dtype: DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""SLAMB: LAMB whose workers exchange a share of their momentum, or codes of it.

    Under the default exchange it is LAMB on the mean of the workers' momenta, which
    they agree on in codes as :func:`average_momentum` describes, with v of that mean.
    All workers take the same step.

    With a ``compress_ratio``, as in ``Exchange.paper``, it is SLAMB. n workers have
    their own parameters p, moments m and v, and gradients g, which are **not**
    averaged. At step :math:`t = 1, 2, \ldots`, with :math:`M_t` the share k of the
    coordinates that the exchange selects:

    .. math::

      m &\leftarrow \beta_1 m + (1-\beta_1) g, \quad
      v \leftarrow \beta_2 v + (1-\beta_2) g^2 \\
      m[M_t] &\leftarrow \text{mean over workers of } m[M_t] \\
      \tau &\leftarrow 0 \text{ on } M_t,\ \tau + 1 \text{ elsewhere}, \quad
      r = \beta_3^\tau \\
      u_0 &= \frac{m}{\sqrt v + \varepsilon}
        \frac{\sqrt{1-\beta_2^t}}{1-\beta_1^t}, \quad u = u_0 + \lambda p \\
      \phi_{hi} &= \operatorname{clip}(\|p[M_t]\| / \|u_0[M_t]\|, c_{min}, c_{max}),
      \quad \phi_{lo} = \min(\|p[\neg M_t]\| / \|u_0[\neg M_t]\|, c_{max}) \\
      p &\leftarrow p - lr\,\left(\phi_{hi}\,r
        + \phi_{lo}\,\frac{1-r}{\sqrt n}\right) u \\
      p &\leftarrow \text{mean over workers of } p
      \quad\text{at } t = 1, H + 1, 2H + 1, \ldots

    That is ``form="sum"``, the authors' "optimized implementation". ``form="product"``
    is their other published rule, with :math:`u` as in Adam, decay inside the norms and
    the step :math:`lr\,(r + (1-r)/\sqrt n)\,\phi\,u` with
    :math:`\phi = \operatorname{clip}(r\phi_{hi} + (1-r)\phi_{lo}, c_{min}, c_{max})`;
    see :func:`layerwise_trust_ratio`. Leaves of one dimension or fewer, and small
    matrices, are exchanged densely.

    Each worker must hold its own copy of the parameters and of this state, and must
    pass its own gradient: :func:`replicate` and :func:`per_worker_step` arrange that.

    It departs from the paper in three ways: by default :math:`M_t` is computed instead
    of stored (:class:`slamb_jax.selections.Strided`); ``sync_every=1`` averages at
    every step, where the authors' code never does; k is 1/c with ``c = round(1/k)`` for
    round robins.

    Args:
      learning_rate: a number, or a schedule of the step from 0. The large-batch rate:
        the one that suits n workers' batches together.
      exchange: between whom, what, how much and how often: an :class:`Exchange`. Its
        :math:`\beta_3` is the one to tune; the paper's are 0.93 to 0.999.
      b1: decay rate of the first moment, in [0, 1).
      b2: decay rate of the second moment, in [0, 1).
      eps: added to the root of the second moment, positive.
      weight_decay: :math:`\lambda`, not negative, or a schedule of the step from 0.
      mask: which leaves decay, as in ``optax.adamw``. None: all.
      form: ``"sum"`` or ``"product"``.
      c_min: lower bound of the trust ratio, not negative.
      c_max: upper bound of the trust ratio, at least ``c_min``; may be infinite.
      bias_correction: False, in the product form only, leaves it out.
      mu_dtype: dtype of m, None (float32) or bfloat16. Without a ``payload`` it is also
        the wire format.
      nu_of: what v is the second moment of: ``"gradient"``, the worker's own, or
        ``"momentum"``, m after its exchange, which departs from the paper. None: the
        mean momentum's where all workers step alike, else the gradient's.
      nu_dtype: dtype of v, None (float32) or bfloat16 with stochastic rounding.

    Returns:
      ``optax.chain(average_momentum(...), layerwise_trust_ratio(...),
      optax.scale_by_learning_rate(...))``; for workers that step by themselves
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
      >>> exchange = slamb_jax.Exchange.paper("data", sync_every=10, b3=0.7)
      >>> tx = slamb_jax.slamb(rate, exchange)
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
    if isinstance(learning_rate, jax.Array):  # a schedule's value takes u's dtype
        learning_rate = optax.constant_schedule(learning_rate)
    static = ("form", "mask", "bias_correction", "mu_dtype", "nu_of", "nu_dtype")
    check_static(static, locals())
    if mean_first(exchange, nu_of):
        direction = directions.adam(
            b2, eps, form=form, bias_correction=bias_correction, nu_of="shared"
        )
        return optax.chain(
            *within_workers(exchange),
            average_momentum(
                exchange,
                direction,
                b1,
                b2,
                bias_correction=bias_correction,
                mu_dtype=mu_dtype,
                nu_dtype=nu_dtype,
            ),
            layerwise_trust_ratio(
                exchange,
                weight_decay=weight_decay,
                mask=mask,
                form=form,
                c_min=c_min,
                c_max=c_max,
            ),
            add_decayed_weights(),  # none, in the parameters' dtype
            optax.scale_by_learning_rate(learning_rate),
        )
    return optax.chain(
        scale_by_slamb(
            exchange,
            b1,
            b2,
            eps,
            weight_decay=weight_decay,
            mask=mask,
            form=form,
            c_min=c_min,
            c_max=c_max,
            bias_correction=bias_correction,
            mu_dtype=mu_dtype,
            nu_of=nu_of or "gradient",
            nu_dtype=nu_dtype,
        ),
        optax.scale_by_learning_rate(learning_rate),
        average_parameters_every(exchange),
    )
