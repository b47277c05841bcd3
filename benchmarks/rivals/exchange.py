"""Means and gathers over workers for the rivals, their bytes, their shapes."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

import slamb_jax
from examples.common import optimizers
from slamb_jax.wire import RING_SHARES

Sends = Sequence[tuple[str, float]]  # kinds of collectives, bytes that a worker puts in
SCALE = 2.0**12  # of gradients in float16, whose least number is 6e-8
# Of each code of slamb_jax: coordinates to a byte, and those that share a scale in each
# of the columns of a block.
CODES = {"ternary": (5, 5), "uniform8": (1, 2), "uniform4": (2, 2)}
CODES |= {f"largest_of_{k}": (per, per) for k, per in ((7, 14), (31, 31), (127, 127))}


@dataclasses.dataclass(frozen=True)
class Rival:
    """An optimizer that exchanges by itself, and the collectives of its steps."""

    optimizer: optax.GradientTransformation
    sends: Callable[[Any, int, int], Sends]
    """Of the parameters, the number of workers and the step t = 1, 2, ..."""
    agreed: Callable[[int], bool] = lambda step: True
    """Whether all replicas are equal after step t."""


def mean(tree: Any, axis_name: str) -> Any:
    """Means over the workers of float32 leaves, in one exchange."""
    return slamb_jax.average_parameters(tree, axis_name)


def gather(tree: Any, axis_name: str) -> Any:
    """The leaves, all of one dtype, of all workers, (n, ...), in one all-gather."""
    flat, unravel = ravel_pytree(tree)
    return jax.vmap(unravel)(jax.lax.all_gather(flat, axis_name))


def scatter(values: jax.Array, places: jax.Array, size: int) -> jax.Array:
    """The sum over n workers of (n, chunks, k) values at places in chunks of a size."""
    chunks = values.shape[1]
    rows = jnp.arange(chunks, dtype=jnp.int32)[None, :, None]
    return jnp.zeros((chunks, size)).at[rows, places].add(values)


def wire_bytes(sends: Sends, workers: int) -> float:
    """Bytes that each worker sends for these collectives on a ring."""
    return math.fsum(RING_SHARES[kind](workers) * payload for kind, payload in sends)


def mean_sends(
    sizes: int | Sequence[int], workers: int, payload: str | None = None
) -> Sends:
    """The collectives of a mean of arrays of these sizes, in float32 or a payload.

    What is narrower than float32 is averaged by the owner of each slice.
    """
    each = (sizes,) if isinstance(sizes, int) else tuple(sizes)
    if payload is None:
        return [("all-reduce", 4 * sum(each))]
    if payload == "bfloat16":
        part = 2 * -(-sum(each) // workers)
    else:
        part = coded_slice(each, payload, workers)
    return [("all-to-all", workers * part), ("all-gather", part)]


def coded_slice(sizes: Sequence[int], payload: str, owners: int) -> int:
    """Bytes of an owner's slice of arrays in codes, scales of 4 bytes included.

    A block has 128 columns, fewer in a small array, and no elements of two arrays.
    Large arrays are cut into groups of 8 blocks, and a slice of 512 blocks or more is
    of whole groups.
    """
    per_byte, planes = CODES[payload]
    total = 0
    for columns, group, least, most in (
        (128, 8, 2**16, math.inf),
        (64, 1, 2**11, 2**16),
        (32, 1, 1, 2**11),
    ):
        chosen = (size for size in sizes if least <= size < most)
        groups = sum(-(-size // (columns * planes * group)) for size in chosen)
        blocks = -(-groups * group // owners)
        if blocks >= 512:
            blocks += -blocks % group
        total += blocks * (columns * planes // per_byte + 4)
    return total


def elements(params: Any) -> int:
    """The number of parameters, d."""
    return sum(math.prod(x.shape) for x in jax.tree.leaves(params))


def dense(optimizer: optax.GradientTransformation, axis_name: str) -> Rival:
    """The baseline: ``optimizer`` on mean gradients, in float32."""
    return Rival(
        optimizers.dense(optimizer, axis_name),
        lambda params, workers, _: mean_sends(elements(params), workers),
    )


def dense_bfloat16(
    optimizer: optax.GradientTransformation, axis_name: str, buckets: int = 1
) -> Rival:
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

    def sends(params: Any, *_: int) -> Sends:
        leaves = jax.tree.leaves(params)
        each = [sum(leaves[i].size for i in chosen) for chosen in parts(leaves)]
        return [("all-reduce", 2 * d) for d in each]

    return Rival(optax.chain(optax.stateless(mean), optimizer), sends)


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of a leaf as a matrix; one row for a vector.

    Of the cuts between two dimensions, the one that makes their sum smallest.
    """
    if len(shape) < 2:
        return 1, math.prod(shape)
    cuts = range(1, len(shape))
    both = [(math.prod(shape[:i]), math.prod(shape[i:])) for i in cuts]
    return min(both, key=sum)
