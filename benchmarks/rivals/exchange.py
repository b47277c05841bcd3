"""The rivals' collectives, what they cost on a ring, and views of parameters."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from slamb_jax._collectives import mean_over


def mean(tree: Any, axis_name: str) -> Any:
    """Means over the workers, in the dtype of each leaf, in one exchange."""
    leaves, treedef = jax.tree.flatten(tree)
    return jax.tree.unflatten(treedef, mean_over(leaves, axis_name))


def gather(x: jax.Array, axis_name: str) -> jax.Array:
    """``x`` of all workers, (n, ...)."""
    return jax.lax.all_gather(x, axis_name)


def deal(x: jax.Array, axis_name: str) -> jax.Array:
    """Row i of each worker's x (n, ...), on worker i."""
    return jax.lax.all_to_all(x, axis_name, split_axis=0, concat_axis=0)


def all_reduce_bytes(payload: float, workers: int) -> float:
    """Bytes each worker sends to all-reduce a payload: 2 (n-1)/n of it."""
    return 2 * (workers - 1) / workers * payload


def all_gather_bytes(payload: float, workers: int) -> float:
    """Bytes each worker sends to all-gather payloads of that size: n-1 of them."""
    return (workers - 1) * payload


def all_to_all_bytes(payload: float, workers: int) -> float:
    """Bytes each worker sends to deal out a payload: (n-1)/n of it."""
    return (workers - 1) / workers * payload


def elements(params: Any) -> int:
    """The number of parameters, d."""
    return sum(math.prod(x.shape) for x in jax.tree.leaves(params))


def flatten(tree: Any) -> jax.Array:
    """All leaves in one float32 vector."""
    leaves = [x.reshape(-1).astype(jnp.float32) for x in jax.tree.leaves(tree)]
    return jnp.concatenate(leaves)


def unflatten(flat: jax.Array, like: Any) -> Any:
    """The vector's leading elements as a tree like ``like``, float32."""
    leaves, treedef = jax.tree.flatten(like)
    out, start = [], 0
    for x in leaves:
        out.append(flat[start : start + x.size].reshape(x.shape))
        start += x.size
    return jax.tree.unflatten(treedef, out)


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of a leaf as a matrix: the cut between dimensions that makes
    their sum smallest; one row for a vector."""
    if len(shape) < 2:
        return 1, math.prod(shape)
    cuts = range(1, len(shape))
    both = [(math.prod(shape[:i]), math.prod(shape[i:])) for i in cuts]
    return min(both, key=sum)
