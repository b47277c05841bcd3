"""Recorded masks of the momentum, and the masks that a selection computes."""

import jax
import jax.numpy as jnp
import numpy as np

from slamb_jax.selections import Leaf, Selection


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


def masks_of(selection, shapes):
    """A function of the step: the masks as the naive version takes them."""
    leaves = [Leaf(j, s) for j, s in enumerate(shapes)]
    dense = [selection.dense(leaf) for leaf in leaves]

    @jax.jit
    def ages(t):
        pairs = zip(leaves, dense, strict=True)
        return [None if whole else selection.age(t, leaf) for leaf, whole in pairs]

    def masks(t):
        return [
            np.ones(shape, bool) if age is None else of_elements(age, shape)
            for age, shape in zip(ages(jnp.int32(t)), shapes, strict=True)
        ]

    return masks


def of_elements(age, shape):
    """Which elements are exchanged, from the ages of blocks."""
    blocks = np.asarray(age) == 0
    size = int(np.prod(shape))
    return np.broadcast_to(blocks, (len(blocks), size // len(blocks))).reshape(shape)
