"""The rivals' collectives, what they cost on a ring, and views of parameters."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from slamb_jax import Quantizer
from slamb_jax._collectives import mean_over

Sends = list[tuple[str, float]]  # the kinds of collectives, and bytes put in


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


def wire_bytes(sends: Sends, workers: int) -> float:
    """Bytes each worker sends for these collectives, by the ring convention."""
    n = workers
    shares = {
        "all-reduce": 2 * (n - 1) / n,
        "all-gather": n - 1,
        "all-to-all": (n - 1) / n,
    }
    return math.fsum(shares[kind] * payload for kind, payload in sends)


def mean_sends(elements: int, workers: int, payload: Any = None) -> Sends:
    """What a mean of that many elements sends, in a dtype or a quantizer's codes."""
    mine = -(-elements // workers)
    if isinstance(payload, Quantizer):
        there, back = payload.nbytes(mine), payload.for_means.nbytes(mine)
    elif jnp.dtype(payload or jnp.float32).itemsize == 4:
        return [("all-reduce", 4 * elements)]
    else:
        there = back = 2 * mine
    return [("all-to-all", workers * there), ("all-gather", back)]


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
