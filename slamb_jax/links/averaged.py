"""One average of the parameters: of all of them, or of those whose turn it is."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from slamb_jax._ex.blocks import Blocks, SelectionAtStep, map_rows
from slamb_jax._ex.means import (
    Exchanged,
    exchange_means,
    means_over_workers,
)
from slamb_jax._leaves import Leaf, keep_absent, leaves_of, present
from slamb_jax._skip import Skip, unless
from slamb_jax.exchange import Exchange
from slamb_jax.links.normalized import normalized


class Kept(NamedTuple):
    """What is kept from one average to the next, the same on all workers."""

    anchor: optax.Params | None  # the last average
    outer: optax.OptState | None
    nu: optax.Params | None  # second moment of the mean differences
    nu_mean: optax.Params | None  # its mean over each leaf, where all are averaged


def averaged(
    updates: optax.Updates,
    params: optax.Params,
    kept: Kept,
    exchange: Exchange,
    step: jax.Array,
    skip: Skip | None,
) -> tuple[optax.Updates, Kept]:
    """The updates that take each replica to the average, and what is kept of it."""
    average = _Average(updates, params, exchange, step, skip)
    if kept.anchor is not None:
        return average.from_anchor(kept)
    if exchange.averages_in_codes:
        return average.of_updates(kept)
    return average.of_parameters(), kept


class _Average:
    """The three ways to average, each in lists of one array for each leaf."""

    def __init__(
        self,
        updates: optax.Updates,
        params: optax.Params,
        exchange: Exchange,
        step: jax.Array,
        skip: Skip | None,
    ) -> None:
        self._updates, self._params, self._exchange = updates, params, exchange
        self._step, self._skip = step, skip
        layout = exchange.layout
        rows, self._rebuild = present(updates, params, like=params, layout=layout)
        self._leaves: list[Leaf] = [leaf for leaf, _, _ in rows]
        self._us = [u for _, u, _ in rows]
        self._ps = [p for _, _, p in rows]
        self._blocks = self._blocks_of_step()

    def of_parameters(self) -> optax.Updates:
        """The mean of the parameters themselves."""
        new = self._stepped([p.dtype for p in self._ps])
        packed = self._pack(new)
        means = means_over_workers(
            packed, self._leaves, self._exchange, None, self._step
        )
        return self._arrived(means, new)

    def of_updates(self, kept: Kept) -> tuple[optax.Updates, Kept]:
        """Where the replicas are equal, their updates are what differs."""
        found, kept = self._mean([u.astype(jnp.float32) for u in self._us], kept)
        moved = [m.astype(u.dtype) for m, u in zip(found.means, self._us, strict=True)]
        return self._rebuild(moved), kept

    def from_anchor(self, kept: Kept) -> tuple[optax.Updates, Kept]:
        """The mean difference to the last average, added to it."""
        exchange = self._exchange
        old = self._arrays(kept.anchor)
        new = self._stepped([jnp.float32] * len(old))
        ahead = self._pack([x - a for x, a in zip(new, old, strict=True)])
        found, kept = self._mean(ahead, kept)
        if exchange.outer is None:
            bases, means = self._pack(old), found.means
        else:
            negative = self._rebuild([-m for m in found.means])
            grads = keep_absent(negative, optax.tree.zeros_like(kept.anchor))
            steps, outer = exchange.outer.update(grads, kept.outer, kept.anchor)
            kept = kept._replace(outer=outer)
            bases, means = old, self._arrays(steps)
        anchors = there = [a + m for a, m in zip(bases, means, strict=True)]
        if exchange.keeps_average_error:
            rest = [d - sent for d, sent in zip(ahead, found.sent, strict=True)]
            there = [a + x for a, x in zip(anchors, rest, strict=True)]
        stored = self._stored(anchors, old, kept.anchor)
        anchor = unless(self._skip, kept.anchor, stored)
        return self._arrived(there, new), kept._replace(anchor=anchor)

    def _blocks_of_step(self) -> list[Blocks]:
        """The blocks of each leaf that are averaged."""
        exchange = self._exchange
        if not exchange.in_turn:
            return [Blocks(1, None, jnp.ones(0, bool))] * len(self._leaves)
        all_leaves = leaves_of(self._params, exchange.layout)
        at_step = SelectionAtStep(exchange.average_selection(all_leaves), self._step)
        return [at_step.blocks(leaf) for leaf in self._leaves]

    def _stepped(self, dtypes: Sequence[DTypeLike]) -> list[jax.Array]:
        """What is averaged: the parameters behind this step, or before it."""
        if self._exchange.overlap:
            return [p.astype(t) for p, t in zip(self._ps, dtypes, strict=True)]
        rows = zip(self._ps, self._us, dtypes, strict=True)
        return [p.astype(t) + u.astype(t) for p, u, t in rows]

    def _mean(self, ahead: Sequence[jax.Array], kept: Kept) -> tuple[Exchanged, Kept]:
        """The mean, normalized where that is asked for, and its new second moment."""
        exchange, leaves = self._exchange, self._leaves
        found = exchange_means(
            ahead,
            leaves,
            exchange,
            exchange.average_payload,
            self._step,
            with_errors=exchange.keeps_average_error,
        )
        if kept.nu is None:
            return found, kept
        nus = self._arrays(kept.nu)
        of_leaves = None if kept.nu_mean is None else self._arrays(kept.nu_mean)
        means, packed, of_leaves = normalized(
            found.means,
            self._pack(nus),
            of_leaves,
            leaves,
            self._blocks,
            exchange,
            self._skip,
        )
        new = kept._replace(nu=self._stored(packed, nus, kept.nu))
        if kept.nu_mean is not None:
            nu_mean = keep_absent(self._rebuild(of_leaves), kept.nu_mean)
            new = new._replace(nu_mean=nu_mean)
        if self._skip is not None:
            self._skip.follow(kept, new)
        return found._replace(means=means), new

    def _arrived(
        self, there: Sequence[jax.Array], new: Sequence[jax.Array]
    ) -> optax.Updates:
        """The updates to the averaged blocks, and to ``new`` elsewhere."""
        whole = map_rows(Blocks.unpack, self._blocks, there, new)
        return self._rebuild(map_rows(self._difference, whole, self._ps, self._us))

    def _difference(self, there: jax.Array, p: jax.Array, u: jax.Array) -> jax.Array:
        """From p to there, and with ``overlap`` this step's update, in u's dtype."""
        wide = jnp.float32 if p.dtype.itemsize < 4 else p.dtype
        moved = there.astype(wide) - p.astype(wide)
        if self._exchange.overlap:
            moved = moved + u.astype(wide)
        return moved.astype(u.dtype)

    def _arrays(self, tree: optax.Params) -> list[jax.Array]:
        """Of a tree like the parameters, those that have an update."""
        return [x for _, _, x in present(self._updates, tree, like=self._params)[0]]

    def _pack(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        return map_rows(Blocks.pack, self._blocks, arrays)

    def _stored(
        self, packed: Sequence[jax.Array], old: Sequence[jax.Array], tree: optax.Params
    ) -> optax.Params:
        """The tree with these blocks."""
        stored = map_rows(Blocks.store, self._blocks, packed, old)
        return keep_absent(self._rebuild(stored), tree)
