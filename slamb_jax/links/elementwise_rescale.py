"""SLAMB's step of a stale coordinate, at the rate of a smaller batch."""

import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from slamb_jax._core import axes, checks
from slamb_jax._core.joining import ArrayRow, join_rows, spread_blocks
from slamb_jax._core.leaves import Leaf, chosen, next_step, present, unless
from slamb_jax._core.rounding import upcast_f32
from slamb_jax.exchange.selections import selection_at, unit_of_blocks
from slamb_jax.exchange.settings import Exchange, check_exchange
from slamb_jax.links.on_shards import on_shards


class ElementwiseRescaleState(NamedTuple):
    """State of :func:`elementwise_rescale`."""

    count: jax.Array  # type: ignore[assignment]  # int32, shape []


def elementwise_rescale(
    exchange: Exchange, *, b3: ArrayLike = 1.0
) -> optax.GradientTransformationExtraArgs:
    r"""Shortens the step of a coordinate that was not exchanged of late.

    With :math:`\tau` the steps since the exchange selected a coordinate, and n workers:

    .. math::

      r = \beta_3^\tau, \quad u \leftarrow \Big(r + \frac{1-r}{\sqrt n}\Big)\,u

    A fresh coordinate has the momentum of all workers, and steps at the rate of their
    batches together. A stale one has the worker's own, and steps at the rate of one
    batch, which is :math:`\sqrt n` times smaller. The age is computed from the step,
    and not stored.

    Use it by itself behind any direction, where workers step between exchanges by
    momenta of their own: behind :func:`mask_momentum` with ``optax.scale_by_sign()``,
    say. It bounds no step that the direction does not: Adam's of a coordinate of which
    others have a gradient, and the worker has none, is M / eps, so that eps should be
    1e-6 or more. Without a selection all coordinates are fresh, and u passes.

    Args:
      exchange: between whom, and which coordinates when: its ``selection``.
      b3: decay rate of a coordinate's freshness per step, in [0, 1]. 1: all coordinates
        count as fresh. The paper's are 0.93 to 0.999.

    Returns:
      A :class:`optax.GradientTransformationExtraArgs`, whose updates keep their dtype.

    Raises:
      ValueError: for a value out of range; in ``update``, for an unbound axis.

    Examples:
      >>> import jax, jax.numpy as jnp, slamb_jax
      >>> half = slamb_jax.selections.Strided(0.5, min_size=0)
      >>> exchange = slamb_jax.Exchange("data", payload=None, selection=half)
      >>> tx = slamb_jax.elementwise_rescale(exchange, b3=0.9)
      >>> step = lambda u: tx.update(u, tx.init(u))[0]
      >>> u = jnp.ones((4, 2, 4))  # of 4 workers; what is not fresh is rescaled
      >>> print(jax.vmap(step, axis_name="data")(u)[0])
      [[0.95 1.   1.   0.95]
       [1.   0.95 1.   0.95]]

    References:
      Xu et al., `SLAMB <https://proceedings.mlr.press/v202/xu23q.html>`_, ICML 2023,
      section 3: element-wise adaptive rescaling.
    """
    check_exchange(exchange)
    checks.check_range("b3", b3, 0.0, 1.0, holds=checks.NEAR_ONE)
    if exchange.selection is None and checks.known(b3) not in (None, 1.0):
        warnings.warn(
            f"elementwise_rescale(b3={b3!r}) does nothing without a selection",
            stacklevel=2,
        )

    def init(params: optax.Params) -> ElementwiseRescaleState:
        del params
        return ElementwiseRescaleState(jnp.zeros([], jnp.int32))

    def update(
        updates: optax.Updates,
        state: ElementwiseRescaleState,
        params: optax.Params | None = None,
        skip: jax.Array | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, ElementwiseRescaleState]:
        del extra_args
        step = next_step(state.count)
        # The workers whose batches are one large batch, not the devices of a group.
        n = axes.axis_size(exchange.axis_name)
        new = ElementwiseRescaleState(unless(skip, state.count, step))
        if exchange.selection is None:  # all is exchanged at every step, and fresh
            return updates, chosen(skip, new)
        like = updates if params is None else params
        at = selection_at(exchange, like, step)
        found, rebuild = present(updates, like=like, layout=exchange.layout)
        joined = join_rows(
            [ArrayRow(*row) for row in found],
            lambda leaf: None if n == 1 else unit_of_blocks(at, leaf),
        )

        def rescale(leaf: Leaf, u: jax.Array) -> jax.Array:
            if at is None or (age := at.age(leaf)) is None:
                return u
            r = freshness(age, b3)
            factor = spread_blocks(leaf, r + (1 - r) / n**0.5)
            wide = upcast_f32(u)
            return (factor.astype(wide.dtype) * wide).astype(u.dtype)

        (out,) = joined.split([rescale(*row) for row in joined.rows])
        return rebuild(out), chosen(skip, new)

    return on_shards(optax.GradientTransformationExtraArgs(init, update), exchange)


def freshness(age: jax.Array, b3: ArrayLike) -> jax.Array:
    r""":math:`r = \beta_3^\tau`, float32, one per block; exactly 1 where exchanged."""
    # exp, not pow, which takes a CPU five times as long.
    power = age.astype(jnp.float32) * jnp.log(jnp.asarray(b3, jnp.float32))
    return jnp.exp(jnp.where(age == 0, jnp.float32(0), power))
