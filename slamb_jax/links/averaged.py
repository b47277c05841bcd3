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
from slamb_jax.exchange.means import (
    Exchanged,
    exchange_means,
    means_over_workers,
)
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

    def like_leaves(tree: optax.Params) -> list[jax.Array]:
        return [row[2] for row in present(updates, tree, like=params)[0]]

    def arrived(there: Sequence[jax.Array], new: Sequence[jax.Array]) -> optax.Updates:
        whole = map_rows(Blocks.unpack, blocks, there, new)
        difference = functools.partial(_difference, exchange=exchange)
        return rebuild(map_rows(difference, whole, ps, us))

    def mean_of(ahead: Sequence[jax.Array]) -> tuple[Exchanged, optax.Params | None]:
        """The mean, normalized where that is asked for, and its new second moment."""
        found = exchange_means(
            ahead,
            leaves,
            exchange,
            exchange.average_payload,
            step,
            with_errors=exchange.keeps_average_error,
        )
        if nu is None:
            return found, None
        nus = like_leaves(nu)
        packed = map_rows(Blocks.pack, blocks, nus)
        means, packed = normalized(found.means, packed, leaves, blocks, exchange, skip)
        stored = rebuild(map_rows(Blocks.store, blocks, packed, nus))
        new_nu = keep_absent(stored, nu)
        if skip is not None:
            skip.follow(nu, new_nu)
        return found._replace(means=means), new_nu

    if anchor is None and not exchange.averages_in_codes:
        new = [_stepped(p, u, p.dtype, exchange) for u, p in zip(us, ps, strict=True)]
        packed = map_rows(Blocks.pack, blocks, new)
        means = means_over_workers(packed, leaves, exchange, None, step)
        return arrived(means, new), kept
    if anchor is None:  # the replicas are equal: their updates are what differs
        found, nu = mean_of([u.astype(jnp.float32) for u in us])
        moved = [m.astype(u.dtype) for m, u in zip(found.means, us, strict=True)]
        return rebuild(moved), Kept(None, None, nu)
    old = like_leaves(anchor)
    new = [_stepped(p, u, jnp.float32, exchange) for u, p in zip(us, ps, strict=True)]
    ahead = [x - a for x, a in zip(new, old, strict=True)]
    ahead = map_rows(Blocks.pack, blocks, ahead)
    found, nu = mean_of(ahead)
    if exchange.outer is None:
        bases, means = map_rows(Blocks.pack, blocks, old), found.means
    else:
        negative = rebuild([-m for m in found.means])
        grads = keep_absent(negative, optax.tree.zeros_like(anchor))
        outer_updates, outer_state = exchange.outer.update(grads, outer_state, anchor)
        bases, means = old, like_leaves(outer_updates)
    anchors = there = [a + m for a, m in zip(bases, means, strict=True)]
    if exchange.keeps_average_error:
        rest = [d - sent for d, sent in zip(ahead, found.sent, strict=True)]
        there = [a + x for a, x in zip(anchors, rest, strict=True)]
    stored = rebuild(map_rows(Blocks.store, blocks, anchors, old))
    anchor = unless(skip, anchor, keep_absent(stored, anchor))
    return arrived(there, new), Kept(anchor, outer_state, nu)


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
