"""Whether SLAMB will pay, before it is turned on."""

import dataclasses
import math
import numbers
from collections.abc import Callable
from typing import Any

import chex
import jax

from slamb_jax._advice import Advice, StepCost
from slamb_jax._checks import check_bool, check_floating, check_integer, check_range
from slamb_jax._layout import make_layout
from slamb_jax._momentum import momentum_dtype
from slamb_jax._network import Network
from slamb_jax._plan import (
    Part,
    average,
    cost_of,
    exchange_seconds,
    mean,
    packed,
    shards_of,
)
from slamb_jax._quantize import PAYLOADS, Payload, check_payload
from slamb_jax._selections import Strided
from slamb_jax._timing import OptimizerSeconds, as_shapes, measure_optimizers
from slamb_jax._units import duration, scaled


def advise(
    params: float | chex.ArrayTree,
    network: Network,
    *,
    step_seconds: float,
    compress_ratio: float = 0.1,
    sync_every: int | None = 100,
    min_size: int = 9000,
    mu_dtype: Any = None,
    payload: Payload = None,
    average_payload: Payload = None,
    hierarchical: bool = False,
    overlap: bool = False,
    stacked: Any = None,
    optimizer_seconds: tuple[float, float] | None = None,
) -> Advice:
    r"""Predicts the step time of SLAMB and of dense LAMB, and whether SLAMB pays.

    For each, with the seconds of an exchange as :class:`Network` has them:

    .. math::

      step = compute + exchange + optimizer

    LAMB averages d gradients in one all-reduce, in float32 or bfloat16. SLAMB averages
    what its chosen coordinates pack into, in the dtype of its momentum, and all d
    parameters on every H-th step, which is amortized. 32 bits go through an all-reduce;
    16 bits through an all-to-all, a float32 sum and an all-gather, as in :func:`slamb`:
    the same bytes for each worker, but more on the link of a node that has many.

    Nothing overlaps: an optax optimizer runs behind the gradient. With ``overlap`` what
    SLAMB exchanges at every step runs beside the compute, and the step waits only for
    what is left then; the average of parameters stays behind it. A dense program whose
    exchange hides behind its backward pass is faster than predicted here. Leaves are
    taken to travel together in one collective; where XLA makes several, each costs its
    latency (:meth:`Network.report_seconds` counts them).

    Args:
      params: the number d of parameters, taken to be large float32 leaves of which
        the share k travels; or a tree of arrays or of ``jax.ShapeDtypeStruct``, for
        which what travels is counted as the optimizer packs it (:class:`Strided`). Of
        one with a ``NamedSharding`` over axes other than the workers' it is the shard
        of one device that counts; all those of a worker go over its link.
      network: the workers and their links.
      step_seconds: compute of one step, forward and backward pass, on one worker.
      compress_ratio: k in (0, 1]; taken as ``1 / max(1, round(1/k))``.
      sync_every: H; None for never.
      min_size: leaves with fewer elements are exchanged whole.
      mu_dtype: dtype of the momentum, and so of what travels; None is float32.
      payload: what travels of the momentum instead, as in :func:`slamb`. What coding
        costs is not in ``optimizer_seconds`` if they are measured.
      average_payload: what travels of the parameters, likewise.
      hierarchical: whether the ``workers_per_node`` of the network are one group, with
        gradients averaged densely over ``local_link`` and momentum exchanged between
        nodes: ``slamb(axis_name="node", local_axis_name="device")``.
      overlap: as in :func:`slamb`. Whether it comes true is up to the compiler.
      stacked: which leaves are stacks of layers, as in :func:`slamb`.
      optimizer_seconds: what update and apply of LAMB and of SLAMB take on all
        parameters, ``(lamb, slamb)``; None: :func:`measure_optimizers` times both
        now, on this machine.

    Returns:
      An :class:`Advice`.

    Raises:
      ValueError: for a value out of range.

    Examples:
      >>> import slamb_jax
      >>> network = slamb_jax.Network(workers=128, link=10e9)
      >>> advice = slamb_jax.advise(
      ...     340e6, network, step_seconds=0.5, optimizer_seconds=(0.010, 0.012)
      ... )
      >>> advice.pays, round(advice.speedup, 2), round(advice.speedup_bfloat16, 2)
      (True, 3.54, 2.11)
    """
    if not isinstance(network, Network):
        raise ValueError(f"network must be a slamb_jax.Network, got {network!r}")
    wholes = as_shapes(params)
    check_floating(wholes, "params")
    shapes = wholes if isinstance(params, numbers.Real) else shards_of(params)
    layout = make_layout(None, stacked, None)
    check_range("step_seconds", step_seconds, 0.0, open_low=True, open_high=True)
    if sync_every is not None:
        check_integer("sync_every", sync_every, 1)
    check_bool("overlap", overlap)
    selection = Strided(compress_ratio, min_size)
    dtype = momentum_dtype(mu_dtype).name
    check_payload("payload", payload)
    check_payload("average_payload", average_payload)
    groups = _groups(network, hierarchical)
    if optimizer_seconds is None:
        optimizer_seconds = measure_optimizers(
            params if isinstance(params, numbers.Real) else shapes,
            compress_ratio=compress_ratio,
            min_size=min_size,
            mu_dtype=mu_dtype,
        )
    own = _checked(optimizer_seconds)

    d = sum(x.size for x in jax.tree.leaves(shapes))
    sent = packed(params, shapes, wholes, selection, layout)
    every_step = mean(sent, payload or dtype, groups)
    plans = {
        "lamb": [Part("all-reduce", 4 * d, 1.0)],
        "lamb_bfloat16": [Part("all-reduce", 2 * d, 1.0)],
        "slamb": [
            *([Part("all-reduce", 4 * d, 1.0, "local")] if hierarchical else []),
            *every_step,
            *average(shapes, sync_every, average_payload, groups),
        ],
    }
    beside = {"slamb": every_step if overlap else []}

    def cost(name: str, network: Network) -> StepCost:
        update = own.slamb if name == "slamb" else own.lamb
        found = cost_of(plans[name], network, step_seconds, update)
        hidden = min(step_seconds, exchange_seconds(beside.get(name, []), network))
        return dataclasses.replace(found, hidden_seconds=hidden)

    def break_even(dense: str) -> float:
        def gain(link: float) -> float:
            other = dataclasses.replace(network, link=link)
            return cost(dense, other).step_seconds - cost("slamb", other).step_seconds

        return _last_gain(gain)

    return Advice(
        **{name: cost(name, network) for name in plans},
        break_even_link=break_even("lamb"),
        break_even_link_bfloat16=break_even("lamb_bfloat16"),
        title=_title(d, network, 1 / selection.turns, sync_every)
        + _choices(payload, average_payload, hierarchical, overlap),
    )


def _checked(seconds: tuple[float, float]) -> OptimizerSeconds:
    try:
        own = OptimizerSeconds(*seconds)
    except TypeError as error:
        raise ValueError(
            f"optimizer_seconds must be (lamb, slamb), got {seconds!r}"
        ) from error
    for name, value in own._asdict().items():
        check_range(f"optimizer_seconds ({name})", value, 0.0, open_high=True)
    return own


def _groups(network: Network, hierarchical: bool) -> tuple[int, int]:
    """How many groups exchange, and how many devices each has."""
    if not isinstance(hierarchical, bool):
        raise ValueError(f"hierarchical must be a bool, got {hierarchical!r}")
    w = network.workers_per_node if hierarchical else 1
    if hierarchical and not 1 < w < network.workers:
        raise ValueError(
            "hierarchical=True needs several nodes of several workers, got "
            f"workers={network.workers} and workers_per_node={w}"
        )
    return network.workers // w, w


def _last_gain(gain: Callable[[float], float]) -> float:
    """The fastest link with a gain that is not negative; 0 if there is none."""
    powers = [13 - i / 8 for i in range(8 * 12)]  # 10 Tbit/s down to 10 bit/s
    if gain(10 ** powers[0]) >= 0:
        return math.inf
    low = next((x for x in powers if gain(10**x) >= 0), None)
    if low is None:
        return 0.0
    high = low + 1 / 8
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if gain(10**middle) >= 0 else (low, middle)
    return 10**low


def _choices(
    payload: Payload, average_payload: Payload, hierarchical: bool, overlap: bool
) -> str:
    """What the title says of what is not the default."""
    names = {value: name for name, value in PAYLOADS.items()}
    told = [
        f"; {what} {names.get(value, value)}"
        for what, value in (("payload", payload), ("average", average_payload))
        if value is not None
    ]
    said = {"hierarchical": hierarchical, "overlap": overlap}
    return "".join([*told, *(f"; {name}" for name, is_so in said.items() if is_so)])


def _title(d: int, network: Network, k: float, sync_every: int | None) -> str:
    local = f" ({scaled(network.local_link, 'bit/s')} in it)"
    return (
        f"{scaled(d, 'parameters')}; {network.workers} workers, "
        f"{network.workers_per_node} a node"
        f"{local if math.isfinite(network.local_link) else ''}; "
        f"{scaled(network.link, 'bit/s')}, latency {duration(network.latency)}; "
        f"k = {k:.3g}, H = {sync_every}"
    )
