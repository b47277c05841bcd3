"""Counts the bytes that an exchange sends: the only place that does, before a run.

An exchange is a list of means over the workers, :func:`means_of`. A mean cuts its
arrays into slices: each worker sends a slice to the owner of that slice, and the owner
returns the mean of it.
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import chex
import jax
import jax.numpy as jnp

from slamb_jax._core.checks import check_floating
from slamb_jax._core.layout import layout_of
from slamb_jax._core.leaves import leaves_of
from slamb_jax.exchange.codecs import CODECS, cut_among, is_summed
from slamb_jax.exchange.collectives import is_direct
from slamb_jax.exchange.selections import elements_sent

if TYPE_CHECKING:  # it stands above this file
    from slamb_jax.exchange.settings import Exchange


class Mean(NamedTuple):
    """A mean over the workers of arrays that are sent together."""

    sizes: tuple[int, ...]  # elements of each array
    wire: str  # a payload, or the name of a dtype
    per_step: float = 1.0  # 1 / H for a mean every H steps


class Transfer(NamedTuple):
    """One collective of a mean."""

    kind: str
    nbytes: int  # that each device puts in
    per_step: float = 1.0
    within: bool = False  # among the devices of one worker, not between workers


def means_of(
    exchange: "Exchange",
    params: chex.ArrayTree,
    shards: chex.ArrayTree | None = None,
) -> tuple[int, list[Mean]]:
    """The elements of these parameters, and the means that an exchange takes of them.

    ``shards`` are the shapes and dtypes that one device holds of a sharded model.
    """
    check_floating(params, "params")
    layout = layout_of(None, exchange.stacked)
    held = params if shards is None else shards
    # Selections choose by the size of a whole layer, whatever a device holds of it.
    pairs = zip(leaves_of(held, layout), leaves_of(params, layout), strict=True)
    leaves = [
        dataclasses.replace(leaf, shards=whole.layer_size // max(leaf.layer_size, 1))
        for leaf, whole in pairs
    ]
    sizes = tuple(leaf.size for leaf in leaves)
    if not (elements := sum(sizes)):
        raise ValueError(f"params must have elements, got {params!r}")
    # Of the momentum: all of it, or what is selected.
    payload = exchange.payload or "float32"
    if exchange.averages_momentum:
        return elements, [Mean(sizes, payload)]
    means = []
    if exchange.selection is not None:
        selection = exchange.selection.for_leaves(leaves)
        selected = tuple(elements_sent(selection, leaf) for leaf in leaves)
        means.append(Mean(selected, payload))
    # Of the parameters. Differences to the last average are of float32. With a
    # selection the payload is of the momentum: parameters are never rounded.
    if exchange.sync_every is not None:
        wire = None if exchange.selection is not None else exchange.payload
        wire = wire or ("float32" if exchange.outer is not None else None)
        wires = [wire or x.dtype.name for x in jax.tree.leaves(held)]
        for wire in dict.fromkeys(wires):
            alike = tuple(n for n, w in zip(sizes, wires, strict=True) if w == wire)
            means.append(Mean(alike, wire, 1 / exchange.sync_every))
    return elements, means


def slice_nbytes(sizes: Sequence[int], wire: str, slices: int) -> int:
    """Bytes of one slice of these arrays, where they are cut into so many."""
    if (codec := CODECS.get(wire)) is None:
        return -(-sum(sizes) // slices) * jnp.dtype(wire).itemsize
    return sum(codec.nbytes(cut.slice) for cut in cut_among(sizes, codec, slices))


def transfers_of(
    mean: Mean, workers: int, devices: int = 1, route: str = "owners"
) -> list[Transfer]:
    """The collectives of a mean over the workers, each a group of so many devices.

    Numbers of 32 bits are summed on the way, by an all-reduce. Each device of a worker
    exchanges a part, and the worker gathers the parts.
    """
    sizes, wire, often = mean
    owners = 1 if is_direct(route, workers) else workers
    one = slice_nbytes(sizes, wire, owners * devices)
    copies = Transfer("all-to-all", workers * one, often)
    # Of the arrays what one device exchanges; in codes those of all slices, or workers.
    part = slice_nbytes(sizes, wire, devices)
    if is_summed(wire):
        sent = [Transfer("all-reduce", part, often)]
    elif workers == 2:  # an all-gather waits no longer
        sent = [Transfer("all-gather", one, often)]
    else:  # all to all; or a slice to each owner, and its mean to all
        sent = [copies] * (1 if owners == 1 else 2)
    if devices > 1:  # what the devices of a worker got, each a part, they share
        got = part if wire not in CODECS else copies.nbytes
        sent.append(Transfer("all-gather", got, often, within=True))
    return sent


def share(
    elements: int, means: Sequence[Mean], route: str = "owners", workers: int = 2
) -> float:
    """Bytes of a step over those of a mean of so many float32 gradients.

    By the route ``"all"`` n workers send n / 2 times the bytes of what no all-reduce
    sums.
    """
    sent, copies = 0.0, workers / 2 if route == "all" else 1.0
    for sizes, wire, often in means:
        # Of one slice that holds all: padding for the workers, a few bytes for each
        # array, is not counted.
        times = 1.0 if is_summed(wire) else copies
        sent += slice_nbytes(sizes, wire, 1) * often * times
    return sent / (4 * elements)
