"""Predicts whether an exchange pays, before it is used."""

import dataclasses
import math
import numbers
import re
import textwrap
from collections.abc import Sequence

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from slamb_jax._core import checks
from slamb_jax._core.layout import broadcast_specs
from slamb_jax.advisor.advice import RECORDED, Advice, StepCost
from slamb_jax.advisor.network import Network
from slamb_jax.advisor.units import COUNTS, RATES, TIMES, scaled
from slamb_jax.exchange import nbytes
from slamb_jax.exchange.nbytes import Transfer
from slamb_jax.exchange.settings import Exchange, check_exchange
from slamb_jax.wire.hlo import RING_SHARES


def advise(
    params: float | chex.ArrayTree,
    network: Network,
    exchange: Exchange,
    *,
    step_seconds: float,
    update_seconds: tuple[float, float] = (0.0, 0.0),
    budget: float | None = None,
) -> Advice:
    r"""Predicts a step's seconds with an exchange and without, and whether it pays.

    A step is compute + exchange + update, with the seconds of the collectives by
    :class:`Network`. A dense optimizer averages d gradients in one all-reduce, in
    float32 or bfloat16. An exchange averages the momentum at every step, or parameters
    every H steps, which is amortized. Arrays of 32 bits use an all-reduce. Arrays of 16
    bits and codes use two all-to-alls, or what the ``route`` of the exchange says. An
    all-to-all loads the link of a node with many workers more. The leaves are taken to
    share one collective; where XLA makes several, each adds its latency.

    Nothing overlaps, since an optax optimizer runs after the backward pass. A dense
    program may exchange gradients during its backward pass: ``speedup_hidden`` is
    beside one that hides all of it that the compute is long enough for.

    Args:
      params: a tree of arrays or of ``jax.ShapeDtypeStruct``; or the number d of
        parameters, taken to lie in one unsharded float32 matrix.
        Of a leaf with a ``NamedSharding`` only the shard of one device counts, so d and
        the links are those of one device if the model is sharded.
      network: the workers and their links.
      exchange: its settings. What a ``selection`` sends without a ``payload`` is taken
        to be of float32. With ``local_axis_name`` each node is one worker. With
        ``param_specs`` the leaves need a ``NamedSharding``, whose mesh gives the sizes
        of the axes.
      step_seconds: compute of one forward and backward pass on one worker; positive.
      update_seconds: ``(dense, exchanging)``, the seconds of update and application
        that are not in ``step_seconds``.
      budget: the most bytes, as a share of a mean of float32 gradients; in (0, 1]. It
        is half of the share of a mean of bfloat16 gradients. The exchange then gets the
        first ``payload`` of ``"ternary"``, ``"largest_of_7"``, ``"largest_of_31"`` and
        ``"largest_of_127"`` that is small enough; with an ``outer`` optimizer
        ``"ternary"``, the only one that suits it. None: its own.

    Returns:
      An :class:`slamb_jax.advisor.Advice`; its ``exchange`` has the payload.

    Raises:
      ValueError: for a value out of range, an exchange without an axis, groups that
        the network does not have, ``param_specs`` without a mesh, and a ``budget`` that
        no payload keeps, or beside a payload that is not the default.

    Examples:
      >>> import slamb_jax
      >>> network = slamb_jax.Network(workers=128, link=10e9)
      >>> exchange = slamb_jax.Exchange("data")
      >>> advice = slamb_jax.advise(340e6, network, exchange, step_seconds=0.5)
      >>> advice.pays, round(advice.speedup, 2), round(advice.speedup_bfloat16, 2)
      (True, 3.92, 2.33)
      >>> advice = slamb_jax.advise(
      ...     340e6, network, exchange, step_seconds=0.5, budget=0.02
      ... )
      >>> advice.exchange, round(advice.share, 3)
      (Exchange('data', payload='largest_of_7'), 0.018)
    """
    if not isinstance(network, Network):
        raise ValueError(f"network must be a slamb_jax.Network, got {network!r}")
    devices = _devices(network, check_exchange(exchange))
    checks.check_range("step_seconds", step_seconds, 0.0, open_low=True, open_high=True)
    if not isinstance(update_seconds, Sequence) or len(update_seconds) != 2:
        raise ValueError(f"update_seconds must be a pair, got {update_seconds!r}")
    before, after = update_seconds
    for name, value in (("dense", before), ("exchanging", after)):
        checks.check_range(f"update_seconds ({name})", value, 0.0, open_high=True)
    # 1. The exchange, if a budget chooses its payload. A model of which only the size
    # is known is one matrix.
    counted = isinstance(params, numbers.Real)
    if counted:
        checks.check_range("params", params, 1.0, 1e15)
        params = jax.ShapeDtypeStruct((1, int(float(params))), jnp.float32)
    nodes = network.workers // devices
    if budget is not None:
        exchange = _choose_payload(exchange, budget, params, nodes)
    # 2. The elements of one device's shards, and the means of those.
    shards = None if counted else _shards(params, exchange)
    d, means = nbytes.means_of(exchange, params, shards)

    # 3. The exchange's collectives; before them the devices of a worker average their
    # gradients.
    def cost(route: str) -> StepCost:
        plan = [Transfer("all-reduce", 4 * d, within=True)] if devices > 1 else []
        for mean in means:
            plan += nbytes.transfers_of(mean, nodes, devices, route)
        return _cost(network, step_seconds, after, plan, devices)

    # 4. What steps cost: dense in float32 and in bfloat16, and with the exchange.
    def dense(itemsize: int) -> StepCost:
        gradients = Transfer("all-reduce", itemsize * d)
        return _cost(network, step_seconds, before, [gradients])

    share = nbytes.share(d, means, exchange.route, nodes)
    payload = exchange.payload or "float32"
    return Advice(
        dense=dense(4),
        dense_bfloat16=dense(2),
        exchanging=cost(exchange.route),
        routes={route: cost(route) for route in ("owners", "all")},
        title=_title(d, network, exchange, share),
        share=share,
        exchange=exchange,
        recorded=RECORDED.get(payload) if exchange.averages_momentum else None,
    )


def _choose_payload(
    exchange: Exchange, budget: float, params: chex.ArrayTree, workers: int
) -> Exchange:
    """The exchange in the first payload that keeps to the budget."""
    checks.check_range("budget", budget, 0.0, 1.0, open_low=True)
    if exchange.payload != Exchange().payload:
        raise ValueError(
            f"a budget chooses the payload: give no payload={exchange.payload!r}"
        )
    for payload in RECORDED if exchange.outer is None else ("ternary",):
        chosen = dataclasses.replace(exchange, payload=payload)
        means = nbytes.means_of(chosen, params)
        if (least := nbytes.share(*means, exchange.route, workers)) <= budget:
            return chosen
    raise ValueError(
        f"budget must be at least {least:.2g} for these parameters, got {budget!r}: "
        "where all workers draw from the same data, an outer optimizer sends less"
    )


def _devices(network: Network, exchange: Exchange) -> int:
    """The devices of one worker: those of a node, or one."""
    if exchange.axis_name is None:
        raise ValueError(
            f"exchange must have an axis_name, to send anything, got {exchange!r}"
        )
    if exchange.local_axis_name is None:
        return 1
    if not 1 < network.workers_per_node < network.workers:
        raise ValueError(
            "network must have several nodes of several workers for local_axis_name="
            f"{exchange.local_axis_name!r}, got {network!r}"
        )
    return network.workers_per_node


def _shards(params: chex.ArrayTree, exchange: Exchange) -> chex.ArrayTree:
    """Shapes and dtypes of the shard of each leaf that one device holds."""
    checks.check_floating(params, "params")

    def shard(
        path: jax.tree_util.KeyPath, x: jax.Array, spec: PartitionSpec
    ) -> jax.ShapeDtypeStruct:
        sharding = getattr(x, "sharding", None)
        if any(spec):
            if not isinstance(sharding, NamedSharding):
                raise ValueError(
                    f"params{jax.tree_util.keystr(path)} must have a NamedSharding, "
                    f"whose mesh gives the sizes of the axes in {spec}, got {x}"
                )
            sharding = NamedSharding(sharding.mesh, spec)
        shape = x.shape if sharding is None else sharding.shard_shape(x.shape)
        return jax.ShapeDtypeStruct(shape, jnp.dtype(x.dtype))

    specs = broadcast_specs(exchange.param_specs, params)
    return jax.tree_util.tree_map_with_path(shard, params, specs)


def _cost(
    network: Network,
    compute: float,
    update: float,
    transfers: Sequence[Transfer],
    devices: int = 1,
) -> StepCost:
    """What a step costs that waits for these collectives.

    With several devices in a worker, device i of each node takes part in one mean, and
    the means share the link of the node.
    """
    within = between = network
    if devices > 1:
        local, link, late = network.local_link, network.link, network.latency
        within = Network(devices, min(local, 1e18), latency=late)
        between = Network(network.workers // devices, link, latency=late)
    total = np.zeros(4)  # bytes, those within a node, seconds and those of latency
    for x in transfers:
        among, means = (within, 1) if x.within else (between, devices)
        sent = RING_SHARES[x.kind](among.workers) * x.nbytes
        seconds = (among.seconds(x.kind, n) for n in (x.nbytes * means, 0))
        total += np.multiply(x.per_step, [sent, sent * x.within, *seconds])
    sent, local_sent, exchange, latency = total.tolist()
    return StepCost(sent, compute, exchange, update, local_sent, latency)


def _title(d: int, network: Network, exchange: Exchange, share: float) -> str:
    """The model on its network; the exchange and how much it sends."""
    local = network.local_link
    inside = f" ({scaled(local, RATES)} within it)" if math.isfinite(local) else ""
    exchange = dataclasses.replace(exchange, param_specs=None, stacked=None)
    shown = re.sub(r"outer=\w+\(init=.*?>\)", "outer=...", repr(exchange))
    lines = (
        f"{scaled(d, COUNTS)} parameters; {network.workers} workers, "
        f"{network.workers_per_node} per node{inside}; {scaled(network.link, RATES)},"
        f" latency {scaled(network.latency, TIMES)}",
        f"{shown}: {100 * share:.3g}% of the bytes of dense float32, "
        f"{200 * share:.3g}% of bfloat16",
    )
    return "\n".join(textwrap.fill(line, 88) for line in lines)
