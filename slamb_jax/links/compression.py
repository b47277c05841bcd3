"""Random-k compression with error feedback: a share of the updates is exchanged."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from slamb_jax._tree.axes import check_local
from slamb_jax._tree.checks import check_bool, check_floating
from slamb_jax._tree.leaves import Leaf, flatten_numbered, leaves_of
from slamb_jax._tree.rounding import round_to
from slamb_jax.exchange.means import exchange_means
from slamb_jax.exchange.selections import (
    Blocks,
    Selection,
    SelectionAtStep,
    State,
)
from slamb_jax.exchange.settings import Exchange, check_exchange
from slamb_jax.links.shards import on_shards

SelectionState = tuple[State, ...] | None  # of each leaf; None for stateless ones


class RandkCompressState(NamedTuple):
    """State of :func:`randk_compress_with_error_feedback`."""

    count: jax.Array  # type: ignore[assignment]  # int32, shape []
    residual: optax.Updates | None  # float32, as updates; None if nothing is kept
    selection: SelectionState = None


def randk_compress_with_error_feedback(
    exchange: Exchange, *, keep_residual: bool = True
) -> optax.GradientTransformationExtraArgs:
    r"""Averages a selected share of the updates over the workers; the rest waits.

    With :math:`M_t` the coordinates that the exchange selects at step t:

    .. math::

      x &= g + e \\
      u[M_t] &= \text{mean over workers of } x[M_t], \quad u[\neg M_t] = 0 \\
      e &= x - (\text{what this worker sent})

    which is classical error feedback and goes in front of any optimizer. With
    ``keep_residual=False`` there is no :math:`e` and the rest passes through,
    :math:`u[\neg M_t] = g[\neg M_t]`: that is how :func:`mask_momentum` uses it, whose
    momentum is the memory. No indices are communicated: every worker knows
    :math:`M_t`.

    Args:
      exchange: between whom, which coordinates when, and in what wire format.
      keep_residual: hold what was not sent in a residual, which is added at the next
        step. False: it passes through, and a residual is kept only of a payload with
        ``error_feedback``, of what rounding took:
        :math:`x[M_t] = (g + e)[M_t]`, :math:`e[M_t] = (x - Q(x))[M_t]`.

    Returns:
      A :class:`optax.GradientTransformationExtraArgs`. A residual is float32 and also
      keeps what rounding took of what the worker sent, and with a quantizer n times
      what it took of the means that this worker rounded for all, since the worker
      sends an nth of the next.

    Raises:
      ValueError: in ``update``, if an axis is not bound, or if the updates were
        averaged already and the types show it (``shard_map`` with ``check_vma=True``).

    Examples:
      >>> import jax.numpy as jnp, optax, slamb_jax
      >>> exchange = slamb_jax.Exchange(compress_ratio=0.5, min_size=0)
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
      Xu et al., `SLAMB: Accelerated Large Batch Training with Sparse Communication
      <https://proceedings.mlr.press/v202/xu23q.html>`_, ICML 2023; Stich et al.,
      `Sparsified SGD with Memory <https://arxiv.org/abs/1809.07599>`_, 2018.
    """
    check_exchange(exchange)
    check_bool("keep_residual", keep_residual)

    def init(params: optax.Params) -> RandkCompressState:
        check_floating(params, "params")
        residual = None
        if keep_residual or exchange.keeps_rounding_error:
            residual = optax.tree.zeros_like(params, dtype=jnp.float32)
        selection = init_selection(exchange, params)
        return RandkCompressState(jnp.zeros([], jnp.int32), residual, selection)

    def update(
        updates: optax.Updates,
        state: RandkCompressState,
        params: optax.Params | None = None,
        **extra_args: object,
    ) -> tuple[optax.Updates, RandkCompressState]:
        del extra_args
        check_local(updates, exchange.axis_name)
        step = optax.safe_increment(state.count)
        updates, residual, selection = compress(
            exchange, updates, state.residual, state.selection, step, params,
            keep_residual=keep_residual,
        )  # fmt: skip
        return updates, RandkCompressState(step, residual, selection)

    return on_shards(optax.GradientTransformationExtraArgs(init, update), exchange)


def init_selection(exchange: Exchange, params: optax.Params) -> SelectionState:
    """The selection's state before step 1."""
    if not exchange.stateful:
        return None
    leaves = leaves_of(params, exchange.layout)
    selection = exchange.selection_for(leaves)
    return tuple(
        None if selection.dense(leaf) else selection.init(leaf) for leaf in leaves
    )


def selection_at(
    exchange: Exchange,
    params: optax.Params,
    step: jax.Array,
    state: SelectionState = None,
) -> SelectionAtStep:
    """The selection of a step whose choice is in ``state``, if it has a state."""
    selection = exchange.selection_for(leaves_of(params, exchange.layout))
    return SelectionAtStep(selection, step, dict(enumerate(state or ())))


def compress(
    exchange: Exchange,
    updates: optax.Updates,
    residual: optax.Updates | None,
    state: SelectionState,
    step: jax.Array,
    params: optax.Params | None,
    *,
    keep_residual: bool,
) -> tuple[optax.Updates, optax.Updates | None, SelectionState]:
    """The updates with their selected blocks averaged, the residual, the new state."""
    leaves, gs, treedef = flatten_numbered(updates, params, exchange.layout)
    present = {i: leaf for i, leaf in enumerate(leaves) if leaf is not None}
    if state is not None and params is None and len(present) < len(leaves):
        raise ValueError(
            "params must be given where gradients are None and the selection keeps a "
            "state: without them nothing tells which leaf a state is of"
        )
    es = None if residual is None else treedef.flatten_up_to(residual)
    at_step = selection_at(exchange, updates if params is None else params, step)
    chosen = _choose(at_step.selection, state, list(present.values()))
    at_step = SelectionAtStep(at_step.selection, step, chosen)

    def exchanged(at_step: SelectionAtStep) -> tuple[Any, Any, SelectionState]:
        blocks = {i: at_step.blocks(leaf) for i, leaf in present.items()}
        if es is None:
            packed = [block.pack(gs[i]) for i, block in blocks.items()]
            found = exchange_means(packed, exchange, exchange.payload, step)
            return _unpack(gs, blocks, found.means), None, learn(at_step, found.means)
        xs = {i: gs[i].astype(jnp.float32) + es[i] for i in present}
        wide = [block.pack(xs[i]) for i, block in blocks.items()]
        packed = [round_to(x, gs[i].dtype) for i, x in zip(blocks, wide, strict=True)]
        found = exchange_means(
            packed, exchange, exchange.payload, step, with_errors=True
        )
        errors = [x - sent for x, sent in zip(wide, found.sent, strict=True)]
        if found.server_error is not None:
            errors = [a + b for a, b in zip(errors, found.server_error, strict=True)]
        us, rest = list(gs), list(es)
        if keep_residual:  # what is not selected waits, too
            us = [None if g is None else jnp.zeros_like(g) for g in gs]
            rest = [xs.get(i, e) for i, e in enumerate(es)]
        return (
            _unpack(us, blocks, found.means),
            _unpack(rest, blocks, errors),
            learn(at_step, found.means),
        )

    def learn(at_step: SelectionAtStep, means: Sequence[jax.Array]) -> SelectionState:
        if state is None:
            return None
        new = list(state)
        for leaf, mean in zip(present.values(), means, strict=True):
            if leaf.index in chosen:
                new[leaf.index] = at_step.selection.learn(
                    state[leaf.index], chosen[leaf.index], leaf, mean,
                    accumulated=keep_residual,
                )  # fmt: skip
        return tuple(new)

    us, es, state = at_step.in_phase(exchanged)
    residual = None if es is None else treedef.unflatten(es)
    return treedef.unflatten(us), residual, state


def _choose(
    selection: Selection, state: SelectionState, leaves: Sequence[Leaf]
) -> dict[int, State]:
    """The states of these leaves with this step's choice."""
    if state is None:
        return {}
    return {
        leaf.index: selection.choose(state[leaf.index], leaf)
        for leaf in leaves
        if not selection.dense(leaf)
    }


def _unpack(
    into: Sequence[Any], blocks: dict[int, Blocks], packed: Sequence[jax.Array]
) -> list[Any]:
    """``into`` with these blocks replaced."""
    out = list(into)
    for (i, block), x in zip(blocks.items(), packed, strict=True):
        out[i] = block.unpack(x, out[i])
    return out
