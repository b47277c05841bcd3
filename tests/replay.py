"""Recorded masks of the momentum, and the masks that a selection computes."""

import jax
import jax.numpy as jnp
import numpy as np

from slamb_jax.exchange.selections import Selection


class Replay(Selection):
    """Replays masks, bool (steps, leaf size) of each leaf, and then begins again.

    Step t takes row t - 1. A leaf whose masks are all true is dense.
    """

    def __init__(self, masks):
        self.masks = list(masks)

    def dense(self, leaf):
        return bool(self.masks[leaf.index].all())

    def blocks(self, step, leaf):
        masks = self.masks[leaf.index]
        table = np.full((len(masks), masks.sum(1).max()), leaf.size, np.int32)
        for row, mask in zip(table, masks, strict=True):
            row[: mask.sum()] = np.flatnonzero(mask)
        return jnp.asarray(table)[(step - 1) % len(masks)]

    def age(self, step, leaf):
        masks = jnp.asarray(self.masks[leaf.index])
        back = jnp.arange(len(masks))
        sent = masks[(step - 1 - back) % len(masks)]
        age = jnp.where(sent.any(0), jnp.argmax(sent, 0), step).astype(jnp.int32)
        return jnp.minimum(step, age)[:, None]


def mask_at(selection, leaf, t):
    """Which elements of a leaf are exchanged at a step."""
    if selection.dense(leaf):
        return np.ones(leaf.shape, bool)
    age = jax.jit(selection.age, static_argnums=1)(jnp.int32(t), leaf)
    fresh = np.asarray(age) == 0
    return np.repeat(fresh, leaf.size // len(age)).reshape(leaf.shape)
