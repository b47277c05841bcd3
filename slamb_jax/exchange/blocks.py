"""The selected blocks of a tree: packed, exchanged, and put back."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from slamb_jax._tree.leaves import Leaf, flatten_numbered, leaves_of
from slamb_jax._tree.rounding import round_to
from slamb_jax.exchange import collectives
from slamb_jax.exchange.means import exchange_means
from slamb_jax.exchange.payloads import Payload
from slamb_jax.exchange.selections import Selection, State
from slamb_jax.exchange.selections.selection import T
from slamb_jax.exchange.settings import Exchange

SelectionState = tuple[State, ...] | None  # of each leaf; None for stateless ones


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The blocks of a leaf that are exchanged at one step.

    They are gathered from and scattered into the leaf's own shape: XLA updates no
    reshaped array in place.
    """

    block_size: int
    starts: jax.Array | None  # coordinates, (slots, ndim); None: the leaf is dense
    used: jax.Array  # which slots hold a block, (slots,)

    def pack(self, x: jax.Array) -> jax.Array:
        """The blocks of ``x``: (slots, block_size); any block in an unused slot."""
        if self.starts is None:
            return x
        x = jnp.atleast_1d(x)
        numbers = lax.GatherDimensionNumbers(
            offset_dims=(1,),
            collapsed_slice_dims=tuple(range(x.ndim - 1)),
            start_index_map=tuple(range(x.ndim)),
        )
        sizes = (1,) * (x.ndim - 1) + (self.block_size,)
        # XLA clamps an index beyond the last by itself; "clip" would do it twice.
        mode = lax.GatherScatterMode.PROMISE_IN_BOUNDS
        return lax.gather(x, self.starts, numbers, sizes, mode=mode)

    def unpack(self, packed: jax.Array, x: jax.Array) -> jax.Array:
        """``x`` with these blocks replaced."""
        if self.starts is None:
            return packed
        shape, x = x.shape, jnp.atleast_1d(x)
        numbers = lax.ScatterDimensionNumbers(
            update_window_dims=(1,),
            inserted_window_dims=tuple(range(x.ndim - 1)),
            scatter_dims_to_operand_dims=tuple(range(x.ndim)),
        )
        # Unused slots, beyond the last block, are dropped; no other repeats.
        x = lax.scatter(
            x, self.starts, packed, numbers, unique_indices=True, mode="drop"
        )
        return x.reshape(shape)


@dataclasses.dataclass(frozen=True)
class SelectionAtStep:
    """A selection at one step, with the states of its leaves if it has any."""

    selection: Selection
    step: jax.Array
    states: Mapping[int, State] = dataclasses.field(default_factory=dict)

    def blocks(self, leaf: Leaf) -> Blocks:
        """The blocks of the leaf that are exchanged."""
        if self.selection.dense(leaf):
            return Blocks(1, None, jnp.ones(0, bool))
        block_size = self.selection.block_size(leaf)
        index = self.selection.blocks(self.step, leaf, self.states.get(leaf.index))
        used = index < leaf.size // block_size
        shape = leaf.shape or (1,)
        coordinates = []
        for size in (shape[-1] // block_size, *shape[-2:0:-1])[: len(shape) - 1]:
            index, coordinate = _divmod(index, size)
            coordinates.append(coordinate)
        # An unused slot is beyond the first dimension.
        coordinates = [index, *reversed(coordinates)]
        coordinates[-1] = coordinates[-1] * block_size
        return Blocks(block_size, jnp.stack(coordinates, -1), used)

    def age(self, leaf: Leaf) -> jax.Array | None:
        """Steps since each block was exchanged; None for a dense leaf."""
        if self.selection.dense(leaf):
            return None
        return self.selection.age(self.step, leaf, self.states.get(leaf.index))

    def in_phase(self, fun: Callable[["SelectionAtStep"], T]) -> T:
        """``fun`` of the selection in force, in a branch of its own if there are many.

        Needed wherever :meth:`blocks` is asked.
        """
        return self.selection.at(
            self.step, lambda phase: fun(dataclasses.replace(self, selection=phase))
        )


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
    at_step = dataclasses.replace(at_step, states=chosen)

    def exchanged(at_step: SelectionAtStep) -> tuple[Any, Any, SelectionState]:
        blocks = {i: at_step.blocks(leaf) for i, leaf in present.items()}
        if es is None:
            packed = [block.pack(gs[i]) for i, block in blocks.items()]
            means = means_over_workers(packed, exchange, exchange.payload, step)
            return _unpack(gs, blocks, means), None, learn(at_step, means)
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


def means_over_workers(
    arrays: Sequence[jax.Array], exchange: Exchange, payload: Payload, step: jax.Array
) -> list[jax.Array]:
    """Means over the workers, in the wire format of a payload."""
    if payload is None and exchange.local_axis_name is None:
        return collectives.pmean(arrays, exchange.axis_name)
    return exchange_means(arrays, exchange, payload, step).means


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


def _divmod(x: jax.Array, divisor: int) -> tuple[jax.Array, jax.Array]:
    """Quotient and remainder of what is not negative, in few instructions."""
    if divisor & (divisor - 1) == 0:
        bits = divisor.bit_length() - 1
        return lax.shift_right_logical(x, np.int32(bits)), x & np.int32(divisor - 1)
    return lax.div(x, np.int32(divisor)), lax.rem(x, np.int32(divisor))
