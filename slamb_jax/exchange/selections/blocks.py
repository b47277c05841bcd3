"""The blocks of a leaf that are exchanged at a step: packing and unpacking them."""

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from slamb_jax._tree.leaves import Leaf
from slamb_jax.exchange.selections.selection import Selection, State, T


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


def elements_sent(selection: Selection, leaf: Leaf) -> int:
    """Elements of the leaf that are exchanged per step, unused slots included."""
    if selection.dense(leaf):
        return leaf.size

    def blocks(step: jax.Array) -> jax.Array:
        return selection.blocks(step, leaf, selection.choose(selection.init(leaf), leaf))

    slots = jax.eval_shape(blocks, jax.ShapeDtypeStruct((), jnp.int32)).size
    return slots * selection.block_size(leaf)


def _divmod(x: jax.Array, divisor: int) -> tuple[jax.Array, jax.Array]:
    """Quotient and remainder of what is not negative, in few instructions."""
    if divisor & (divisor - 1) == 0:
        bits = divisor.bit_length() - 1
        return lax.shift_right_logical(x, np.int32(bits)), x & np.int32(divisor - 1)
    return lax.div(x, np.int32(divisor)), lax.rem(x, np.int32(divisor))
