"""The baselines: optimizers on gradients that are averaged whole."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

from examples.common.optimizers import dense as dense

SCALE = 2.0**12  # of gradients in float16, whose least number is 6e-8


def dense_bfloat16(
    optimizer: optax.GradientTransformation, axis_name: str, buckets: int = 1
) -> optax.GradientTransformation:
    """What is usual: ``optimizer`` on the mean of gradients in bfloat16.

    They are summed in float16, times a scale, in as many bytes: XLA's CPU backend
    widens an all-reduce of bfloat16. Of several ``buckets`` of leaves, some can be
    exchanged before the last gradient is known.
    """

    def parts(leaves: Sequence[Any]) -> list[list[int]]:
        ends = np.cumsum([x.size for x in leaves])
        bucket = (ends - 1) * buckets // ends[-1]
        return [np.flatnonzero(bucket == i).tolist() for i in np.unique(bucket)]

    def mean(grads: Any, _: Any) -> Any:
        leaves, treedef = jax.tree.flatten(grads)
        for chosen in parts(leaves):
            flat, unravel = ravel_pytree([leaves[i] for i in chosen])
            rounded = SCALE * flat.astype(jnp.bfloat16).astype(jnp.float32)
            total = jax.lax.pmean(rounded.astype(jnp.float16), axis_name)
            means = unravel(total.astype(flat.dtype) / SCALE)
            for i, x in zip(chosen, means, strict=True):
                leaves[i] = x
        return jax.tree.unflatten(treedef, leaves)

    return optax.chain(optax.stateless(mean), optimizer)


def elements(params: Any) -> int:
    """The number of parameters, d."""
    return sum(math.prod(x.shape) for x in jax.tree.leaves(params))
