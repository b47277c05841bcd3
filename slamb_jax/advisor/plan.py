"""The collectives of a step, with their bytes and seconds."""

import math
from typing import Literal, NamedTuple

import jax.numpy as jnp

from slamb_jax.advisor.advice import StepCost
from slamb_jax.advisor.network import Network
from slamb_jax.exchange.payloads import Quantizer
from slamb_jax.wire import RING_SHARES

Among = Literal["all", "nodes", "local"]


class Transfer(NamedTuple):
    """One collective of a step."""

    kind: str
    bytes_in: float  # that each device puts in
    per_step: float = 1.0
    among: Among = "all"  # "nodes": device i of each node; "local": those of one node


Plan = list[Transfer]


def mean(
    elements: int,
    wire_format: str | Quantizer,
    groups: tuple[int, int],
    per_step: float = 1.0,
) -> Plan:
    """The collectives of a mean over ``(groups, devices in each)``.

    ``wire_format`` is the name of a dtype, or a quantizer.
    """
    n, w = groups
    among: Among = "nodes" if w > 1 else "all"
    part = -(-elements // w)  # of each device; its group gathers them afterwards
    if isinstance(wire_format, Quantizer):
        size = -(-elements // (n * w))
        to_owner = wire_format.nbytes(size)
        back = wire_format.for_means.nbytes(size)
        part_bytes = n * back
    else:
        itemsize = jnp.dtype(wire_format).itemsize
        to_owner = back = -(-part // n) * itemsize
        part_bytes = part * itemsize
    if isinstance(wire_format, Quantizer) or itemsize == 2:
        plan = [
            Transfer("all-to-all", n * to_owner, per_step, among),
            Transfer("all-gather", back, per_step, among),
        ]
    else:
        plan = [Transfer("all-reduce", part_bytes, per_step, among)]
    if w > 1:
        plan.append(Transfer("all-gather", part_bytes, per_step, "local"))
    return plan


def cost_of(
    plan: Plan, network: Network, compute: float, update: float, hidden: Plan
) -> StepCost:
    """The cost of a step whose transfers in ``hidden`` can run during the compute."""
    w = network.workers_per_node
    sizes = {"all": network.workers, "nodes": network.workers // w, "local": w}

    def bytes_sent(transfers: Plan) -> float:
        return math.fsum(
            t.per_step * RING_SHARES[t.kind](sizes[t.among]) * t.bytes_in
            for t in transfers
        )

    return StepCost(
        bytes_per_step=bytes_sent(plan),
        compute_seconds=compute,
        exchange_seconds=_total_seconds(plan, network),
        optimizer_seconds=update,
        local_bytes_per_step=bytes_sent([t for t in plan if t.among == "local"]),
        hidden_seconds=min(compute, _total_seconds(hidden, network)),
    )


def _total_seconds(plan: Plan, network: Network) -> float:
    return math.fsum(t.per_step * _seconds(t, network) for t in plan)


def _seconds(transfer: Transfer, network: Network) -> float:
    w, latency = network.workers_per_node, network.latency
    if transfer.among == "local":
        link = min(network.local_link, 1e18)
        local = Network(w, link, latency=latency)
        return local.seconds(transfer.kind, transfer.bytes_in)
    if transfer.among == "nodes":  # the devices of a node share its link
        nodes = Network(network.workers // w, network.link, latency=latency)
        return nodes.seconds(transfer.kind, w * transfer.bytes_in)
    return network.seconds(transfer.kind, transfer.bytes_in)
