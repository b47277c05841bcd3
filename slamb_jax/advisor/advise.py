"""Predicts whether an exchange pays, before it is used."""

import dataclasses
import functools
import itertools
import math
import textwrap
from collections.abc import Callable, Mapping

import chex
from jax.typing import DTypeLike

from slamb_jax._checks import check_dtype, check_range
from slamb_jax._ex.payloads import Quantizer, resolve_payload
from slamb_jax._ex.selections import Schedule
from slamb_jax.advisor.advice import Advice, StepCost
from slamb_jax.advisor.network import Network
from slamb_jax.advisor.parameters import Elements, count_elements
from slamb_jax.advisor.plan import Plan, Transfer, cost_of, mean
from slamb_jax.advisor.units import duration, scaled
from slamb_jax.exchange import Exchange, check_exchange


def advise(
    params: float | chex.ArrayTree,
    network: Network,
    exchange: Exchange,
    *,
    step_seconds: float,
    mu_dtype: DTypeLike | None = None,
    update_seconds: tuple[float, float] = (0.0, 0.0),
) -> Advice:
    r"""Predicts a step's seconds with an exchange and without, and whether it pays.

    A step is compute + exchange + update, with the seconds of the collectives by
    :class:`Network`. A dense optimizer averages d gradients in one all-reduce, in
    float32 or bfloat16. One with an exchange averages the selected coordinates of its
    momentum, and a share 1/H of the parameters, or all of them every H steps, which is
    amortized. Arrays of 32 bits use an all-reduce; those of 16 bits and quantized ones
    an all-to-all and an all-gather, which load the link of a node with many workers
    more.

    Nothing overlaps, since an optax optimizer runs after the backward pass. With
    ``overlap`` the exchange between the workers runs during the compute, and the step
    waits for what is left of it. A dense program that hides its exchange behind its
    backward pass is faster than predicted here. The leaves are taken to share one
    collective; where XLA makes several, each adds its latency
    (:meth:`Network.report_seconds` counts them).

    Args:
      params: a tree of arrays or of ``jax.ShapeDtypeStruct``; or the number d of
        parameters, taken to lie in unsharded float32 matrices of ten million elements.
        Of a leaf with a ``NamedSharding`` only the shard of one device counts, so d and
        the links are those of one device if the model is sharded.
      network: the workers and their links.
      exchange: what is exchanged. Of a schedule the last phase counts. With
        ``local_axis_name`` each node is one group of devices. With ``param_specs`` the
        leaves need a ``NamedSharding``, whose mesh gives the sizes of the axes.
        Whether an ``overlap`` comes true depends on the compiler.
      step_seconds: compute of one forward and backward pass on one worker; positive.
      mu_dtype: dtype of the momentum, as in :func:`slamb`; None is float32.
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
    exchange, began = _last_phase(check_exchange(exchange))
    groups = _groups(network, exchange)
    elements = count_elements(params, exchange)
    check_range("step_seconds", step_seconds, 0.0, open_low=True, open_high=True)
    mu = check_dtype("mu_dtype", mu_dtype).name
    dense_update, update = _checked(update_seconds)

    d = elements.total
    gradients = [Transfer("all-reduce", 4 * d, among="local")] if groups[1] > 1 else []
    momentum = []
    if exchange.exchanges_momentum:
        payload = resolve_payload(exchange.payload) or mu
        momentum = mean(elements.per_step, payload, groups)
    plan = [*gradients, *momentum, *_average(elements, exchange, groups)]
    hidden = plan[len(gradients) :] if exchange.overlap else []
    cost = functools.partial(cost_of, compute=step_seconds)
    exchanging = functools.partial(cost, plan, hidden, update=update)
    dense, dense_bfloat16 = (
        functools.partial(
            cost, [Transfer("all-reduce", size * d)], [], update=dense_update
        )
        for size in (4, 2)
    )

    def break_even(without: Callable[[Network], StepCost]) -> float:
        def gain(link: float) -> float:
            other = dataclasses.replace(network, link=link)
            return without(other).step_seconds - exchanging(other).step_seconds

        return _fastest_link(gain)

    return Advice(
        dense(network),
        dense_bfloat16(network),
        exchanging(network),
        break_even(dense),
        break_even(dense_bfloat16),
        _title(elements, network, exchange, began),
    )


def _last_phase(exchange: Exchange) -> tuple[Exchange, int]:
    """The exchange after the last change of its ratio, and the step of that change."""
    ratio, selection = exchange.compress_ratio, exchange.selection
    if isinstance(ratio, Mapping):
        began = max(ratio)
        return dataclasses.replace(exchange, compress_ratio=ratio[began]), began
    if isinstance(selection, Schedule):
        began = max(selection.phases)
        return dataclasses.replace(exchange, selection=selection.phases[began]), began
    return exchange, 0


def _groups(network: Network, exchange: Exchange) -> tuple[int, int]:
    """How many groups exchange, and how many devices each has."""
    if exchange.axis_name is None:
        raise ValueError(
            "exchange must have an axis_name, without which nothing is exchanged, got "
            f"{exchange!r}"
        )
    if exchange.local_axis_name is None:
        return network.workers, 1
    w = network.workers_per_node
    if not 1 < w < network.workers:
        raise ValueError(
            f"network must have several nodes of several workers for an exchange with "
            f"local_axis_name={exchange.local_axis_name!r}, got "
            f"workers={network.workers} and workers_per_node={w}"
        )
    return network.workers // w, w


def _average(elements: Elements, exchange: Exchange, groups: tuple[int, int]) -> Plan:
    """The average of the parameters, in one exchange for each wire format."""
    if exchange.sync_every is None:
        return []
    payload = resolve_payload(exchange.average_payload)
    if payload is None and exchange.outer is not None:
        payload = "float32"  # the difference to the last average
    kinds: list[tuple[str | Quantizer, tuple[int, ...]]]
    kinds = [*elements.averaged.items()]
    if payload is not None:
        kinds = [(payload, tuple(itertools.chain(*elements.averaged.values())))]
    per_step = exchange.averages_per_step
    return [x for kind, sizes in kinds for x in mean(sizes, kind, groups, per_step)]


def _checked(seconds: tuple[float, float]) -> tuple[float, float]:
    try:
        dense, exchanging = seconds
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"update_seconds must be (dense, exchanging), got {seconds!r}"
        ) from error
    for name, value in (("dense", dense), ("exchanging", exchanging)):
        check_range(f"update_seconds ({name})", value, 0.0, open_high=True)
    return dense, exchanging


def _fastest_link(gain: Callable[[float], float]) -> float:
    """The fastest link whose gain is not negative; 0 if there is none."""
    powers = [13 - i / 8 for i in range(8 * 12)]  # 10 Tbit/s down to 10 bit/s
    slow = next((x for x in powers if gain(10**x) >= 0), None)
    if slow is None:
        return 0.0
    if slow == powers[0]:
        return math.inf
    fast = slow + 1 / 8
    for _ in range(40):
        middle = (slow + fast) / 2
        slow, fast = (middle, fast) if gain(10**middle) >= 0 else (slow, middle)
    return 10**slow


def _title(elements: Elements, network: Network, exchange: Exchange, began: int) -> str:
    """The model on its network; the exchange and how much it sends."""
    inside = ""
    if math.isfinite(network.local_link):
        inside = f" ({scaled(network.local_link, 'bit/s')} within it)"
    shown = dataclasses.replace(exchange, param_specs=None, stacked=None)
    since = f" from step {began} on" if began else ""
    every = exchange.sync_every
    averages = "never" if every is None else f"every {every} steps"
    if every == 1:
        averages = "at every step"
    elif exchange.in_turn:
        averages = f"in turn, each every {every} steps"
    sends = f"the parameters {averages}"
    if exchange.averages_momentum:
        sends = "the momentum at every step"
    if exchange.exchanges_momentum:
        share = sum(elements.per_step) / elements.total
        sends = f"{share:.3g} of the momentum, {sends}"
    lines = (
        f"{scaled(elements.total, 'parameters')}; {network.workers} workers, "
        f"{network.workers_per_node} per node{inside}; {scaled(network.link, 'bit/s')},"
        f" latency {duration(network.latency)}",
        f"{shown}{since}: {sends}",
    )
    return "\n".join(textwrap.fill(line, 88) for line in lines)
