"""SLAMB's scaling of gradients, in the fewest passes over memory."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike, DTypeLike

from slamb_jax._core.axes import axis_size, check_local
from slamb_jax._core.checks import (
    check_choice,
    check_dtype,
    check_floating,
    check_gradients,
    check_params,
    check_range,
    check_static,
)
from slamb_jax._core.leaves import (
    Leaf,
    Skip,
    broadcast_blocks,
    chosen,
    keep_absent,
    map_numbered,
    map_present,
    mask_tree,
    present,
    unless,
)
from slamb_jax._core.moments import (
    Form,
    add_decay,
    bias,
    check_first_moment,
    check_ratio,
    decay_at,
    init_moment,
    moved,
    stored,
)
from slamb_jax._core.platform import (
    computed_once_on_tpu,
    direction_for_norms,
    direction_for_update,
    kept_per_block,
)
from slamb_jax._core.rounding import next_step
from slamb_jax.exchange.blocks import mean_of_selected, selection_at
from slamb_jax.exchange.settings import Exchange, check_exchange
from slamb_jax.links._masked_norms import LeafTerms, Ratios, trust_ratios
from slamb_jax.links.average_parameters import mean_gradients
from slamb_jax.links.on_shards import on_shards


class ScaleBySlambState(NamedTuple):
    """State of :func:`scale_by_slamb`."""

    count: jax.Array  # type: ignore[assignment]  # int32, shape []
    mu: optax.Updates  # first moment, as params, float32 or mu_dtype
    nu: optax.Updates  # second moment, as params, float32 or nu_dtype


def scale_by_slamb(
    exchange: Exchange,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    b3: ArrayLike = 0.93,
    eps: ArrayLike = 1e-6,
    *,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Any = None,
    form: Form = "sum",
    c_min: ArrayLike = 0.01,
    c_max: ArrayLike = 1000.0,
    bias_correction: bool = True,
    mu_dtype: DTypeLike | None = None,
    nu_dtype: DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Scales gradients by SLAMB's rule; :func:`slamb` without rate and average.

    With the worker's own gradient g, step :math:`t = 1, 2, \ldots`, :math:`M_t` the
    coordinates that the exchange selects, and :math:`\tau` the steps since a coordinate
    was exchanged:

    .. math::

      m &\leftarrow \beta_1 m + (1-\beta_1) g, \quad
      v \leftarrow \beta_2 v + (1-\beta_2) g^2 \\
      m[M_t] &\leftarrow \text{mean over workers of } m[M_t], \quad r = \beta_3^\tau

    What is not exchanged keeps accumulating in m: the paper's local error compensation.
    Then, with the ratio :math:`\phi_{hi}` of the exchanged coordinates of a layer and
    :math:`\phi_{lo}` of the others, in the **sum form**

    .. math::

      u_0 &= \frac{m}{\sqrt v + \varepsilon} \frac{\sqrt{1-\beta_2^t}}{1-\beta_1^t} \\
      \phi_{hi} &= \operatorname{clip}(\|p[M_t]\| / \|u_0[M_t]\|, c_{min}, c_{max}),
      \quad \phi_{lo} = \min(\|p[\neg M_t]\| / \|u_0[\neg M_t]\|, c_{max}) \\
      u &= \Big(\phi_{hi}\,r + \phi_{lo}\,\frac{1-r}{\sqrt n}\Big) (u_0 + \lambda p)

    where a ratio with a norm of 0 is 1 for the exchanged and 0 for the others. In the
    **product form** u has decay inside the norms, both such ratios are 1, and

    .. math::

      u_0 &= \frac{m / (1-\beta_1^t)}{\sqrt{v / (1-\beta_2^t)} + \varepsilon}
        + \lambda p, \quad
      u = \Big(r + \frac{1-r}{\sqrt n}\Big)
        \operatorname{clip}(r\phi_{hi} + (1-r)\phi_{lo}, c_{min}, c_{max})\, u_0

    A leaf of one dimension or none is exchanged whole; its ratio is not clipped in the
    product form. u is computed once for the norms and once for the update: m, v and p
    are the only arrays of the parameters' size. (Of a leaf that is exchanged whole a
    GPU or TPU keeps u until the leaf's update is there.)

    Args:
      exchange: between whom, and which coordinates when: its ``selection``.
      b1: decay rate of the first moment, in [0, 1).
      b2: decay rate of the second moment, in [0, 1).
      b3: decay rate of a coordinate's freshness r per step since it was exchanged, in
        [0, 1]: stale coordinates step at the rate of a smaller batch.
      eps: added to the root of the second moment, positive.
      weight_decay: :math:`\lambda`, not negative, or a schedule of the step from 0.
      mask: which leaves decay, as in ``optax.add_decayed_weights``. None: all.
      form: ``"sum"`` or ``"product"``.
      c_min: lower bound of the trust ratio, not negative.
      c_max: upper bound of the trust ratio, at least ``c_min``; may be infinite.
      bias_correction: False, in the product form only, leaves it out.
      mu_dtype: dtype of m, None (float32) or bfloat16; also its wire format.
      nu_dtype: dtype of v, None (float32) or bfloat16 with stochastic rounding.

    Returns:
      A :class:`optax.GradientTransformationExtraArgs`; it needs ``params``, whose dtype
      its updates have.

    Raises:
      ValueError: for an argument out of range, and for an exchange without a
        ``selection``; in ``update``, without ``params``, for an unbound axis, and for
        gradients that were averaged already where the types show it (``shard_map``
        with ``check_vma=True``).

    Examples:
      >>> import jax.numpy as jnp, optax, slamb_jax
      >>> exchange = slamb_jax.Exchange.paper()
      >>> tx = optax.chain(slamb_jax.scale_by_slamb(exchange), optax.scale(-0.1))
      >>> params = jnp.array([3.0, 4.0])
      >>> updates, state = tx.update(jnp.array([1.0, 1.0]), tx.init(params), params)
      >>> print(updates.round(3))
      [-0.354 -0.354]

    References:
      Xu et al., `SLAMB: Accelerated Large Batch Training with Sparse Communication
      <https://proceedings.mlr.press/v202/xu23q.html>`_, ICML 2023.
    """
    static = ("form", "mask", "bias_correction", "mu_dtype", "nu_dtype")
    check_static(static, locals())
    if check_exchange(exchange).selection is None:
        raise ValueError(
            f"exchange must have a selection, got {exchange!r}: slamb_jax.Exchange."
            "paper has one"
        )
    check_first_moment(b1, mu_dtype)
    check_range("b2", b2, 0.0, 1.0, open_high=True)
    check_range("b3", b3, 0.0, 1.0)
    check_range("eps", eps, 0.0, open_low=True)
    check_choice("form", form, ("sum", "product"))
    check_dtype("nu_dtype", nu_dtype)
    check_ratio(weight_decay, mask, form, c_min, c_max)
    if form == "sum" and not bias_correction:
        raise ValueError(
            "bias_correction=False needs form='product', got form='sum', which is "
            "always bias-corrected"
        )

    def init(params: optax.Params) -> ScaleBySlambState:
        check_floating(params, "params")
        mu = init_moment(params, "mu_dtype", mu_dtype)
        nu = init_moment(params, "nu_dtype", nu_dtype)
        return ScaleBySlambState(jnp.zeros([], jnp.int32), mu, nu)

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
        check_local(updates, exchange.axis_name, exchange.shard_axes)
        check_gradients(updates, state.mu)
        step = next_step(state.count)
        at_step = selection_at(exchange, params, step)

        def exchanged(mu: optax.Updates) -> optax.Updates:
            return mean_of_selected(exchange, at_step, mu, params, skip)

        def grown(g: jax.Array, m: jax.Array) -> jax.Array:
            return moved(m, g, b1).astype(m.dtype)

        old = map_present(lambda g, m: m, updates, state.mu)
        if exchange.overlap:
            mu = exchanged(old)  # old itself if the step is skipped
            mu = unless(skip, mu, map_present(grown, updates, mu))
        else:
            mu = exchanged(unless(skip, old, map_present(grown, updates, old)))
        nu = _second_moment(updates, state.nu, step, b2)
        old = map_present(lambda g, v: v, updates, state.nu)
        nu = unless(skip, old, nu) if skip is not None else _kept_once(nu)

        n = axis_size(exchange.axis_name)
        bounds = jnp.asarray(c_min, jnp.float32), jnp.asarray(c_max, jnp.float32)
        scalars = _scalars(form, step, b1, b2, eps, bias_correction)
        decay = decay_at(weight_decay, state.count)
        rows, rebuild = present(
            mu, nu, params, mask_tree(mask, params),
            like=params, layout=exchange.layout,
        )  # fmt: skip

        def term(
            leaf: Leaf, m: jax.Array, v: jax.Array, p: jax.Array, decays: bool
        ) -> LeafTerms:
            age = at_step.age(leaf)
            direction, rest = direction_for_norms(
                _direction, scalars, (m, v), in_parts=age is not None
            )
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
                r = _freshness(term.age, b3, term.leaf)
                factor = ratios.blend(form, r, n, bounds)
                if form == "product":
                    factor = factor * (r + (1 - r) / n**0.5)
            u, factor = direction_for_update(
                _direction, scalars, (m, v), term.rest, factor,
                in_parts=term.age is not None,
            )  # fmt: skip
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
        new = ScaleBySlambState(
            unless(skip, state.count, step),
            keep_absent(mu, state.mu),
            keep_absent(nu, state.nu),
        )
        return u, chosen(skip, new)

    tx = optax.GradientTransformationExtraArgs(init, update)
    return tx if exchange.param_specs is None else on_shards(tx, exchange)


def _second_moment(
    updates: optax.Updates, nu: optax.Updates, step: jax.Array, b2: ArrayLike
) -> optax.Updates:
    """v, with None for missing gradients."""

    def grown(leaf: Leaf, g: jax.Array, v: jax.Array) -> jax.Array:
        square = jnp.square(g.astype(jnp.float32))
        return stored(moved(v, square, b2), v.dtype, step, leaf)

    return map_numbered(grown, updates, nu, like=nu)


def _kept_once(nu: optax.Updates) -> optax.Updates:
    """Where a step may be skipped a TPU keeps more after a barrier."""
    return map_present(computed_once_on_tpu, nu)


Scalars = tuple[jax.Array, jax.Array, jax.Array]


def _scalars(
    form: Form,
    step: jax.Array,
    b1: ArrayLike,
    b2: ArrayLike,
    eps: ArrayLike,
    bias_correction: bool,
) -> Scalars:
    """The factors of m and v that correct their bias, and eps."""
    fix1, fix2 = bias(b1, step), bias(b2, step)
    if not bias_correction:
        fix1 = fix2 = jnp.float32(1)
    of_m, of_v = 1 / fix1, 1 / fix2
    if form == "sum":  # eps is added before the correction
        of_m, of_v = jnp.sqrt(fix2) / fix1, jnp.float32(1)
    return of_m, of_v, jnp.asarray(eps, jnp.float32)


def _direction(scalars: Scalars, m: jax.Array, v: jax.Array) -> jax.Array:
    """Adam's direction, in float32."""
    of_m, of_v, eps = scalars
    return of_m * m.astype(jnp.float32) / (jnp.sqrt(of_v * v.astype(jnp.float32)) + eps)


def _freshness(age: jax.Array, b3: ArrayLike, leaf: Leaf) -> jax.Array:
    r""":math:`r = \beta_3^\tau`, float32, one per block; exactly 1 where exchanged."""
    # exp, not pow, which takes a CPU five times as long. It comes last: XLA computes it
    # once per block, but what follows it once per element of all that uses it.
    power = age.astype(jnp.float32) * jnp.log(jnp.asarray(b3, jnp.float32))
    fresh = jnp.exp(jnp.where(age == 0, jnp.float32(0), power))
    return kept_per_block(fresh, of_elements=len(age) == leaf.size)
