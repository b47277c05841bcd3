"""The compressor of an exchange: a selection of an array, in a wire format.

With :math:`M_t` the coordinates that are sent at step t (all, without a selection) and
Q the wire format,

    q = Q(x[M_t]), M = mean over workers of q, e = x - q.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from slamb_jax._core import axes, checks
from slamb_jax._core.joining import ArrayRow, join_rows
from slamb_jax._core.leaves import Leaf, chosen, map_present, next_step, present, unless
from slamb_jax._core.platform import materialized
from slamb_jax.compressors.codec import Sent
from slamb_jax.exchange.codecs import CODECS
from slamb_jax.exchange.mean import mean_over_workers
from slamb_jax.exchange.selections import AtStep, selection_at, unit_of_blocks
from slamb_jax.exchange.settings import Exchange, check_exchange

Arrays = Sequence[jax.Array]


class OfExchangeState(NamedTuple):
    """State of :func:`of_exchange`; the same on all workers."""

    count: jax.Array  # type: ignore[assignment]  # int32, shape []


class Unit(NamedTuple):
    """The unit of each coordinate's codes, the same on all workers."""

    size: jax.Array
    waits: jax.Array  # the share of the quantization error that is kept for later


class Request(NamedTuple):
    """What a link asks of the compressor of an exchange: the argument ``request``.

    The updates are then a list of arrays, and an :class:`Answer` comes back.
    """

    exchange: Exchange  # of the link
    leaves: Sequence[Leaf]  # that the arrays are of; small ones may be joined
    at: AtStep | None  # what is selected; None: all
    # The unit of each array's codes, and once more for what follows the exchange, which
    # would keep the first; None: 1.
    units: Sequence[Unit | None]
    units_again: Sequence[Unit | None]


class Answer(NamedTuple):
    """What was made of the arrays of a :class:`Request`.

    Of each x, as it was rounded to the type that is sent, M, and e, or None for an e of
    nothing; with a selection M + e alone. Whoever wraps a compressor, and does not pass
    the request on, returns something else.
    """

    xs: Sequence[jax.Array]
    sent: Sequence[Sent | jax.Array]
    is_finite: Callable[[], jax.Array] | None  # of the means, as in Means


def of_exchange(exchange: Exchange) -> optax.GradientTransformationExtraArgs:
    r"""Sends what an exchange selects, in its wire format, to the owner and back.

    Each worker sends its slices to their owners, which average them, round the mean
    once more, and send it to all: about twice its codes, however many workers there
    are. Two workers send each other all, and round nothing more. No index is sent,
    since all workers know what is selected. What rounding takes of the mean waits n
    times with the owner.

    Args:
      exchange: between whom, which coordinates when (``selection``), and in what wire
        format (``payload``). It must exchange at every step.

    Returns:
      A compressor: a :class:`optax.GradientTransformationExtraArgs` whose ``update``
      returns :class:`slamb_jax.Sent`.

    Raises:
      ValueError: for an exchange that sends nothing at most steps; in ``update``, for
        an unbound axis, and for updates that were averaged already where the types show
        it (``shard_map`` with ``check_vma=True``).

    Examples:
      >>> import jax, jax.numpy as jnp, slamb_jax
      >>> exchange = slamb_jax.Exchange("data", payload="sign")
      >>> tx = slamb_jax.compressors.of_exchange(exchange)
      >>> send = lambda x: tx.update(x, tx.init(x))[0]
      >>> x = jnp.array([[1.0, -1.0, 1.0], [1.0, 1.0, 1.0], [1.0, -1.0, -1.0]])
      >>> print(jnp.sign(jax.vmap(send, axis_name="data")(x).mean[0]))
      [ 1. -1.  1.]

    References:
      Xu et al., `SLAMB <https://proceedings.mlr.press/v202/xu23q.html>`_, ICML 2023,
      section 3; Alistarh et al., `QSGD <https://arxiv.org/abs/1610.02132>`_, 2016; Tang
      et al., `1-bit Adam <https://arxiv.org/abs/2102.02888>`_, 2021: the owner's error.
    """
    check_exchange(exchange)
    if exchange.selection is None and not exchange.averages_momentum:
        raise ValueError(f"exchange must exchange at every step, got {exchange!r}")

    def init(params: optax.Params) -> OfExchangeState:
        checks.check_floating(params, "params")
        return OfExchangeState(jnp.zeros([], jnp.int32))

    def update(
        updates: optax.Updates,
        state: OfExchangeState,
        params: optax.Params | None = None,
        skip: jax.Array | None = None,
        *,
        request: Request | None = None,
        **extra_args: Any,
    ) -> tuple[Any, OfExchangeState]:
        del extra_args
        # Where types show it: what was averaged already would be sent for nothing.
        axes.check_local(updates, exchange.axis_name, exchange.shard_axes)
        checks.check_floating(updates, "updates")
        step = next_step(state.count)
        new = chosen(skip, OfExchangeState(unless(skip, state.count, step)))
        if request is None:
            like = updates if params is None else params
            return _send_tree(exchange, updates, like, step), new
        if request.exchange != exchange:
            raise ValueError(
                "compressor must have the exchange of mask_momentum, got "
                f"{exchange!r} for {request.exchange!r}"
            )
        rows, is_finite = _send(exchange, updates, request, step)
        xs = [row.x for row in rows]
        if request.at is None:
            sent = [Sent(row.mean, row.error) for row in rows]
            return Answer(xs, sent, is_finite), new
        wholes = [_put_back(request.at, skip, row) for row in rows]
        return Answer(xs, wholes, is_finite), new

    return optax.GradientTransformationExtraArgs(init, update)


def unit_to_join(exchange: Exchange, at: AtStep | None, leaf: Leaf) -> int | None:
    """Small leaves are joined if padded to a multiple of so many elements.

    None for a leaf that stays by itself: no block of codes may be of two leaves, which
    may differ in scale, and what is between the leaves must be sent as zeros.
    """
    if axes.axis_size(exchange.axis_name) == 1:
        return None
    codec = CODECS.get(exchange.payload)
    if codec is None:
        return unit_of_blocks(at, leaf)
    if not codec.has_zero or not (at is None or at.is_dense(leaf)):
        return None
    return codec.group_of(leaf.size).size


class _Exchanged(NamedTuple):
    """An array, what was sent of it, and what came back."""

    leaf: Leaf
    x: jax.Array
    packed: jax.Array  # what is selected of it
    mean: jax.Array  # of that, over the workers
    error: jax.Array | None  # what others did not receive of it; None: nothing


def _send_tree(
    exchange: Exchange, updates: optax.Updates, like: Any, step: jax.Array
) -> Sent:
    """The mean of what is sent of each leaf, 0 elsewhere, and what is not, float32."""
    if exchange.payload is not None:  # else the updates' own dtype is sent
        updates = map_present(lambda x: x.astype(jnp.float32), updates)
    at = selection_at(exchange, like, step)
    found, rebuild = present(updates, like=like, layout=exchange.layout)
    rows = [ArrayRow(*row) for row in found]
    joined = join_rows(rows, lambda leaf: unit_to_join(exchange, at, leaf))
    arrays = [row.x for row in joined.rows]
    units = [None] * len(arrays)
    leaves = [row.leaf for row in joined.rows]
    request = Request(exchange, leaves, at, units, units)
    means, unsent = [], []
    sent, _ = _send(exchange, arrays, request, step)
    for leaf, x, packed, mean, error in sent:
        if error is None:
            error = jnp.zeros(packed.shape, jnp.float32)
        if at is not None:
            mean = at.unpack(leaf, mean, jnp.zeros_like(x))
            error = at.unpack(leaf, error, x.astype(jnp.float32))
        means.append(mean)
        unsent.append(error)
    return Sent(*map(rebuild, joined.split(means, unsent)))


def _send(
    exchange: Exchange, arrays: Sequence[jax.Array], request: Request, step: jax.Array
) -> tuple[list[_Exchanged], Callable[[], jax.Array] | None]:
    """Sends what is selected of each array.

    1. Pack the selected blocks, and divide by their units: there every coordinate has
       about the same size, whatever its layer's scale. So few bits are well spent, and
       a scale for each block loses little.
    2. Take the mean over the workers, in the wire format.
    3. Compute what the others did not receive of this worker's blocks.

    And says whether what came back first is finite.
    """
    packed = []
    for leaf, x, unit in zip(request.leaves, arrays, request.units, strict=True):
        x = x if request.at is None else request.at.pack(leaf, x)
        # Kept, and not computed anew of the momentum, whose place it can take.
        packed.append(x if unit is None else materialized(x / unit.size))
    found = mean_over_workers(packed, request.leaves, exchange, exchange.payload, step)
    rows = []
    columns = request.leaves, arrays, packed, *found[:3], request.units_again
    for leaf, x, sent, mean, received, lost, unit in zip(*columns, strict=True):
        error = None
        if received is not None:
            # Where v is the unit, rounding of the mean is left alone: n times of it, in
            # one worker's momentum, would be more noise than what it takes away.
            if lost is not None and unit is None:
                received = received - lost
            error = sent.astype(jnp.float32) - received
        if unit is not None:
            x, mean = unit.size * sent, unit.size * mean
            error = None if error is None else unit.size * unit.waits * error
        rows.append(_Exchanged(leaf, x, sent, mean, error))
    return rows, found.is_finite


def _put_back(at: AtStep, skip: jax.Array | None, row: _Exchanged) -> jax.Array:
    """The array with M + e in its selected blocks: what is not sent stays there.

    In a skipped step, itself: a choice between two momenta would need both in memory,
    that between their blocks does not.
    """
    leaf, x, packed, mean, error = row
    new = mean
    if error is not None:
        new = (mean.astype(jnp.float32) + error).astype(mean.dtype)
    return at.unpack(leaf, unless(skip, packed, new), x)
