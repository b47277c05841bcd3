"""SLAMB's scaling of gradients, in the fewest passes over memory."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike, DTypeLike

from slamb_jax._axes import axis_size, check_local
from slamb_jax._checks import (
    check_floating,
    check_gradients,
    check_params,
    check_static,
)
from slamb_jax._ex.blocks import selection_at
from slamb_jax._ex.compress import compress
from slamb_jax._layout import mesh_axes
from slamb_jax._leaves import (
    Leaf,
    broadcast_blocks,
    keep_absent,
    map_present,
    mask_tree,
    present,
)
from slamb_jax._rounding import next_step
from slamb_jax._skip import Skip
from slamb_jax.exchange import Exchange, check_exchange
from slamb_jax.links.dense import mean_gradients
from slamb_jax.links.moments import (
    Form,
    NuOf,
    add_decay,
    batch_factor,
    bias,
    check_first_moment,
    check_second_moment,
    corrections,
    decay_at,
    decays,
    freshness,
    init_moment,
    update_first_moment,
    update_second_moment,
)
from slamb_jax.links.norms import LeafTerms, Ratios, check_ratio, clips, trust_ratios
from slamb_jax.links.read_twice import Given, for_norms, for_update
from slamb_jax.links.shards import on_shards


class ScaleBySlambState(NamedTuple):
    """State of :func:`scale_by_slamb`."""

    count: jax.Array  # type: ignore[assignment]  # int32, shape []
    mu: optax.Updates  # first moment, as params, float32 or mu_dtype
    nu: optax.Updates  # second moment, as params, float32 or nu_dtype
    residual: optax.Updates | None  # float32, as params; only with error feedback


def scale_by_slamb(
    exchange: Exchange,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-6,
    *,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Any = None,
    form: Form = "sum",
    c_min: ArrayLike = 0.01,
    c_max: ArrayLike = 1000.0,
    bias_correction: bool = True,
    mu_dtype: DTypeLike | None = None,
    nu_of: NuOf = "gradient",
    nu_dtype: DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Scales gradients by SLAMB's rule; :func:`slamb` without rate and average.

    .. math::

      m &\leftarrow \beta_1 m + (1-\beta_1) g, \quad
      v \leftarrow \beta_2 v + (1-\beta_2) g^2 \\
      m[M_t] &\leftarrow \text{mean over workers of } m[M_t] \\
      r &= \beta_3^\tau, \quad \tau \text{ the steps since the exchange} \\
      u_0 &= \text{Adam's direction of } m, v, \quad u = u_0 + \lambda p \\
      u &\leftarrow \left(\phi_{hi}\,r + \phi_{lo}\,\frac{1-r}{\sqrt n}\right) u
      \quad\text{(sum form)}

    It equals the chain of :func:`average_gradients`, :func:`mask_momentum`,
    :func:`layerwise_trust_ratio` and :func:`elementwise_rescale` to rounding. The chain
    keeps u in memory from link to link; here u is computed once for the norms and once
    for the update, and m, v and p are the only arrays of the parameters' size. (Of a
    leaf whose momentum is not exchanged a GPU or TPU keeps u until the leaf's update is
    there.) With 16-bit parameters it is rounded once, at the end.

    Args:
      exchange: what is exchanged, between whom, how much and how often.
      b1: decay rate of the first moment, in [0, 1).
      b2: decay rate of the second moment, in [0, 1).
      eps: added to the root of the second moment, positive.
      weight_decay: :math:`\lambda`, not negative, or a schedule of the step from 0.
      mask: which leaves decay, see :func:`layerwise_trust_ratio`.
      form: ``"sum"`` or ``"product"``, see :func:`layerwise_trust_ratio`.
      c_min: lower bound of the trust ratio, not negative.
      c_max: upper bound of the trust ratio, at least ``c_min``; may be infinite.
      bias_correction: False, in the product form only, leaves it out.
      mu_dtype: dtype of m, None (float32) or bfloat16.
      nu_of: what v is the second moment of, see :func:`slamb_jax.directions.adam`.
      nu_dtype: dtype of v, None (float32) or bfloat16.

    Returns:
      A :class:`optax.GradientTransformationExtraArgs`; it needs ``params``, whose dtype
      its updates have.

    Raises:
      ValueError: for an argument out of range; in ``update``, without ``params``, for
        an unbound axis, and for gradients that were averaged already where the types
        show it (``shard_map`` with ``check_vma=True``).

    Examples:
      >>> import jax.numpy as jnp, optax, slamb_jax
      >>> exchange = slamb_jax.Exchange()
      >>> tx = optax.chain(slamb_jax.scale_by_slamb(exchange), optax.scale(-0.1))
      >>> params = jnp.array([3.0, 4.0])
      >>> updates, state = tx.update(jnp.array([1.0, 1.0]), tx.init(params), params)
      >>> print(updates.round(3))
      [-0.354 -0.354]

    References:
      Xu et al., `SLAMB: Accelerated Large Batch Training with Sparse Communication
      <https://proceedings.mlr.press/v202/xu23q.html>`_, ICML 2023.
    """
    check_static(("form", "mask", "bias_correction", "mu_dtype", "nu_of", "nu_dtype"),
                 locals())  # fmt: skip
    check_exchange(exchange)
    check_first_moment(b1, mu_dtype)
    check_second_moment(b2, eps, form, bias_correction, nu_of, nu_dtype)
    check_ratio(weight_decay, mask, form, c_min, c_max)

    def init(params: optax.Params) -> ScaleBySlambState:
        check_floating(params, "params")
        mu = init_moment(params, "mu_dtype", mu_dtype)
        nu = init_moment(params, "nu_dtype", nu_dtype)
        residual = None
        if exchange.keeps_rounding_error:
            residual = optax.tree.zeros_like(params, dtype=jnp.float32)
        return ScaleBySlambState(jnp.zeros([], jnp.int32), mu, nu, residual)

    def update(
        updates: optax.Updates,
        state: ScaleBySlambState,
        params: optax.Params | None = None,
        skip: Skip | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, ScaleBySlambState]:
        del extra_args
        check_params(params)
        if exchange.local_axis_name is not None:
            updates = mean_gradients(updates, params, exchange.local_axis_name)
        check_gradients(updates, state.mu)
        step = next_step(state.count)

        def exchanged(mu: optax.Updates) -> tuple[optax.Updates, Any]:
            check_local(mu, exchange.axis_name, mesh_axes(exchange.param_specs))
            return compress(
                exchange, mu, state.residual, step, params,
                keep_residual=False, skip=skip,
            )  # fmt: skip

        mu, residual = update_first_moment(
            updates, state.mu, exchanged, decays(b1, state.mu),
            overlap=exchange.overlap, skip=skip,
        )  # fmt: skip
        fix = bias(b1, step) if bias_correction else jnp.float32(1)
        corrected = map_present(lambda m: m.astype(jnp.float32) / fix, mu)
        nu = update_second_moment(updates, corrected, state.nu, step, b2, nu_of, skip)
        at_step = selection_at(exchange, params, step)
        n, bounds = axis_size(exchange.axis_name), clips(c_min, c_max)
        fixes = corrections(form, step, b1, b2, eps, bias_correction)
        decay = decay_at(weight_decay, state.count)
        rows, rebuild = present(
            mu, nu, params, mask_tree(mask, params),
            like=params, layout=exchange.layout,
        )  # fmt: skip

        def term(
            leaf: Leaf, m: jax.Array, v: jax.Array, p: jax.Array, decays: bool
        ) -> LeafTerms:
            age = at_step.age(leaf)
            direction, rest = for_norms(Given(fixes, m, v), leaf, age)
            inside = decay if decays and form == "product" else None
            return LeafTerms(
                leaf,
                age,
                lambda p, *rest: add_decay(p, direction(*rest), inside),
                p.astype(jnp.float32),
                rest,
            )

        def scaled(
            term: LeafTerms, ratios: Ratios, m: jax.Array, v: jax.Array, decays: bool
        ) -> jax.Array:
            factor = ratios.fresh
            if term.age is not None:
                r = freshness(term.age, exchange.b3, term.leaf)
                factor = ratios.blend(form, r, n, bounds)
                if form == "product":
                    factor = factor * batch_factor(r, n)
            u, factor = for_update(Given(fixes, m, v), term, factor)
            u = add_decay(term.p, u, decay if decays else None)
            return broadcast_blocks(factor, term.leaf) * u

        terms = [term(*row) for row in rows]
        found = trust_ratios(terms, at_step, form, bounds)
        u = rebuild(
            [
                scaled(term, ratios, m, v, decays).astype(p.dtype)
                for term, ratios, (_, m, v, p, decays) in zip(
                    terms, found, rows, strict=True
                )
            ]
        )
        return u, ScaleBySlambState(
            step,
            keep_absent(mu, state.mu),
            keep_absent(nu, state.nu),
            residual,
        )

    tx = optax.GradientTransformationExtraArgs(init, update)
    return tx if exchange.param_specs is None else on_shards(tx, exchange)
