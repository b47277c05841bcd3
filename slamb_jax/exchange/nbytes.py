"""Counts the bytes that an exchange sends: the only place that does, before a run.

An exchange is a list of means over the workers, :func:`means_of`. A mean cuts its
arrays into slices: each worker sends a slice to the owner of that slice, and the owner
returns the mean of it.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import chex
import jax
import jax.numpy as jnp

from slamb_jax._core.checks import check_floating
from slamb_jax._core.layout import Layout
from slamb_jax._core.leaves import leaves_of
from slamb_jax.exchange.codes import Quantizer, cut_among, quantizer_of
from slamb_jax.exchange.selections import Selection, elements_sent


class Settings(Protocol):
    """What counts of an :class:`slamb_jax.Exchange`, which stands above this file."""

    @property
    def payload(self) -> str | None: ...
    @property
    def sync_every(self) -> int | None: ...
    @property
    def outer(self) -> Any: ...
    @property
    def selection(self) -> Selection | None: ...
    @property
    def stacked(self) -> Any: ...
    @property
    def averages_momentum(self) -> bool: ...


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
    exchange: Settings,
    params: chex.ArrayTree,
    shards: chex.ArrayTree | None = None,
) -> tuple[int, list[Mean]]:
    """The elements of these parameters, and the means that an exchange takes of them.

    ``shards`` are the shapes and dtypes that one device holds of a sharded model.
    """
    check_floating(params, "params")
    layout, held = (
        Layout(None, exchange.stacked).of,
        params if shards is None else shards,
    )
    leaves = [
        dataclasses.replace(x, shards=whole.layer_size // max(x.layer_size, 1))
        for x, whole in zip(
            leaves_of(held, layout), leaves_of(params, layout), strict=True
        )
    ]
    dtypes = [x.dtype.name for x in jax.tree.leaves(held)]
    sizes = tuple(leaf.size for leaf in leaves)
    if not (elements := sum(sizes)):
        raise ValueError(f"params must have elements, got {params!r}")
    if exchange.averages_momentum:
        return elements, [Mean(sizes, exchange.payload or "float32")]
    means = []
    if exchange.selection is not None:
        selection = exchange.selection.for_leaves(leaves)
        sent = tuple(elements_sent(selection, leaf) for leaf in leaves)
        means.append(Mean(sent, exchange.payload or "float32"))
    if exchange.sync_every is not None:
        # Differences to the last average are of float32.
        # With a selection the payload is of the momentum: parameters are never rounded.
        own = None if exchange.selection is not None else exchange.payload
        own = own or ("float32" if exchange.outer is not None else None)
        wires = [own or dtype for dtype in dtypes]
        for wire in dict.fromkeys(wires):
            chosen = tuple(n for n, w in zip(sizes, wires, strict=True) if w == wire)
            means.append(Mean(chosen, wire, 1 / exchange.sync_every))
    return elements, means


def slice_nbytes(sizes: Sequence[int], wire: str, slices: int) -> int:
    """Bytes of one slice of these arrays, where they are cut into so many."""
    if (codes := _codes(wire)) is None:
        return -(-sum(sizes) // slices) * jnp.dtype(wire).itemsize
    return sum(codes.nbytes(cut.slice) for cut in cut_among(sizes, codes, slices))


def _codes(wire: str) -> Quantizer | None:
    """The codes of a wire format; None for a dtype."""
    return None if "float" in wire else quantizer_of(wire)


def transfers_of(mean: Mean, workers: int, devices: int = 1) -> list[Transfer]:
    """The collectives of a mean over the workers, each a group of so many devices.

    Numbers of 32 bits are summed on the way, by an all-reduce. Each device of a worker
    exchanges a part, and the worker gathers the parts.
    """
    sizes, wire, often = mean
    one = slice_nbytes(sizes, wire, workers * devices)
    part = workers * one
    found = [Transfer("all-to-all", part, often), Transfer("all-gather", one, often)]
    if _codes(wire) is None:
        part = slice_nbytes(sizes, wire, devices)
        # 16 bits are sent as codes are, since a sum in 16 bits loses digits.
        if jnp.dtype(wire).itemsize != 2:
            found = [Transfer("all-reduce", part, often)]
    gather = Transfer("all-gather", part, often, within=True)
    return [*found, gather] if devices > 1 else found


def share_of(exchange: Settings, params: chex.ArrayTree) -> float:
    """Bytes of a step of an exchange over those of averaging gradients in float32."""
    return share(*means_of(exchange, params))


def share(elements: int, means: Sequence[Mean]) -> float:
    """Bytes of a step over those of a mean of so many float32 gradients."""
    # Of one slice that holds all: padding for the workers, a few bytes for each array,
    # is not counted.
    sent = sum(slice_nbytes(x.sizes, x.wire, 1) * x.per_step for x in means)
    return sent / (4 * elements)
