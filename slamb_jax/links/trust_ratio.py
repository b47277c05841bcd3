"""LAMB's trust ratio, for the exchanged and for the other coordinates of a layer."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from slamb_jax._axes import axis_size
from slamb_jax._checks import check_params
from slamb_jax._ex.blocks import selection_at
from slamb_jax._leaves import Leaf, broadcast_blocks, mask_tree, present
from slamb_jax._rounding import next_step
from slamb_jax.exchange import Exchange, check_exchange
from slamb_jax.links.moments import Form, add_decay, batch_factor, decay_at, freshness
from slamb_jax.links.norms import LeafTerms, Ratios, check_ratio, clips, trust_ratios
from slamb_jax.links.shards import on_shards


class LayerwiseTrustRatioState(NamedTuple):
    """State of :func:`layerwise_trust_ratio`."""

    count: jax.Array  # type: ignore[assignment]  # int32, shape []


def layerwise_trust_ratio(
    exchange: Exchange,
    *,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Any = None,
    form: Form = "sum",
    c_min: ArrayLike = 0.01,
    c_max: ArrayLike = 1000.0,
) -> optax.GradientTransformationExtraArgs:
    r"""LAMB's trust ratio, one for what was exchanged and one for the rest.

    For each leaf with parameters p, direction u and exchanged coordinates M, decay
    :math:`\lambda`:

    **Product form.** Decay is inside the norms, :math:`u \leftarrow u + \lambda p`,

    .. math::

      \phi_{hi} = \frac{\|p[M]\|}{\|u[M]\|},\quad
      \phi_{lo} = \frac{\|p[\neg M]\|}{\|u[\neg M]\|},\quad
      u \leftarrow \operatorname{clip}(r\phi_{hi} + (1-r)\phi_{lo}, c_{min}, c_{max})\,u

    each ratio 1 where one of its norms is 0. A leaf of one dimension or none has
    :math:`u \leftarrow (\|p\|/\|u\|)\,u`, not clipped.

    **Sum form.** The ratios are taken before decay is added, :math:`\phi_{hi}` (1 for a
    norm of 0) clipped to :math:`[c_{min}, c_{max}]` and :math:`\phi_{lo}` (0 for a norm
    of 0) to :math:`[0, c_{max}]`, and with :math:`w = (1-r)/\sqrt n`

    .. math:: u \leftarrow \frac{r\phi_{hi} + w\phi_{lo}}{r + w} (u + \lambda p)

    so that :func:`elementwise_rescale`, which multiplies by r + w, completes the
    published sum :math:`(r\phi_{hi} + w\phi_{lo})(u + \lambda p)`.

    Args:
      exchange: which coordinates are exchanged when, between whom, and how fast their
        freshness :math:`r = \beta_3^\tau` decays. Norms are summed over the mesh axes
        of its ``param_specs``; each layer of a leaf in ``stacked`` has its own ratios.
      weight_decay: :math:`\lambda`, not negative, or a schedule of the step from 0.
      mask: which leaves decay, as in ``optax.add_decayed_weights``: a tree of bools
        with the structure of the parameters or a prefix of it, or a function of the
        parameters that returns one. None: all.
      form: ``"sum"`` or ``"product"``.
      c_min: lower bound of the ratio, not negative.
      c_max: upper bound of the ratio, at least ``c_min``; may be infinite.

    Returns:
      A :class:`optax.GradientTransformationExtraArgs`; it needs ``params``. Norms and
      updates are float32.

    Raises:
      ValueError: for a value out of range; in ``update``, without ``params``.

    Examples:
      >>> import jax.numpy as jnp, slamb_jax
      >>> tx = slamb_jax.layerwise_trust_ratio(slamb_jax.Exchange(), form="product")
      >>> params = jnp.array([3.0, 4.0])
      >>> updates, _ = tx.update(jnp.array([1.0, 0.0]), tx.init(params), params)
      >>> print(updates)
      [5. 0.]

    References:
      Xu et al., `SLAMB <https://proceedings.mlr.press/v202/xu23q.html>`_, ICML 2023;
      You et al., `Large Batch Optimization for Deep Learning
      <https://arxiv.org/abs/1904.00962>`_, 2019.
    """
    check_exchange(exchange)
    check_ratio(weight_decay, mask, form, c_min, c_max)

    def init(params: optax.Params) -> LayerwiseTrustRatioState:
        del params
        return LayerwiseTrustRatioState(jnp.zeros([], jnp.int32))

    def update(
        updates: optax.Updates,
        state: LayerwiseTrustRatioState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, LayerwiseTrustRatioState]:
        del extra_args
        check_params(params)
        step = next_step(state.count)
        n = axis_size(exchange.axis_name)
        bounds = clips(c_min, c_max)
        at_step = selection_at(exchange, params, step)
        decay = decay_at(weight_decay, state.count)
        rows, rebuild = present(
            updates, params, mask_tree(mask, params),
            like=params, layout=exchange.layout,
        )  # fmt: skip

        def direction(decays: bool) -> Callable[[jax.Array, jax.Array], jax.Array]:
            return lambda p, u: add_decay(p, u, decay if decays else None)

        def term(leaf: Leaf, u: jax.Array, p: jax.Array, decays: bool) -> LeafTerms:
            normed = direction(decays and form == "product")
            wide = p.astype(jnp.float32), u.astype(jnp.float32)
            return LeafTerms(leaf, at_step.age(leaf), normed, wide[0], wide[1:])

        def scale(term: LeafTerms, ratios: Ratios, decays: bool) -> jax.Array:
            ratio = ratios.fresh
            if term.age is not None:
                r = freshness(term.age, exchange.b3, term.leaf)
                ratio = ratios.blend(form, r, n, bounds)
                if form == "sum":
                    ratio = ratio / batch_factor(r, n)
            u = direction(decays)(term.p, *term.rest)
            return broadcast_blocks(ratio, term.leaf) * u

        terms = [term(*row) for row in rows]
        found = trust_ratios(terms, at_step, form, bounds)
        out = [
            scale(term, ratios, decays)
            for term, ratios, (*_, decays) in zip(terms, found, rows, strict=True)
        ]
        return rebuild(out), LayerwiseTrustRatioState(step)

    tx = optax.GradientTransformationExtraArgs(init, update)
    return tx if exchange.param_specs is None else on_shards(tx, exchange)
