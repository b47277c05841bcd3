"""The baselines: optimizers on gradients that are averaged whole."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from examples.common.optimizers import dense as dense

SCALE = 2.0**12  # of gradients in float16, whose least number is 6e-8


def dense_bfloat16(
    optimizer: optax.GradientTransformation, axis_name: str
) -> optax.GradientTransformation:
    """What is usual: ``optimizer`` on the mean of gradients in bfloat16.

    They are summed in float16, times a scale, in as many bytes: XLA's CPU backend
    widens an all-reduce of bfloat16.
    """

    def mean(grads: Any, _: Any) -> Any:
        flat, unravel = ravel_pytree(grads)
        rounded = SCALE * flat.astype(jnp.bfloat16).astype(jnp.float32)
        total = jax.lax.pmean(rounded.astype(jnp.float16), axis_name)
        return unravel(total.astype(flat.dtype) / SCALE)

    return optax.chain(optax.stateless(mean), optimizer)


def elements(params: Any) -> int:
    """The number of parameters, d."""
    return sum(math.prod(x.shape) for x in jax.tree.leaves(params))
