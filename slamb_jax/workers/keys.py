"""Random keys kept in the state: one of its own for every worker."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from slamb_jax._rounding import hash_u32, hash_words
from slamb_jax.average import AverageParametersState
from slamb_jax.workers.mesh import is_key


def are_alike(tree: chex.ArrayTree) -> chex.ArrayTree:
    """For each leaf, whether it must begin equal on all workers: all but typed keys.

    An average's outer optimizer is run alike by all workers, with its keys.
    """

    def together(x: object) -> bool:
        return isinstance(x, AverageParametersState)

    def alike(part: Any) -> Any:
        return jax.tree.map(lambda x: together(part) or not is_key(x), part)

    return jax.tree.map(alike, tree, is_leaf=together)


def keys_of_workers(keys: jax.Array, workers: int) -> jax.Array:
    """Keys of any shape, folded with the number of each worker: (n, ...)."""
    numbers = jnp.arange(workers, dtype=jnp.uint32)
    fold = jax.vmap(jax.random.fold_in, in_axes=(0, None))  # over the keys
    own = jax.vmap(fold, in_axes=(None, 0))(keys.reshape(-1), numbers)
    return own.reshape(workers, *keys.shape)


def resized_words(words: np.ndarray, workers: int) -> np.ndarray:
    """The words of n keys that differ, for m workers, no two of which share a key."""
    n, new = len(words), []
    for j in range(workers):
        old = j * n // workers
        shared = j > 0 and (j - 1) * n // workers == old  # with the worker before
        own = words[old].astype(np.uint32)
        new.append(hash_u32(own, hash_words(j)) if shared else own)
    return np.stack(new)
