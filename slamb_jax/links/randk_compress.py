"""The one place that sends: a selection of an array, in a wire format, and its mean.

With :math:`M_t` the coordinates that are sent at step t (all, without a selection) and
Q the wire format, every way to send is

    q = Q(x[M_t]), M = mean over workers of q, e = x - q,

and links differ in where e waits: in a residual of its own here, in the momentum in
:func:`slamb_jax.mask_momentum`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from slamb_jax._core import axes, checks
from slamb_jax._core.leaves import Leaf, chosen, keep_absent, present, unless
from slamb_jax._core.rounding import next_step, round_to
from slamb_jax.exchange.blocks import AtStep, Blocks, selection_at
from slamb_jax.exchange.mean import Means, mean_over_workers
from slamb_jax.exchange.settings import Exchange, check_exchange
from slamb_jax.links.on_shards import on_shards


class Sent(NamedTuple):
    """What a compressor returns for the momentum x of a worker.

    What this worker sent is q = x - ``unsent``. So nothing is lost: over the workers
    the mean of x is ``mean`` plus the mean of ``unsent``.
    """

    mean: optax.Updates  # of q over the workers, the same bits on all of them
    unsent: optax.Updates  # x - q, the worker's own


class RandkCompressState(NamedTuple):
    """State of :func:`randk_compress_with_error_feedback`."""

    count: jax.Array  # type: ignore[assignment]  # int32, shape []
    residual: optax.Updates | None  # float32, as the updates; None if nothing is kept


class RandkCompress(optax.GradientTransformationExtraArgs):
    """The link, and the exchange by which :func:`mask_momentum` sends in its place."""

    exchange: Exchange | None

    # optax's transformations are named tuples, whose fields their subclass keeps: it is
    # told from a compressor of the user's by its type.
    def __new__(
        cls, init: Any, update: Any, exchange: Exchange | None = None
    ) -> "RandkCompress":
        tx = super().__new__(cls, init, update)
        tx.exchange = exchange
        return tx


def randk_compress_with_error_feedback(
    exchange: Exchange, *, keep_residual: bool = True
) -> optax.GradientTransformationExtraArgs:
    r"""Exchanges a share of the updates, in few bits; what is not sent waits.

    With g the worker's own gradient, :math:`M_t` the coordinates that the exchange
    selects at step t (all of them without a selection), and Q its wire format:

    .. math::

      x_i &= g_i + e_i, \quad q_i = Q(x_i[M_t]) \\
      u &= \text{mean over workers of } q_i, \quad u[\neg M_t] = 0 \\
      e_i &\leftarrow x_i - q_i

    which is error feedback. No index is sent, since all workers know :math:`M_t`. Where
    the mean is rounded once more, the worker that rounds it for all keeps n times what
    that took, since it sends an nth of the next mean: the sum of all u is the sum of
    the mean gradients, less what waits.

    Use it by itself in front of an optimizer that has no momentum to wait in, such as
    ``optax.sgd``: all workers get the same u, and their parameters stay equal. Before
    an optimizer with momentum :func:`mask_momentum` is better: what waits takes no
    memory there, and is not as old.

    Args:
      exchange: between whom, which coordinates when (``selection``), and in what wire
        format (``payload``). It must exchange at every step.
      keep_residual: False: what is not sent passes on instead,
        :math:`u = \text{mean} + x_i - q_i`, and nothing is kept. It is for a link that
        keeps what it gets, as :func:`mask_momentum` keeps the momentum: workers that
        step by it drift apart.

    Returns:
      A :class:`optax.GradientTransformationExtraArgs` whose updates have the dtype of
      the gradients. It may be the ``compressor`` of :func:`mask_momentum`, which then
      keeps what is not sent in the momentum, and no residual.

    Raises:
      ValueError: for an exchange that sends nothing at most steps; in ``update``, for
        an unbound axis, and for gradients that were averaged already where the types
        show it (``shard_map`` with ``check_vma=True``).

    Examples:
      >>> import jax.numpy as jnp, optax, slamb_jax
      >>> half = slamb_jax.selections.Strided(0.5, min_size=0)
      >>> exchange = slamb_jax.Exchange(payload=None, selection=half)
      >>> tx = optax.chain(
      ...     slamb_jax.randk_compress_with_error_feedback(exchange), optax.sgd(1.0)
      ... )
      >>> params = jnp.ones((2, 2))
      >>> state = tx.init(params)
      >>> for _ in range(2):
      ...     updates, state = tx.update(jnp.ones((2, 2)), state, params)
      ...     print((updates != 0).sum())
      2
      2

    References:
      Xu et al., `SLAMB <https://proceedings.mlr.press/v202/xu23q.html>`_, ICML 2023,
      section 3: momentum masking; Stich et al., `Sparsified SGD with Memory
      <https://arxiv.org/abs/1809.07599>`_, 2018: error feedback.
    """
    check_exchange(exchange)
    checks.check_bool("keep_residual", keep_residual)
    if exchange.selection is None and not exchange.averages_momentum:
        raise ValueError(
            f"exchange must exchange at every step, got {exchange!r}: give it a "
            "selection, or sync_every=1 and no outer optimizer"
        )

    def init(params: optax.Params) -> RandkCompressState:
        checks.check_floating(params, "params")
        residual = None
        if keep_residual:
            residual = optax.tree.zeros_like(params, dtype=jnp.float32)
        return RandkCompressState(jnp.zeros([], jnp.int32), residual)

    def update(
        updates: optax.Updates,
        state: RandkCompressState,
        params: optax.Params | None = None,
        skip: jax.Array | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, RandkCompressState]:
        del extra_args
        # Where types show it: what was averaged already would be sent for nothing.
        axes.check_local(updates, exchange.axis_name, exchange.shard_axes)
        step = next_step(state.count)
        like = updates if params is None else params
        residual = updates if state.residual is None else state.residual
        checks.check_gradients(updates, residual)
        rows, rebuild = present(updates, residual, like=like, layout=exchange.layout)
        leaves, gs, waited = ([row[i] for row in rows] for i in range(3))
        if state.residual is None:
            means, unsent = send(exchange, gs, leaves, like, step)
            pairs = zip(means, unsent, strict=True)
            both = [mean.astype(jnp.float32) + e for mean, e in pairs]
            new = RandkCompressState(unless(skip, state.count, step), None)
            return rebuild(_like(both, gs)), chosen(skip, new)
        wide = [g.astype(jnp.float32) + e for g, e in zip(gs, waited, strict=True)]
        narrow = [round_to(x, g.dtype) for x, g in zip(wide, gs, strict=True)]
        # Sent in the dtype of the gradients, which is the wire's where no payload is.
        means, unsent = send(exchange, narrow, leaves, like, step)
        # What a narrow gradient cannot hold of x waits, too.
        rounded = [x - y.astype(jnp.float32) for x, y in zip(wide, narrow, strict=True)]
        unsent = [e + x for e, x in zip(unsent, rounded, strict=True)]
        new = RandkCompressState(
            unless(skip, state.count, step),
            keep_absent(rebuild(unless(skip, waited, unsent)), state.residual),
        )
        return rebuild(_like(means, gs)), chosen(skip, new)

    tx = optax.GradientTransformationExtraArgs(init, update)
    tx = on_shards(tx, exchange)
    return RandkCompress(tx.init, tx.update, exchange)


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
