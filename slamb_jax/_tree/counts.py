"""Counts of steps."""

import jax
import jax.numpy as jnp
import numpy as np

_LAST, _GO_ON = np.int32(2**31 - 1), np.int32(2**30)


def next_step(count: jax.Array) -> jax.Array:
    """The number of the next step, of an int32 ``count`` of those before it.

    Behind the largest it goes on from 2**30, as large for every power of a decay rate:
    with a count that stood still the same coordinates would be exchanged for ever.
    """
    return jnp.where(count == _LAST, _GO_ON, count + np.int32(1))
