"""The selected blocks of a tree: packed, exchanged, and put back."""

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from slamb_jax._tree.leaves import Leaf, keep_absent, leaves_of, present
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

    def choose(
        self, states: tuple[State, ...], leaves: Sequence[Leaf]
    ) -> "SelectionAtStep":
        """With the choice of this step, from the states before it."""
        chosen = {
            leaf.index: self.selection.choose(states[leaf.index], leaf)
            for leaf in leaves
            if not self.selection.dense(leaf)
        }
        return dataclasses.replace(self, states=chosen)

    def learn(
        self,
        before: tuple[State, ...],
        leaves: Sequence[Leaf],
        means: Sequence[jax.Array],
        *,
        accumulated: bool,
    ) -> tuple[State, ...]:
        """The states with what the means of the exchanged blocks tell."""
        new = list(before)
        for leaf, mean in zip(leaves, means, strict=True):
            if (chosen := self.states.get(leaf.index)) is not None:
                new[leaf.index] = self.selection.learn(
                    before[leaf.index], chosen, leaf, mean, accumulated=accumulated
                )
        return tuple(new)

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
    return tuple(None if selection.dense(x) else selection.init(x) for x in leaves)


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
    if not exchange.exchanges_momentum:
        return updates, residual, state
    kept = () if residual is None else (residual,)
    rows, rebuild = present(updates, *kept, like=params, layout=exchange.layout)
    leaves, gs = [row[0] for row in rows], [row[1] for row in rows]
    if state is not None and params is None and len(rows) < len(state):
        raise ValueError(
            "params must be given where gradients are None and the selection keeps a "
            "state: without them nothing tells which leaf a state is of"
        )
    at_step = selection_at(exchange, updates if params is None else params, step)
    if state is not None:
        at_step = at_step.choose(state, leaves)

    def exchanged(now: SelectionAtStep) -> tuple[Any, Any, SelectionState]:
        blocks = [now.blocks(leaf) for leaf in leaves]
        if residual is None:
            packed = map_rows(Blocks.pack, blocks, gs)
            means = means_over_workers(packed, leaves, exchange, exchange.payload, step)
            return map_rows(Blocks.unpack, blocks, means, gs), None, learned(now, means)
        es = [row[2] for row in rows]
        xs = [g.astype(jnp.float32) + e for g, e in zip(gs, es, strict=True)]
        wide = map_rows(Blocks.pack, blocks, xs)
        packed = [round_to(x, g.dtype) for x, g in zip(wide, gs, strict=True)]
        found = exchange_means(
            packed, leaves, exchange, exchange.payload, step, with_errors=True
        )
        errors = map_rows(operator.sub, wide, found.sent)
        if found.server_error is not None:
            errors = map_rows(operator.add, errors, found.server_error)
        us = gs
        if keep_residual:  # what is not selected waits, too
            us, es = [jnp.zeros_like(g) for g in gs], xs
        return (
            map_rows(Blocks.unpack, blocks, found.means, us),
            map_rows(Blocks.unpack, blocks, errors, es),
            learned(now, found.means),
        )

    def learned(now: SelectionAtStep, means: list[jax.Array]) -> SelectionState:
        if state is None:
            return None
        return now.learn(state, leaves, means, accumulated=keep_residual)

    us, es, new_state = at_step.in_phase(exchanged)
    if residual is not None:
        residual = keep_absent(rebuild(es), residual)
    return rebuild(us), residual, new_state


def means_over_workers(
    arrays: Sequence[jax.Array],
    leaves: Sequence[Leaf],
    exchange: Exchange,
    payload: Payload,
    step: jax.Array,
) -> list[jax.Array]:
    """Means over the workers, in the wire format of a payload."""
    if payload is None and exchange.local_axis_name is None:
        return collectives.pmean(arrays, exchange.axis_name)
    return exchange_means(arrays, leaves, exchange, payload, step).means


def map_rows(fun: Callable[..., Any], *columns: Sequence[Any]) -> list[Any]:
    """``map`` over columns of equal length."""
    return [fun(*row) for row in zip(*columns, strict=True)]


def _divmod(x: jax.Array, divisor: int) -> tuple[jax.Array, jax.Array]:
    """Quotient and remainder of what is not negative, in few instructions."""
    if divisor & (divisor - 1) == 0:
        bits = divisor.bit_length() - 1
        return lax.shift_right_logical(x, np.int32(bits)), x & np.int32(divisor - 1)
    return lax.div(x, np.int32(divisor)), lax.rem(x, np.int32(divisor))
