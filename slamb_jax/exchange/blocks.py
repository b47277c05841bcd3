"""The blocks of a leaf that are exchanged at a step: packed, and put back."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from jax import lax

from slamb_jax._core.leaves import Leaf, leaves_of
from slamb_jax._core.platform import materialized
from slamb_jax._core.platform_masked import gather_or_sum, scatter_or_choose
from slamb_jax.exchange.selections import Selection, Strided, divided
from slamb_jax.exchange.settings import Exchange

_MOST_BLOCKS = 2**31 - 2**20  # with room for the numbers of unused slots


@dataclasses.dataclass(frozen=True)
class AtStep:
    """A selection at one step."""

    selection: Selection
    step: jax.Array

    def blocks(self, leaf: Leaf) -> "Blocks":
        """The blocks of the leaf that are exchanged."""
        if self.selection.dense(leaf):
            return Blocks(leaf, self, 1, None, jnp.ones(0, bool))
        block_size = self.selection.block_size(leaf)
        if leaf.size // block_size > _MOST_BLOCKS:
            raise ValueError(
                f"a leaf of {leaf.size} elements, {leaf.shape}, has more blocks than "
                f"int32 can number where a block has {block_size}: pad its last "
                "dimension to a multiple of 128, or keep it as several leaves"
            )
        # As coordinates of the leaf's own shape: a flat index would need a reshape,
        # after which XLA copies the leaf in place of updating it.
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
        return Blocks(leaf, self, block_size, jnp.stack(coordinates, -1), used)

    def age(self, leaf: Leaf) -> jax.Array | None:
        """Steps since each block was exchanged; None for a dense leaf."""
        if self.selection.dense(leaf):
            return None
        return self.selection.age(self.step, leaf)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The blocks of a leaf that are exchanged at one step.

    They are gathered from and scattered into the leaf's own shape: XLA updates no
    reshaped array in place.
    """

    leaf: Leaf
    at: AtStep
    block_size: int
    starts: jax.Array | None  # coordinates, (slots, ndim); None: the leaf is dense
    used: jax.Array  # which slots hold a block, (slots,)

    def pack(self, x: jax.Array) -> jax.Array:
        """The blocks of ``x``: (slots, block_size); any block in an unused slot."""
        if self.starts is None:
            return x
        # Of another selection nobody knows one block of each group.
        if not isinstance(self.at.selection, Strided):
            return self._gathered(x)
        return gather_or_sum(self._gathered, self._summed, x)

    def unpack(self, packed: jax.Array, x: jax.Array) -> jax.Array:
        """``x`` with these blocks replaced."""
        if self.starts is None:
            return packed
        packed = packed.reshape(-1, self.block_size)
        if not isinstance(self.at.selection, Strided):
            return self._scattered(packed, x)
        return scatter_or_choose(self._scattered, self._chosen, packed, x)

    def _gathered(self, x: jax.Array) -> jax.Array:
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

    def _summed(self, x: jax.Array) -> jax.Array:
        """The sum over each group, of whose blocks all but one are zeros."""
        strided = self._strided
        groups = strided.in_groups(x.reshape(-1, self.block_size), self.leaf)
        fresh = strided.fresh(self.at.step, self.leaf)[..., None]
        return jnp.sum(jnp.where(fresh, groups, jnp.zeros_like(groups)), 1)

    def _scattered(self, packed: jax.Array, x: jax.Array) -> jax.Array:
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

    def _chosen(self, packed: jax.Array, x: jax.Array) -> jax.Array:
        """A choice at every element between ``x`` and its group's packed block."""
        # Otherwise it is gathered once more, and an array that is read elsewhere
        # cannot change in place.
        packed = materialized(packed)
        fresh = self._strided.fresh(self.at.step, self.leaf)
        shape = (*fresh.shape, self.block_size)
        everywhere = jnp.broadcast_to(packed[:, None], shape)
        fresh = jnp.broadcast_to(fresh[..., None], shape)
        everywhere, fresh = (
            self._strided.in_leaf(y, self.leaf).reshape(x.shape)
            for y in (everywhere, fresh)
        )
        return jnp.where(fresh, everywhere, x)

    @property
    def _strided(self) -> Strided:
        assert isinstance(self.at.selection, Strided)
        return self.at.selection


def selection_at(exchange: Exchange, params: optax.Params, step: jax.Array) -> AtStep:
    """The exchange's selection at a step."""
    assert exchange.selection is not None
    leaves = leaves_of(params, exchange.layout)
    return AtStep(exchange.selection.for_leaves(leaves), step)
