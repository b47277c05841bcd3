"""LAMB's trust ratio of each layer, where all workers take the same step."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import ArrayLike

from slamb_jax._core.checks import check_params
from slamb_jax._core.leaves import Leaf, mask_tree, present
from slamb_jax._core.moments import Form, add_decay, check_ratio, init_decay, step_decay
from slamb_jax.exchange import collectives as _collectives
from slamb_jax.exchange.settings import Exchange, check_exchange
from slamb_jax.links.on_shards import on_shards

Squares = tuple[jax.Array, jax.Array]  # squared norms of p and u, one per layer


class LayerwiseTrustRatioState(NamedTuple):
    """State of :func:`layerwise_trust_ratio` with a schedule of the decay."""

    count: jax.Array  # type: ignore[assignment]  # int32, shape []


def layerwise_trust_ratio(
    exchange: Exchange,
    *,
    weight_decay: optax.ScalarOrSchedule = 0.0,
    mask: Any = None,
    form: Form = "product",
    c_min: ArrayLike = 0.01,
    c_max: ArrayLike = 1000.0,
) -> optax.GradientTransformationExtraArgs:
    r"""Scales each layer's update to the norm of its parameters, as LAMB does.

    With parameters p, direction u and decay :math:`\lambda`:

    .. math::

      u &\leftarrow u + \lambda p, \quad
      u \leftarrow \operatorname{clip}(\|p\| / \|u\|, c_{min}, c_{max})\,u
      \quad\text{(product form)} \\
      u &\leftarrow \operatorname{clip}(\|p\| / \|u\|, c_{min}, c_{max})
        (u + \lambda p) \quad\text{(sum form)}

    The ratio is 1 where one of its norms is 0. In the product form the ratio of a leaf
    of one dimension or none is not clipped. ``optax.scale_by_trust_ratio`` has one
    ratio for a stack of scanned layers, and takes the norms of shards.

    Args:
      exchange: norms are summed over the mesh axes of its ``param_specs``; each layer
        of a leaf in ``stacked`` has its own ratio.
      weight_decay: :math:`\lambda`, not negative, or a schedule of the step from 0.
      mask: which leaves decay, as in ``optax.add_decayed_weights``: a tree of bools
        with the structure of the parameters or a prefix of it, or a function of the
        parameters that returns one. None: all.
      form: ``"product"`` or ``"sum"``.
      c_min: lower bound of the ratio, not negative.
      c_max: upper bound of the ratio, at least ``c_min``; may be infinite.

    Returns:
      A :class:`optax.GradientTransformationExtraArgs`; it needs ``params``. Norms and
      updates are float32.

    Raises:
      ValueError: for a value out of range; in ``update``, without ``params``.

    Examples:
      >>> import jax.numpy as jnp, slamb_jax
      >>> tx = slamb_jax.layerwise_trust_ratio(slamb_jax.Exchange())
      >>> params = jnp.array([3.0, 4.0])
      >>> updates, _ = tx.update(jnp.array([1.0, 0.0]), tx.init(params), params)
      >>> print(updates)
      [5. 0.]

    References:
      You et al., `Large Batch Optimization for Deep Learning
      <https://arxiv.org/abs/1904.00962>`_, 2019; Xu et al., `SLAMB
      <https://proceedings.mlr.press/v202/xu23q.html>`_, ICML 2023: the two forms.
    """
    check_exchange(exchange)
    check_ratio(weight_decay, mask, form, c_min, c_max)
    bounds = jnp.asarray(c_min, jnp.float32), jnp.asarray(c_max, jnp.float32)

    def init(params: optax.Params) -> optax.OptState:
        del params
        return init_decay(weight_decay, LayerwiseTrustRatioState)

    def update(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        del extra_args
        check_params(params)
        decay, state = step_decay(weight_decay, state)
        rows, rebuild = present(
            updates, params, mask_tree(mask, params),
            like=params, layout=exchange.layout,
        )  # fmt: skip
        leaves = [leaf for leaf, *_ in rows]
        ps = [p.astype(jnp.float32) for _, _, p, _ in rows]
        rates = [decay if decays else None for *_, decays in rows]
        us = [u.astype(jnp.float32) for _, u, *_ in rows]
        decayed = list(map(add_decay, ps, us, rates))
        normed = decayed if form == "product" else us
        squares = list(map(squares_of, leaves, ps, normed))
        sums = _collectives.psum_each(squares, [leaf.axes for leaf in leaves])
        out = []
        for leaf, u, of_leaf in zip(leaves, decayed, sums, strict=True):
            ratio = ratio_of(*of_leaf, otherwise=1.0)
            if form == "sum" or len(leaf.layer_shape) > 1:
                ratio = jnp.clip(ratio, *bounds)
            out.append(per_layer(ratio, leaf) * u)
        return rebuild(out), state

    tx = optax.GradientTransformationExtraArgs(init, update)
    return tx if exchange.param_specs is None else on_shards(tx, exchange)


def squares_of(leaf: Leaf, p: jax.Array, u: jax.Array) -> Squares:
    """Squared norms of the parameters and the direction, of each layer of a stack."""
    over = tuple(range(1, p.ndim)) if leaf.stacked else None
    return jnp.sum(jnp.square(p), over), jnp.sum(jnp.square(u), over)


def ratio_of(p: jax.Array, u: jax.Array, *, otherwise: float) -> jax.Array:
    """Root of p over u; ``otherwise`` where one of them is 0."""
    # In lax: tracing the ratios of many layers in jnp takes as long as compiling them.
    zero, other = jnp.float32(0), jnp.float32(otherwise)
    ratio = lax.div(lax.sqrt(p), lax.sqrt(u))
    if p.ndim:
        return jnp.where(lax.min(p, u) > zero, ratio, other)
    return lax.select(lax.gt(lax.min(p, u), zero), ratio, other)


def per_layer(x: jax.Array, leaf: Leaf) -> jax.Array:
    """One value per layer, broadcast to the layers of a stack; a scalar as it is."""
    if not leaf.stacked:
        return x
    return x.reshape(-1, *(1,) * (len(leaf.shape) - 1))
