"""Which elements a selection exchanges, as the naive versions take them."""

import jax
import jax.numpy as jnp
import numpy as np

from slamb_jax.selections import Leaf


def masks_of(selection, shapes):
    """A function of the step: the masks as the naive version takes them."""
    dense = [selection.dense(Leaf(j, s)) for j, s in enumerate(shapes)]
    ages = jax.jit(
        lambda t: [
            None if dense[j] else selection.age(t, Leaf(j, shape))
            for j, shape in enumerate(shapes)
        ]
    )

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
