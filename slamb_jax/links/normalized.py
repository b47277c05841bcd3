"""Divides what the workers agreed on by the root of its own second moment."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from slamb_jax._tree.leaves import Leaf
from slamb_jax._tree.skip import Skip
from slamb_jax.exchange import collectives
from slamb_jax.exchange.blocks import Blocks
from slamb_jax.exchange.settings import Exchange

_LEAST = np.float32(0.1)  # a root counts as so much of its leaf's, at least


def normalized(
    means: Sequence[jax.Array],
    nus: Sequence[jax.Array],
    leaves: Sequence[Leaf],
    blocks: Sequence[Blocks],
    exchange: Exchange,
    skip: Skip | None,
) -> tuple[list[jax.Array], list[jax.Array]]:
    """The packed means over their roots, and the second moments to keep.

    A root is relative to the root of its leaf's mean, so that the size of a step is
    left as it is.
    """
    b2 = jnp.float32(exchange.average_b2)
    new = [b2 * nu + (1 - b2) * jnp.square(m) for nu, m in zip(nus, means, strict=True)]
    if skip is not None:
        new = skip.instead(list(nus), new)
    new = list(map(_computed_once, new))
    out = []
    typical = _of_leaves(new, leaves, blocks)
    for mean, nu, whole in zip(means, new, typical, strict=True):
        # Where all are 0 the mean is, too.
        root = jnp.sqrt(nu / jnp.maximum(whole, np.finfo(np.float32).tiny))
        out.append(mean * ((1 + _LEAST) / (root + _LEAST)))
    return out, new


def _computed_once(nu: jax.Array) -> jax.Array:
    """Where it is used, a GPU would compute it again from the old, which it copies.

    Each by itself: a barrier joins the types of what stands in front of it.
    """
    barrier = lax.optimization_barrier
    return lax.platform_dependent(nu, cuda=barrier, rocm=barrier, default=lambda x: x)


def _of_leaves(
    nus: Sequence[jax.Array], leaves: Sequence[Leaf], blocks: Sequence[Blocks]
) -> list[jax.Array]:
    """The mean of each leaf's blocks of this step, over all of its shards."""
    sums: dict[int, jax.Array] = {}
    for axes in dict.fromkeys(leaf.sharded for leaf in leaves):
        # By axes, so that no type varies over more of them than its leaf does.
        group = [i for i, leaf in enumerate(leaves) if leaf.sharded == axes]
        found = {i: _sum_and_count(nus[i], blocks[i]) for i in group}
        sums |= collectives.psum(found, axes)
    return [lax.div(*sums[i]) for i in range(len(leaves))]


def _sum_and_count(nu: jax.Array, blocks: Blocks) -> tuple[jax.Array, jax.Array]:
    if blocks.starts is None:
        return jnp.sum(nu), jnp.float32(nu.size)
    used = jnp.broadcast_to(blocks.used[:, None], nu.shape)
    count = jnp.sum(blocks.used.astype(jnp.float32)) * np.float32(blocks.block_size)
    return jnp.sum(jnp.where(used, nu, np.float32(0))), count
