"""The average of parameters in few bits: as differences to the last average."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from slamb_jax._tree.leaves import keep_absent, present
from slamb_jax.exchange.means import exchange_means
from slamb_jax.exchange.settings import Exchange


def copy_f32(p: Any) -> jax.Array:
    """A copy, since buffers may be donated; zeros for a ``ShapeDtypeStruct``."""
    if isinstance(p, jax.ShapeDtypeStruct):
        return jnp.zeros(p.shape, jnp.float32)
    return jnp.array(p, jnp.float32, copy=True)


def towards_anchor(
    updates: optax.Updates,
    params: optax.Params,
    anchor: optax.Params,
    exchange: Exchange,
    step: jax.Array,
) -> tuple[optax.Updates, optax.Params]:
    """The updates that take each replica near the new anchor, and that anchor."""
    rows, rebuild = present(
        updates, params, anchor, like=params, layout=exchange.layout
    )
    leaves, us, ps, anchors = ([row[i] for row in rows] for i in range(4))
    wide = [p.astype(jnp.float32) for p in ps]
    differences = [
        p + u.astype(jnp.float32) - a for p, u, a in zip(wide, us, anchors, strict=True)
    ]
    found = exchange_means(
        differences, leaves, exchange, exchange.average_payload, step, with_errors=True
    )
    new = [a + mean for a, mean in zip(anchors, found.means, strict=True)]
    steps = [
        (a + (d - sent) - p).astype(u.dtype)
        for a, d, sent, p, u in zip(new, differences, found.sent, wide, us, strict=True)
    ]
    return rebuild(steps), keep_absent(rebuild(new), anchor)
