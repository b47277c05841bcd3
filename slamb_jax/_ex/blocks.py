"""The selected blocks of a tree: packed, exchanged, and put back."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from slamb_jax._ex.selections import Selection, Strided
from slamb_jax._ex.selections.selection import T
from slamb_jax._ex.selections.strided import divided
from slamb_jax._leaves import Leaf, leaves_of
from slamb_jax.exchange import Exchange

_MOST_BLOCKS = 2**31 - 2**20  # and room for unused slots behind them


@dataclasses.dataclass(frozen=True)
class Turns:
    """The groups of a leaf's blocks, of which each exchanges one."""

    strided: Strided
    leaf: Leaf
    fresh: jax.Array  # which blocks are exchanged, (groups, c)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The blocks of a leaf that are exchanged at one step.

    They are gathered from and scattered into the leaf's own shape: XLA updates no
    reshaped array in place.
    """

    block_size: int
    starts: jax.Array | None  # coordinates, (slots, ndim); None: the leaf is dense
    used: jax.Array  # which slots hold a block, (slots,)
    turns: Turns | None = None  # where slot j is of the j-th group of blocks

    def pack(self, x: jax.Array) -> jax.Array:
        """The blocks of ``x``: (slots, block_size); any block in an unused slot."""
        if self.starts is None:
            return x
        if self.turns is None:
            return self.gathered(x)
        return lax.platform_dependent(x, tpu=self.summed, default=self.gathered)

    def summed(self, x: jax.Array) -> jax.Array:
        """:meth:`pack` as a sum over each group, of which all but one are zeros.

        A TPU would gather the blocks one by one.
        """
        assert self.turns is not None
        blocks = x.reshape(-1, self.block_size)
        groups = self.turns.strided.in_groups(blocks, self.turns.leaf)
        chosen = jnp.where(self.turns.fresh[..., None], groups, jnp.zeros_like(groups))
        return jnp.sum(chosen, 1)

    def gathered(self, x: jax.Array) -> jax.Array:
        """:meth:`pack` as a gather."""
        assert self.starts is not None
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
        """``x`` with these blocks replaced.

        On a GPU a scatter is a kernel of its own, which needs ``x`` in memory, and on a
        TPU a loop; a choice at every element becomes a part of what uses it.
        """
        if self.starts is None:
            return packed
        if self.turns is None:
            return self.in_place(packed, x)
        return lax.platform_dependent(
            packed,
            x,
            cuda=self.fused,
            rocm=self.fused,
            tpu=self.fused,
            default=self.in_place,
        )

    def fused(self, packed: jax.Array, x: jax.Array) -> jax.Array:
        """:meth:`unpack` as a choice at every element."""
        assert self.turns is not None
        # Not gathered once more there: what is read elsewhere cannot change in place.
        packed = lax.optimization_barrier(packed)
        shape = (*self.turns.fresh.shape, self.block_size)
        everywhere = jnp.broadcast_to(packed[:, None], shape)
        fresh = jnp.broadcast_to(self.turns.fresh[..., None], shape)
        everywhere, fresh = (
            self.turns.strided.in_leaf(y, self.turns.leaf).reshape(x.shape)
            for y in (everywhere, fresh)
        )
        return jnp.where(fresh, everywhere, x)

    def store(self, packed: jax.Array, x: jax.Array) -> jax.Array:
        """:meth:`unpack` for an ``x`` that is kept from step to step, in place."""
        if self.starts is None:
            return packed
        # All is read from ``x`` before it changes: XLA would copy it otherwise.
        packed = lax.optimization_barrier(packed)
        if self.turns is None:
            return self.in_place(packed, x)
        return lax.platform_dependent(packed, x, tpu=self.fused, default=self.in_place)

    def in_place(self, packed: jax.Array, x: jax.Array) -> jax.Array:
        """:meth:`unpack` as a scatter."""
        assert self.starts is not None
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
    """A selection at one step."""

    selection: Selection
    step: jax.Array

    def blocks(self, leaf: Leaf) -> Blocks:
        """The blocks of the leaf that are exchanged."""
        if self.selection.dense(leaf):
            return Blocks(1, None, jnp.ones(0, bool))
        block_size = self.selection.block_size(leaf)
        if leaf.size // block_size > _MOST_BLOCKS:
            raise ValueError(
                f"a leaf of {leaf.size} elements, {leaf.shape}, has more blocks than "
                f"int32 can number where a block has {block_size}: pad its last "
                "dimension to a multiple of 128, or keep it as several leaves"
            )
        index = self.selection.blocks(self.step, leaf)
        used = index < leaf.size // block_size
        shape = leaf.shape or (1,)
        coordinates = []
        for size in (shape[-1] // block_size, *shape[-2:0:-1])[: len(shape) - 1]:
            index, coordinate = divided(index, size)
            coordinates.append(coordinate)
        # An unused slot is beyond the first dimension.
        coordinates = [index, *reversed(coordinates)]
        coordinates[-1] = coordinates[-1] * block_size
        blocks = Blocks(block_size, jnp.stack(coordinates, -1), used)
        if not isinstance(self.selection, Strided):
            return blocks
        fresh = self.selection.fresh(self.step, leaf)
        return dataclasses.replace(blocks, turns=Turns(self.selection, leaf, fresh))

    def age(self, leaf: Leaf) -> jax.Array | None:
        """Steps since each block was exchanged; None for a dense leaf."""
        if self.selection.dense(leaf):
            return None
        return self.selection.age(self.step, leaf)

    def in_phase(self, fun: Callable[["SelectionAtStep"], T]) -> T:
        """``fun`` of the selection in force, in a branch of its own if there are many.

        Needed wherever :meth:`blocks` is asked.
        """
        return self.selection.at(
            self.step, lambda phase: fun(dataclasses.replace(self, selection=phase))
        )


def selection_at(
    exchange: Exchange, params: optax.Params, step: jax.Array
) -> SelectionAtStep:
    """The selection of a step."""
    selection = exchange.selection_for(leaves_of(params, exchange.layout))
    return SelectionAtStep(selection, step)


def map_rows(fun: Callable[..., Any], *columns: Sequence[Any]) -> list[Any]:
    """``map`` over columns of equal length."""
    return [fun(*row) for row in zip(*columns, strict=True)]
