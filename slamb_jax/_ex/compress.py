"""Sends the selected blocks of updates, and keeps what is not sent."""

import operator
from typing import Any

import jax
import jax.numpy as jnp
import optax

from slamb_jax._ex.blocks import (
    Blocks,
    SelectionAtStep,
    map_rows,
    selection_at,
)
from slamb_jax._ex.means import exchange_means, means_over_workers
from slamb_jax._leaves import keep_absent, present
from slamb_jax._rounding import round_to
from slamb_jax._skip import Skip
from slamb_jax.exchange import Exchange


def compress(
    exchange: Exchange,
    updates: optax.Updates,
    residual: optax.Updates | None,
    step: jax.Array,
    params: optax.Params | None,
    *,
    keep_residual: bool,
    skip: Skip | None,
) -> tuple[optax.Updates, optax.Updates | None]:
    """The updates with their selected blocks averaged, and the residual.

    In a skipped step the updates come back as they are, but for ``keep_residual``.
    """
    if not exchange.exchanges_momentum:
        return updates, residual
    skip = None if keep_residual else skip
    kept = () if residual is None else (residual,)
    rows, rebuild = present(updates, *kept, like=params, layout=exchange.layout)
    leaves, gs = [row[0] for row in rows], [row[1] for row in rows]
    at_step = selection_at(exchange, updates if params is None else params, step)

    def exchanged(now: SelectionAtStep) -> tuple[Any, Any]:
        blocks = [now.blocks(leaf) for leaf in leaves]
        own = map_rows(Blocks.pack, blocks, gs)
        if residual is None:
            means = means_over_workers(own, leaves, exchange, exchange.payload, step)
            if skip is not None:
                means = skip.instead(own, means)
            return map_rows(Blocks.unpack, blocks, means, gs), None
        es = [row[2] for row in rows]
        xs = [g.astype(jnp.float32) + e for g, e in zip(gs, es, strict=True)]
        wide = map_rows(Blocks.pack, blocks, xs)
        packed = [round_to(x, g.dtype) for x, g in zip(wide, gs, strict=True)]
        found = exchange_means(
            packed, leaves, exchange, exchange.payload, step, with_errors=True
        )
        errors = map_rows(operator.sub, wide, found.sent)
        if found.server_error is not None:
            errors = map_rows(operator.add, errors, found.server_error)
        means, us = found.means, gs
        if keep_residual:  # what is not selected waits, too
            us, es = [jnp.zeros_like(g) for g in gs], xs
        if skip is not None:
            means = skip.instead(own, means)
            errors = skip.instead(map_rows(Blocks.pack, blocks, es), errors)
        return (
            map_rows(Blocks.unpack, blocks, means, us),
            map_rows(Blocks.unpack, blocks, errors, es),
        )

    us, es = at_step.in_phase(exchanged)
    new, waiting = rebuild(us), residual
    if residual is not None:
        waiting = keep_absent(rebuild(es), residual)
    if skip is not None:
        skip.follow((updates, residual), (new, waiting))
    return new, waiting
