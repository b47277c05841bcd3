"""One average of the parameters: of all of them, or of those whose turn it is."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from slamb_jax._tree.leaves import Leaf, keep_absent, leaves_of, present
from slamb_jax._tree.skip import Skip, unless
from slamb_jax.exchange.blocks import Blocks, SelectionAtStep, map_rows
from slamb_jax.exchange.means import exchange_means, means_over_workers
from slamb_jax.exchange.settings import Exchange
from slamb_jax.links.normalized import normalized


class Kept(NamedTuple):
    """What is kept from one average to the next, the same on all workers."""

    anchor: optax.Params | None  # the last average
    outer: optax.OptState | None
    nu: optax.Params | None  # second moment of the mean differences


def averaged(
    updates: optax.Updates,
    params: optax.Params,
    kept: Kept,
    exchange: Exchange,
    step: jax.Array,
    skip: Skip | None,
) -> tuple[optax.Updates, Kept]:
    """The updates that take each replica to the average, and what is kept of it."""
    anchor, outer_state, nu = kept
    rows, rebuild = present(updates, params, like=params, layout=exchange.layout)
    leaves, us, ps = ([row[i] for row in rows] for i in range(3))
    blocks = _blocks(leaves, params, exchange, step)
    difference = functools.partial(_difference, exchange=exchange)
    if anchor is None:
        new = [_stepped(p, u, p.dtype, exchange) for u, p in zip(us, ps, strict=True)]
        packed = map_rows(Blocks.pack, blocks, new)
        means = means_over_workers(packed, leaves, exchange, None, step)
        there = map_rows(Blocks.unpack, blocks, means, new)
        return rebuild(map_rows(difference, there, ps, us)), kept

    def like_leaves(tree: optax.Params) -> list[jax.Array]:
        return [row[2] for row in present(updates, tree, like=params)[0]]

    old = like_leaves(anchor)
    new = [_stepped(p, u, jnp.float32, exchange) for u, p in zip(us, ps, strict=True)]
    ahead = map_rows(
        Blocks.pack, blocks, [x - a for x, a in zip(new, old, strict=True)]
    )
    found = exchange_means(
        ahead, leaves, exchange, exchange.average_payload, step, with_errors=True
    )
    means = found.means
    if nu is not None:
        nus = like_leaves(nu)
        packed = map_rows(Blocks.pack, blocks, nus)
        means, packed = normalized(means, packed, leaves, blocks, exchange)
        stored = rebuild(map_rows(Blocks.store, blocks, packed, nus))
        nu = unless(skip, nu, keep_absent(stored, nu))
    if exchange.outer is None:
        bases = map_rows(Blocks.pack, blocks, old)
    else:
        grads = keep_absent(rebuild([-m for m in means]), optax.tree.zeros_like(anchor))
        moved, outer_state = exchange.outer.update(grads, outer_state, anchor)
        bases, means = old, like_leaves(moved)
    anchors = [a + m for a, m in zip(bases, means, strict=True)]
    there = [
        a + (d - sent) for a, d, sent in zip(anchors, ahead, found.sent, strict=True)
    ]
    there = map_rows(Blocks.unpack, blocks, there, new)
    stored = rebuild(map_rows(Blocks.store, blocks, anchors, old))
    anchor = unless(skip, anchor, keep_absent(stored, anchor))
    updates = rebuild(map_rows(difference, there, ps, us))
    return updates, Kept(anchor, outer_state, nu)


def _blocks(
    leaves: Sequence[Leaf], params: optax.Params, exchange: Exchange, step: jax.Array
) -> list[Blocks]:
    """The blocks of each leaf that are averaged."""
    if not exchange.in_turn:
        return [Blocks(1, None, jnp.ones(0, bool))] * len(leaves)
    selection = exchange.average_selection(leaves_of(params, exchange.layout))
    at_step = SelectionAtStep(selection, step)
    return [at_step.blocks(leaf) for leaf in leaves]


def _stepped(
    p: jax.Array, u: jax.Array, dtype: DTypeLike, exchange: Exchange
) -> jax.Array:
    """What is averaged: the parameters behind this step, or before it."""
    p = p.astype(dtype)
    return p if exchange.overlap else p + u.astype(dtype)


def _difference(
    there: jax.Array, p: jax.Array, u: jax.Array, exchange: Exchange
) -> jax.Array:
    """The update from p to there, and with ``overlap`` this step's, in u's dtype."""
    wide = jnp.float32 if p.dtype.itemsize < 4 else p.dtype
    moved = there.astype(wide) - p.astype(wide)
    return (moved + u.astype(wide) if exchange.overlap else moved).astype(u.dtype)
