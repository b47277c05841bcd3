"""Whether SLAMB will pay, before it is turned on."""

import collections
import dataclasses
import math
import numbers
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp

from slamb_jax._advice import Advice, StepCost
from slamb_jax._checks import check_floating, check_integer, check_range
from slamb_jax._layout import Layout, make_layout
from slamb_jax._leaves import Leaf, map_numbered
from slamb_jax._momentum import momentum_dtype
from slamb_jax._network import Network
from slamb_jax._selections import Strided, elements_sent
from slamb_jax._timing import OptimizerSeconds, as_shapes, measure_optimizers
from slamb_jax._units import duration, scaled
from slamb_jax._wire import RING_SHARES

_Plan = list[tuple[str, float, float]]  # kind, bytes put in, times per step


def advise(
    params: float | chex.ArrayTree,
    network: Network,
    *,
    step_seconds: float,
    compress_ratio: float = 0.1,
    sync_every: int | None = 100,
    min_size: int = 9000,
    mu_dtype: Any = None,
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

    Nothing overlaps: an optax optimizer runs behind the gradient. A dense program whose
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
    shapes = wholes if isinstance(params, numbers.Real) else _shards(params)
    layout = make_layout(None, stacked, None)
    check_range("step_seconds", step_seconds, 0.0, open_low=True, open_high=True)
    if sync_every is not None:
        check_integer("sync_every", sync_every, 1)
    selection = Strided(compress_ratio, min_size)
    itemsize = momentum_dtype(mu_dtype).itemsize
    if optimizer_seconds is None:
        optimizer_seconds = measure_optimizers(
            params if isinstance(params, numbers.Real) else shapes,
            compress_ratio=compress_ratio,
            min_size=min_size,
            mu_dtype=mu_dtype,
        )
    own = _checked(optimizer_seconds)

    d = sum(x.size for x in jax.tree.leaves(shapes))
    n = network.workers
    plans = {
        "lamb": [("all-reduce", 4 * d, 1.0)],
        "lamb_bfloat16": [("all-reduce", 2 * d, 1.0)],
        "slamb": [
            *_mean(_packed(params, shapes, wholes, selection, layout), itemsize, n),
            *_average(shapes, sync_every, n),
        ],
    }

    def cost(name: str, network: Network) -> StepCost:
        update = own.slamb if name == "slamb" else own.lamb
        return _cost(plans[name], network, step_seconds, update)

    def break_even(dense: str) -> float:
        def gain(link: float) -> float:
            other = dataclasses.replace(network, link=link)
            return cost(dense, other).step_seconds - cost("slamb", other).step_seconds

        return _last_gain(gain)

    return Advice(
        **{name: cost(name, network) for name in plans},
        break_even_link=break_even("lamb"),
        break_even_link_bfloat16=break_even("lamb_bfloat16"),
        title=_title(d, network, 1 / selection.turns, sync_every),
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


def _shards(params: chex.ArrayTree) -> chex.ArrayTree:
    """Shapes and dtypes of what one device has of each leaf."""

    def shard(x: Any) -> jax.ShapeDtypeStruct:
        sharding = getattr(x, "sharding", None)
        shape = x.shape if sharding is None else sharding.shard_shape(x.shape)
        return jax.ShapeDtypeStruct(shape, x.dtype)

    return jax.tree.map(shard, params)


def _packed(
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


def _mean(elements: int, itemsize: int, workers: int, times: float = 1.0) -> _Plan:
    """The collectives of ``_collectives.mean_over``."""
    if itemsize > 2:
        return [("all-reduce", elements * itemsize, times)]
    piece = -(-elements // workers) * itemsize
    return [("all-to-all", piece * workers, times), ("all-gather", piece, times)]


def _average(shapes: chex.ArrayTree, sync_every: int | None, workers: int) -> _Plan:
    """The average of parameters, a group for each dtype, amortized."""
    sizes: collections.Counter[jnp.dtype] = collections.Counter()
    for x in jax.tree.leaves(shapes):
        sizes[jnp.dtype(x.dtype)] += x.size
    times = 1 / sync_every if sync_every else 0.0
    groups = [_mean(d, dtype.itemsize, workers, times) for dtype, d in sizes.items()]
    return [collective for group in groups for collective in group]


def _cost(plan: _Plan, network: Network, compute: float, update: float) -> StepCost:
    n = network.workers
    return StepCost(
        bytes_per_step=sum(t * RING_SHARES[kind](n) * b for kind, b, t in plan),
        compute_seconds=compute,
        exchange_seconds=sum(t * network.seconds(kind, b) for kind, b, t in plan),
        optimizer_seconds=update,
    )


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


def _title(d: int, network: Network, k: float, sync_every: int | None) -> str:
    local = f" ({scaled(network.local_link, 'bit/s')} in it)"
    return (
        f"{scaled(d, 'parameters')}; {network.workers} workers, "
        f"{network.workers_per_node} a node"
        f"{local if math.isfinite(network.local_link) else ''}; "
        f"{scaled(network.link, 'bit/s')}, latency {duration(network.latency)}; "
        f"k = {k:.3g}, H = {sync_every}"
    )
