"""Divides what the workers agreed on by the root of its own second moment."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from slamb_jax import _collectives as collectives
from slamb_jax._ex.blocks import Blocks
from slamb_jax._leaves import Leaf
from slamb_jax._skip import Skip
from slamb_jax.exchange import Exchange

_LEAST = np.float32(0.1)  # a root counts as so much of its leaf's, at least


class Normalized(NamedTuple):
    """Result of :func:`normalized`, of one array for each leaf."""

    means: list[jax.Array]
    nus: list[jax.Array]
    nu_means: list[jax.Array]


def normalized(
    means: Sequence[jax.Array],
    nus: Sequence[jax.Array],
    nu_means: Sequence[jax.Array] | None,
    leaves: Sequence[Leaf],
    blocks: Sequence[Blocks],
    exchange: Exchange,
    skip: Skip | None,
) -> Normalized:
    """The packed means over their roots, and the second moments to keep.

    A root is relative to the root of its leaf's mean, so that the size of a step is
    left as it is. ``nu_means`` are those of the old ``nus``, where they are kept: then
    no pass over the new ones must end before the step can begin.
    """
    b2 = jnp.float32(exchange.average_b2)

    def blended(old: Sequence[jax.Array], new: Sequence[jax.Array]) -> list[jax.Array]:
        mixed = [b2 * x + (1 - b2) * y for x, y in zip(old, new, strict=True)]
        return mixed if skip is None else skip.instead(list(old), mixed)

    squares = [jnp.square(m) for m in means]
    nus = blended(nus, squares)
    if nu_means is None:
        nu_means = _of_leaves(nus, leaves, blocks)
    else:
        nu_means = blended(nu_means, _of_leaves(squares, leaves, blocks))
    out = []
    for mean, nu, whole in zip(means, nus, nu_means, strict=True):
        # Where all are 0 the mean is, too.
        root = jnp.sqrt(nu / jnp.maximum(whole, np.finfo(np.float32).tiny))
        out.append(mean * ((1 + _LEAST) / (root + _LEAST)))
    return Normalized(out, nus, nu_means)


def _of_leaves(
    xs: Sequence[jax.Array], leaves: Sequence[Leaf], blocks: Sequence[Blocks]
) -> list[jax.Array]:
    """The mean of each leaf's blocks of this step, over all of its shards."""
    pairs = [_sum_and_count(x, own) for x, own in zip(xs, blocks, strict=True)]
    return means_of_sums(pairs, leaves)


def means_of_sums(
    pairs: Sequence[tuple[jax.Array, jax.Array]], leaves: Sequence[Leaf]
) -> list[jax.Array]:
    """Means over all shards of each leaf, from a sum and a count on each of them."""
    sums: dict[int, tuple[jax.Array, jax.Array]] = {}
    for axes in dict.fromkeys(leaf.sharded for leaf in leaves):
        # By axes, so that no type varies over more of them than its leaf does.
        group = [i for i, leaf in enumerate(leaves) if leaf.sharded == axes]
        sums |= collectives.psum({i: pairs[i] for i in group}, axes)
    found = (sums[i] for i in range(len(leaves)))
    return [lax.div(total, jnp.maximum(count, np.float32(1))) for total, count in found]


def _sum_and_count(x: jax.Array, blocks: Blocks) -> tuple[jax.Array, jax.Array]:
    if blocks.starts is None:
        return jnp.sum(x), jnp.float32(x.size)
    used = jnp.broadcast_to(blocks.used[:, None], x.shape)
    count = jnp.sum(blocks.used.astype(jnp.float32)) * np.float32(blocks.block_size)
    return jnp.sum(jnp.where(used, x, np.float32(0))), count
