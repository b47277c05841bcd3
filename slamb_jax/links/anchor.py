"""The average of parameters in few bits: as differences to the last average."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from slamb_jax._tree.leaves import is_none
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
    treedef: Any
    us, treedef = jax.tree.flatten(updates, is_leaf=is_none)
    ps, anchors = treedef.flatten_up_to(params), treedef.flatten_up_to(anchor)
    here = [i for i, u in enumerate(us) if u is not None]
    wide = {i: ps[i].astype(jnp.float32) for i in here}
    differences = [wide[i] + us[i].astype(jnp.float32) - anchors[i] for i in here]
    found = exchange_means(
        differences, exchange, exchange.average_payload, step, with_errors=True
    )
    rows = zip(here, differences, found.means, found.sent, strict=True)
    for i, d, mean, sent in rows:
        anchors[i] = anchors[i] + mean
        us[i] = (anchors[i] + (d - sent) - wide[i]).astype(us[i].dtype)
    return treedef.unflatten(us), treedef.unflatten(anchors)
