"""Predicts whether an exchange pays, before it is used."""

import dataclasses
import math
import numbers
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from slamb_jax._core.checks import check_floating, check_range
from slamb_jax._core.layout import broadcast_specs
from slamb_jax.advisor.advice import ABOVE_DENSE, Advice, StepCost, duration, scaled
from slamb_jax.advisor.network import Network
from slamb_jax.exchange.nbytes import Transfer, means_of, share, transfers_of
from slamb_jax.exchange.settings import Exchange, check_exchange
from slamb_jax.wire import RING_SHARES

TYPICAL = jax.ShapeDtypeStruct((10_000, 1024), jnp.float32)
"""A matrix of a model that is given as a number of parameters."""


def advise(
    params: float | chex.ArrayTree,
    network: Network,
    exchange: Exchange,
    *,
    step_seconds: float,
    update_seconds: tuple[float, float] = (0.0, 0.0),
) -> Advice:
    r"""Predicts a step's seconds with an exchange and without, and whether it pays.

    A step is compute + exchange + update, with the seconds of the collectives by
    :class:`Network`. A dense optimizer averages d gradients in one all-reduce, in
    float32 or bfloat16. An exchange averages the momentum at every step, or parameters
    every H steps, which is amortized. Arrays of 32 bits use an all-reduce. Arrays of 16
    bits and codes use an all-to-all and an all-gather, which load the link of a node
    with many workers more. The leaves are taken to share one collective; where XLA
    makes several, each adds its latency (:meth:`Network.report_seconds` counts them).

    Nothing overlaps, since an optax optimizer runs after the backward pass. With
    ``overlap`` the exchange between the workers runs during the compute, and the step
    waits for the rest of it. A dense program that exchanges gradients during its
    backward pass is faster than predicted here.

    Args:
      params: a tree of arrays or of ``jax.ShapeDtypeStruct``; or the number d of
        parameters, taken to lie in unsharded float32 matrices of ten million elements.
        Of a leaf with a ``NamedSharding`` only the shard of one device counts, so d and
        the links are those of one device if the model is sharded.
      network: the workers and their links.
      exchange: its settings. What a ``selection`` sends of the momentum is taken to be
        of float32. With ``local_axis_name`` each node is one worker. With
        ``param_specs`` the leaves need a ``NamedSharding``, whose mesh gives the sizes
        of the axes. Whether an ``overlap`` comes true depends on the compiler.
      step_seconds: compute of one forward and backward pass on one worker; positive.
      update_seconds: ``(dense, exchanging)``, the seconds of update and application
        that are not in ``step_seconds``.

    Returns:
      An :class:`Advice`.

    Raises:
      ValueError: for a value out of range, an exchange without an axis, groups that
        the network does not have, and ``param_specs`` without a mesh.

    Examples:
      >>> import slamb_jax
      >>> network = slamb_jax.Network(workers=128, link=10e9)
      >>> exchange = slamb_jax.Exchange("data")
      >>> advice = slamb_jax.advise(340e6, network, exchange, step_seconds=0.5)
      >>> advice.pays, round(advice.speedup, 2), round(advice.speedup_bfloat16, 2)
      (True, 4.12, 2.45)
    """
    if not isinstance(network, Network):
        raise ValueError(f"network must be a slamb_jax.Network, got {network!r}")
    devices = _devices(network, check_exchange(exchange))
    workers = network.workers // devices
    if isinstance(params, numbers.Real):
        check_range("params", params, 1.0, open_high=True)
        d, (size, of_one) = int(float(params)), means_of(exchange, TYPICAL)
        means = [x._replace(sizes=(-(-d * sum(x.sizes) // size),)) for x in of_one]
    else:
        d, means = means_of(exchange, params, _shards(params, exchange))
    check_range("step_seconds", step_seconds, 0.0, open_low=True, open_high=True)
    if not isinstance(update_seconds, Sequence) or len(update_seconds) != 2:
        raise ValueError(
            f"update_seconds must be (dense, exchanging), got {update_seconds!r}"
        )
    for name, value in zip(("dense", "exchanging"), update_seconds, strict=True):
        check_range(f"update_seconds ({name})", value, 0.0, open_high=True)

    exchanged = [x for mean in means for x in transfers_of(mean, workers, devices)]
    gradients = Transfer("all-reduce", 4 * d, within=True)
    plan = [gradients, *exchanged] if devices > 1 else exchanged

    def dense(network: Network, itemsize: int) -> StepCost:
        plan = [Transfer("all-reduce", itemsize * d)]
        sent, seconds, late = _total(network, 1, plan)
        return StepCost(
            sent, step_seconds, seconds, update_seconds[0], latency_seconds=late
        )

    def exchanging(network: Network) -> StepCost:
        sent, seconds, late = _total(network, devices, plan)
        within, *_ = _total(network, devices, [x for x in plan if x.within])
        _, hidden, _ = _total(network, devices, exchanged if exchange.overlap else [])
        hidden = min(step_seconds, hidden)
        update = update_seconds[1]
        return StepCost(sent, step_seconds, seconds, update, within, hidden, late)

    def break_even(itemsize: int) -> float:
        def gain(link: float) -> float:
            other = dataclasses.replace(network, link=link)
            return dense(other, itemsize).step_seconds - exchanging(other).step_seconds

        return _fastest_link(gain)

    payload, found = exchange.payload or "float32", share(d, means)
    recorded = exchange.averages_momentum and not exchange.overlap
    return Advice(
        dense=dense(network, 4),
        dense_bfloat16=dense(network, 2),
        exchanging=exchanging(network),
        break_even_link=break_even(4),
        break_even_link_bfloat16=break_even(2),
        title=_title(d, network, exchange, found),
        share=found,
        payload=payload,
        expected_loss=ABOVE_DENSE.get(payload) if recorded else None,
    )


def _devices(network: Network, exchange: Exchange) -> int:
    """The devices of one worker: those of a node, or one."""
    if exchange.axis_name is None:
        raise ValueError(
            "exchange must have an axis_name, without which nothing is exchanged, got "
            f"{exchange!r}"
        )
    if exchange.local_axis_name is None:
        return 1
    if not 1 < network.workers_per_node < network.workers:
        raise ValueError(
            f"network must have several nodes of several workers for an exchange with "
            f"local_axis_name={exchange.local_axis_name!r}, got workers="
            f"{network.workers} and workers_per_node={network.workers_per_node}"
        )
    return network.workers_per_node


def _shards(params: chex.ArrayTree, exchange: Exchange) -> chex.ArrayTree:
    """Shapes and dtypes of the shard of each leaf that one device holds."""
    check_floating(params, "params")

    def shard(path: Any, x: jax.Array, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        sharding = getattr(x, "sharding", None)
        if any(spec):
            if not isinstance(sharding, NamedSharding):
                raise ValueError(
                    "params must have a jax.NamedSharding where the exchange has "
                    "param_specs: its mesh gives the sizes of the axes in "
                    f"{spec}, got {x} at params{jax.tree_util.keystr(path)}"
                )
            sharding = NamedSharding(sharding.mesh, spec)
        shape = x.shape if sharding is None else sharding.shard_shape(x.shape)
        return jax.ShapeDtypeStruct(shape, jnp.dtype(x.dtype))

    specs = broadcast_specs(exchange.param_specs, params)
    return jax.tree_util.tree_map_with_path(shard, params, specs)


def _total(
    network: Network, devices: int, plan: Sequence[Transfer]
) -> tuple[float, float, float]:
    """Per step: the bytes that each device sends, their seconds, and those of latency.

    With several devices in a worker, device i of each node takes part in one mean, and
    the means share the link of the node.
    """
    within = between = network
    if devices > 1:
        link = min(network.local_link, 1e18)
        within = Network(devices, link, latency=network.latency)
        nodes = network.workers // devices
        between = Network(nodes, network.link, latency=network.latency)
    sent, seconds, late = [0.0], [0.0], [0.0]
    for kind, nbytes, per_step, inside in plan:
        among, together = (within, 1) if inside else (between, devices)
        sent.append(per_step * RING_SHARES[kind](among.workers) * nbytes)
        seconds.append(per_step * among.seconds(kind, nbytes * together))
        late.append(per_step * among.seconds(kind, 0))
    return math.fsum(sent), math.fsum(seconds), math.fsum(late)


def _fastest_link(gain: Callable[[float], float]) -> float:
    """The fastest link whose gain is not negative; 0 if there is none."""
    powers = [13 - i / 8 for i in range(8 * 12)]  # 10 Tbit/s down to 10 bit/s
    slow = next((x for x in powers if gain(10**x) >= 0), None)
    if slow in (None, powers[0]):
        return math.inf if slow else 0.0
    fast = slow + 1 / 8
    for _ in range(40):
        middle = (slow + fast) / 2
        slow, fast = (middle, fast) if gain(10**middle) >= 0 else (slow, middle)
    return 10**slow


def _title(d: int, network: Network, exchange: Exchange, share: float) -> str:
    """The model on its network; the exchange and how much it sends."""
    inside = ""
    if math.isfinite(network.local_link):
        inside = f" ({scaled(network.local_link, 'bit/s')} within it)"
    shown = dataclasses.replace(exchange, param_specs=None, stacked=None)
    lines = (
        f"{scaled(d, 'parameters')}; {network.workers} workers, "
        f"{network.workers_per_node} per node{inside}; {scaled(network.link, 'bit/s')},"
        f" latency {duration(network.latency)}",
        f"{shown}: {100 * share:.3g}% of the bytes of dense float32, "
        f"{200 * share:.3g}% of bfloat16",
    )
    return "\n".join(textwrap.fill(line, 88) for line in lines)
