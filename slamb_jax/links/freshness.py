"""Element-wise adaptive rescaling: stale coordinates step at a smaller rate."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from slamb_jax._axes import axis_size
from slamb_jax._ex.blocks import selection_at
from slamb_jax._leaves import Leaf, broadcast_blocks, map_numbered
from slamb_jax._rounding import next_step
from slamb_jax.exchange import Exchange, check_exchange
from slamb_jax.links.moments import batch_factor, freshness
from slamb_jax.links.shards import on_shards


class ElementwiseRescaleState(NamedTuple):
    """State of :func:`elementwise_rescale`."""

    count: jax.Array  # type: ignore[assignment]  # int32, shape []


def elementwise_rescale(
    exchange: Exchange,
) -> optax.GradientTransformationExtraArgs:
    r"""Steps a stale coordinate at the rate of a smaller batch.

    .. math::

      u \leftarrow \left(r + \frac{1 - r}{\sqrt n}\right) u, \qquad r = \beta_3^\tau

    with n workers and :math:`\tau` the steps since the coordinate was exchanged: 1
    for a fresh coordinate, towards :math:`1/\sqrt n` as it ages. The same in both
    forms; with one worker it is the identity.

    Args:
      exchange: which coordinates are exchanged when, between whom, and how fast their
        freshness decays (``b3``).

    Returns:
      A :class:`optax.GradientTransformationExtraArgs`. Updates have the dtype of the
      parameters if ``update`` gets them, else their own.

    Raises:
      ValueError: in ``update``, for an unbound axis.

    Examples:
      >>> import jax, jax.numpy as jnp, slamb_jax
      >>> exchange = slamb_jax.Exchange("i", compress_ratio=0.5, min_size=0, b3=0.0)
      >>> tx = slamb_jax.elementwise_rescale(exchange)
      >>> def step(u):
      ...     return tx.update(u, tx.init(u))[0]
      >>> scaled = jax.vmap(step, axis_name="i")(jnp.ones((4, 2, 1)))
      >>> sorted(scaled[0].reshape(-1).tolist())  # one was exchanged; four workers
      [0.5, 1.0]

    References:
      Xu et al., `SLAMB <https://proceedings.mlr.press/v202/xu23q.html>`_, ICML 2023:
      element-wise adaptive rescaling.
    """
    check_exchange(exchange)

    def init(params: optax.Params) -> ElementwiseRescaleState:
        del params
        return ElementwiseRescaleState(jnp.zeros([], jnp.int32))

    def update(
        updates: optax.Updates,
        state: ElementwiseRescaleState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, ElementwiseRescaleState]:
        del extra_args
        step = next_step(state.count)
        n = axis_size(exchange.axis_name)
        like = updates if params is None else params
        at_step = selection_at(exchange, like, step)

        def rescale(leaf: Leaf, u: jax.Array, p: jax.Array) -> jax.Array:
            if n > 1 and (age := at_step.age(leaf)) is not None:
                factor = broadcast_blocks(
                    batch_factor(freshness(age, exchange.b3, leaf), n), leaf
                )
                u = factor * u.astype(jnp.float32)
            return u.astype(p.dtype)

        u = map_numbered(rescale, updates, like, like=params, layout=exchange.layout)
        return u, ElementwiseRescaleState(step)

    tx = optax.GradientTransformationExtraArgs(init, update)
    return tx if exchange.param_specs is None else on_shards(tx, exchange)
