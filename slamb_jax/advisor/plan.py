"""The collectives of a step, with their bytes and seconds."""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax.numpy as jnp

from slamb_jax._ex.cuts import slice_nbytes
from slamb_jax._ex.payloads import Quantizer
from slamb_jax.advisor.advice import StepCost
from slamb_jax.advisor.network import Network
from slamb_jax.wire import RING_SHARES

Among = Literal["all", "nodes", "local"]


class Transfer(NamedTuple):
    """One collective of a step."""

    kind: str
    bytes_in: float  # that each device puts in
    per_step: float = 1.0
    among: Among = "all"  # "nodes": device i of each node; "local": those of one node

    def cost(self, network: Network) -> tuple[float, float]:
        """Bytes that each device sends per step, and the seconds it takes."""
        w, link, bytes_in = network.workers_per_node, network.link, self.bytes_in
        if self.among == "local":
            link = min(network.local_link, 1e18)
            network = Network(w, link, latency=network.latency)
        elif self.among == "nodes":  # the devices of a node share its link
            network = Network(network.workers // w, link, latency=network.latency)
            bytes_in *= w
        sent = RING_SHARES[self.kind](network.workers) * self.bytes_in
        seconds = network.seconds(self.kind, bytes_in)
        return self.per_step * sent, self.per_step * seconds


Plan = list[Transfer]


def mean(
    sizes: Sequence[int],
    wire_format: str | Quantizer,
    groups: tuple[int, int],
    per_step: float = 1.0,
) -> Plan:
    """The collectives of a mean over ``(groups, devices in each)``.

    ``sizes`` are the elements of each array, ``wire_format`` is the name of a dtype, or
    a quantizer.
    """
    n, w = groups
    elements = sum(sizes)
    among: Among = "nodes" if w > 1 else "all"
    part = -(-elements // w)  # of each device; its group gathers them afterwards
    if isinstance(wire_format, Quantizer):
        slice_bytes = slice_nbytes(sizes, wire_format, n * w)
        part_bytes = n * slice_bytes
    else:
        itemsize = jnp.dtype(wire_format).itemsize
        slice_bytes = -(-part // n) * itemsize
        part_bytes = part * itemsize
    plan = [
        Transfer("all-to-all", n * slice_bytes, per_step, among),
        Transfer("all-gather", slice_bytes, per_step, among),
    ]
    if not isinstance(wire_format, Quantizer) and itemsize != 2:
        plan = [Transfer("all-reduce", part_bytes, per_step, among)]
    if w > 1:
        plan.append(Transfer("all-gather", part_bytes, per_step, "local"))
    return plan


def cost_of(
    plan: Plan, hidden: Plan, network: Network, *, compute: float, update: float
) -> StepCost:
    """The cost of a step whose transfers in ``hidden`` can run during the compute."""

    def total(plan: Plan) -> tuple[float, ...]:
        costs = [transfer.cost(network) for transfer in plan]
        return tuple(map(math.fsum, zip(*costs, strict=True))) or (0.0, 0.0)

    sent, seconds = total(plan)
    return StepCost(
        bytes_per_step=sent,
        compute_seconds=compute,
        exchange_seconds=seconds,
        update_seconds=update,
        local_bytes_per_step=total([t for t in plan if t.among == "local"])[0],
        hidden_seconds=min(compute, total(hidden)[1]),
    )
