"""The compressor of an exchange: a selection of an array, in a wire format.

With :math:`M_t` the coordinates that are sent at step t (all, without a selection) and
Q the wire format,

    q = Q(x[M_t]), M = mean over workers of q, e = x - q.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from slamb_jax._core import axes, checks
from slamb_jax._core.leaves import Leaf, chosen, present, unless
from slamb_jax._core.rounding import next_step
from slamb_jax.compressors.codec import Sent
from slamb_jax.exchange.blocks import AtStep, Blocks, selection_at
from slamb_jax.exchange.mean import Means, mean_over_workers
from slamb_jax.exchange.settings import Exchange, check_exchange


class OfExchangeState(NamedTuple):
    """State of :func:`of_exchange`; the same on all workers."""

    count: jax.Array  # type: ignore[assignment]  # int32, shape []


class ByExchange(optax.GradientTransformationExtraArgs):
    """What sends by an exchange, by which a link may send in its place."""

    exchange: Exchange

    # optax's transformations are named tuples, whose fields their subclass keeps: it is
    # told from a compressor of the user's by its type.
    def __new__(cls, init: Any, update: Any, exchange: Exchange) -> "ByExchange":
        tx = super().__new__(cls, init, update)
        tx.exchange = exchange
        return tx


def of_exchange(exchange: Exchange) -> optax.GradientTransformationExtraArgs:
    r"""Sends what an exchange selects, in its wire format, to the owner and back.

    Each worker sends its slices to their owners, which average them, round the mean
    once more, and send it to all: about twice its codes, however many workers there
    are. No index is sent, since all workers know what is selected. What rounding takes
    of the mean waits n times with the owner.

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
        raise ValueError(
            f"exchange must exchange at every step, got {exchange!r}: give it a "
            "selection, or sync_every=1 and no outer optimizer"
        )

    def init(params: optax.Params) -> OfExchangeState:
        checks.check_floating(params, "params")
        return OfExchangeState(jnp.zeros([], jnp.int32))

    def update(
        updates: optax.Updates,
        state: OfExchangeState,
        params: optax.Params | None = None,
        skip: jax.Array | None = None,
        **extra_args: Any,
    ) -> tuple[Sent, OfExchangeState]:
        del extra_args
        # Where types show it: what was averaged already would be sent for nothing.
        axes.check_local(updates, exchange.axis_name, exchange.shard_axes)
        checks.check_floating(updates, "updates")
        step = next_step(state.count)
        like = updates if params is None else params
        rows, rebuild = present(updates, like=like, layout=exchange.layout)
        leaves, xs = [leaf for leaf, _ in rows], [x for _, x in rows]
        sent = Sent(*map(rebuild, send(exchange, xs, leaves, like, step)))
        return sent, chosen(skip, OfExchangeState(unless(skip, state.count, step)))

    return ByExchange(init, update, exchange)


def send(
    exchange: Exchange,
    arrays: Sequence[jax.Array],
    leaves: Sequence[Leaf],
    params: optax.Params,
    step: jax.Array,
) -> tuple[list[jax.Array], list[jax.Array]]:
    """The mean of what is sent of each array, 0 elsewhere, and what is not, float32."""
    if exchange.selection is None:
        found = mean_over_workers(
            arrays, leaves, exchange, exchange.payload, step, with_errors=True
        )
        return found.means, [_unsent(x, found, i) for i, x in enumerate(arrays)]
    blocks, packed, found = _mean_of_blocks(
        exchange, selection_at(exchange, params, step), arrays, leaves
    )
    errors = [_unsent(x, found, i) for i, x in enumerate(packed)]
    means = zip(blocks, found.means, arrays, strict=True)
    unsent = zip(blocks, errors, arrays, strict=True)
    return (
        [b.unpack(mean, jnp.zeros_like(x)) for b, mean, x in means],
        [b.unpack(e, x.astype(jnp.float32)) for b, e, x in unsent],
    )


def replace_selected(
    exchange: Exchange,
    at: AtStep,
    arrays: Sequence[jax.Array],
    leaves: Sequence[Leaf],
    skip: jax.Array | None,
) -> list[jax.Array]:
    """The arrays with M + e in their selected blocks: what is not sent stays there.

    In a skipped step, themselves: a choice between two momenta would need both in
    memory, that between their blocks does not.
    """
    blocks, packed, found = _mean_of_blocks(exchange, at, arrays, leaves)
    new = found.means
    if found.sent is not None:  # None: nothing was rounded, and e is 0 where M is
        errors = [_unsent(x, found, i) for i, x in enumerate(packed)]
        pairs = zip(new, errors, strict=True)
        new = _like([m.astype(jnp.float32) + e for m, e in pairs], new)
    rows = zip(blocks, unless(skip, packed, new), arrays, strict=True)
    return [b.unpack(x, whole) for b, x, whole in rows]


def _mean_of_blocks(
    exchange: Exchange,
    at: AtStep,
    arrays: Sequence[jax.Array],
    leaves: Sequence[Leaf],
) -> tuple[list[Blocks], list[jax.Array], Means]:
    """The selected blocks of each array, packed, and their means over the workers."""
    blocks = [at.blocks(leaf) for leaf in leaves]
    packed = [b.pack(x) for b, x in zip(blocks, arrays, strict=True)]
    # Flat, since codes fill up the rows of a matrix to those of a TPU's tiles; what is
    # packed is small, so that it may be moved.
    packed = [
        x if b.starts is None else x.reshape(-1)
        for b, x in zip(blocks, packed, strict=True)
    ]
    found = mean_over_workers(
        packed, leaves, exchange, exchange.payload, at.step, with_errors=True
    )
    return blocks, packed, found


def _unsent(x: jax.Array, found: Means, i: int) -> jax.Array:
    """What waits of array i: x - q, and n times what rounding a mean for all took."""
    received = found.received_by_others(i, with_lost=True)
    wide = x.astype(jnp.float32)
    return jnp.zeros_like(wide) if received is None else wide - received


def _like(arrays: Sequence[jax.Array], others: Sequence[jax.Array]) -> list[jax.Array]:
    return [x.astype(y.dtype) for x, y in zip(arrays, others, strict=True)]
