"""Weight decay: its rate at a step, and which parameters it applies to."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from slamb_jax._tree.checks import check_bools
from slamb_jax._tree.layout import broadcast_prefix


def decay_at(
    weight_decay: optax.ScalarOrSchedule, count: jax.Array
) -> jax.Array | None:
    """The rate at a step counted from 0; None where it is the constant 0."""
    if isinstance(weight_decay, int | float) and weight_decay == 0:
        return None
    decay = weight_decay(count) if callable(weight_decay) else weight_decay
    return jnp.asarray(decay, jnp.float32)


def decay_mask(mask: Any, params: optax.Params) -> optax.Params:
    """A mask (a tree, a prefix of it or a function) as one bool per parameter."""
    tree = mask(params) if callable(mask) else True if mask is None else mask
    check_bools("mask", tree)
    return broadcast_prefix("mask", tree, params)


def add_decay(p: jax.Array, u: jax.Array, decay: jax.Array | None) -> jax.Array:
    """``u`` with decay added, if there is any."""
    return u if decay is None else u + decay * p
