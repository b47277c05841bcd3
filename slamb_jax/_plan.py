"""The collectives of a step that :func:`slamb_jax.advise` predicts, and their cost."""

import collections
import dataclasses
import math
import numbers
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from slamb_jax._advice import StepCost
from slamb_jax._layout import Layout
from slamb_jax._leaves import Leaf, map_numbered
from slamb_jax._network import Network
from slamb_jax._quantize import Payload, Quantizer
from slamb_jax._selections import Strided, elements_sent
from slamb_jax._wire import RING_SHARES


class Part(NamedTuple):
    """A collective of a step."""

    kind: str
    bytes_in: float
    times: float  # per step
    among: str = "all"  # workers; or the "groups" (each's devices at once), or "local"


Plan = list[Part]


def shards_of(params: chex.ArrayTree) -> chex.ArrayTree:
    """Shapes and dtypes of what one device has of each leaf."""

    def shard(x: Any) -> jax.ShapeDtypeStruct:
        sharding = getattr(x, "sharding", None)
        shape = x.shape if sharding is None else sharding.shard_shape(x.shape)
        return jax.ShapeDtypeStruct(shape, x.dtype)

    return jax.tree.map(shard, params)


def packed(
    params: float | chex.ArrayTree,
    shapes: chex.ArrayTree,
    wholes: chex.ArrayTree,
    selection: Strided,
    layout: Layout,
) -> int:
    """Elements that SLAMB sends per step."""
    if isinstance(params, numbers.Real):
        return -(-int(float(params)) // selection.turns)

    def sent(leaf: Leaf, shape: Any, whole: Any) -> int:
        layer = math.prod(whole.shape[1:] if leaf.stacked else whole.shape)
        shards = layer // max(leaf.layer_size, 1)
        return elements_sent(selection, dataclasses.replace(leaf, shards=shards))

    counts = map_numbered(sent, shapes, wholes, layout=layout)
    return sum(jax.tree.leaves(counts))


def mean(
    elements: int, payload: Any, groups: tuple[int, int], times: float = 1.0
) -> Plan:
    """The collectives of ``_exchange.means_of``."""
    n, w = groups
    among = "groups" if w > 1 else "all"
    if isinstance(payload, Quantizer):
        mine = -(-elements // (n * w))
        there, back = payload.nbytes(mine), payload.for_means.nbytes(mine)
        parts, share = _halves(there, back, n, times, among), n * back
    else:
        itemsize = jnp.dtype(payload).itemsize
        mine = -(-elements // w)
        share = mine * itemsize
        if itemsize > 2:
            parts = [Part("all-reduce", share, times, among)]
        else:
            piece = -(-mine // n) * itemsize
            parts = _halves(piece, piece, n, times, among)
    return parts + ([Part("all-gather", share, times, "local")] if w > 1 else [])


def _halves(there: float, back: float, n: int, times: float, among: str) -> Plan:
    """An all-reduce by slices, each averaged by its owner."""
    return [
        Part("all-to-all", there * n, times, among),
        Part("all-gather", back, times, among),
    ]


def average(
    shapes: chex.ArrayTree,
    sync_every: int | None,
    payload: Payload,
    groups: tuple[int, int],
) -> Plan:
    """The average of parameters, a group for each dtype, amortized."""
    sizes: collections.Counter[Any] = collections.Counter()
    for x in jax.tree.leaves(shapes):
        sizes[payload or x.dtype.name] += x.size
    times = 1 / sync_every if sync_every else 0.0
    plans = [mean(d, kind, groups, times) for kind, d in sizes.items()]
    return [collective for plan in plans for collective in plan]


def cost_of(plan: Plan, network: Network, compute: float, update: float) -> StepCost:
    w = network.workers_per_node
    sizes = {"all": network.workers, "groups": network.workers // w, "local": w}
    sent = {
        among: math.fsum(
            p.times * RING_SHARES[p.kind](size) * p.bytes_in
            for p in plan
            if p.among == among
        )
        for among, size in sizes.items()
    }
    return StepCost(
        bytes_per_step=math.fsum(sent.values()),
        compute_seconds=compute,
        exchange_seconds=exchange_seconds(plan, network),
        optimizer_seconds=update,
        local_bytes_per_step=sent["local"],
    )


def exchange_seconds(plan: Plan, network: Network) -> float:
    return math.fsum(part.times * _seconds(part, network) for part in plan)


def _seconds(part: Part, network: Network) -> float:
    """Of one collective; the devices of a node share its link for their slices."""
    w, latency = network.workers_per_node, network.latency
    if part.among == "local":
        link = min(network.local_link, 1e18)
        return Network(w, link, latency=latency).seconds(part.kind, part.bytes_in)
    if part.among == "groups":
        nodes = Network(network.workers // w, network.link, latency=latency)
        return nodes.seconds(part.kind, w * part.bytes_in)
    return network.seconds(part.kind, part.bytes_in)
