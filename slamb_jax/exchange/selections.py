"""Which coordinates of the momentum SLAMB exchanges at a step."""

import abc
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from slamb_jax._core.checks import check_integer, check_range
from slamb_jax._core.leaves import Leaf, leaves_of
from slamb_jax._core.rounding import hash_u32, hash_words

if TYPE_CHECKING:
    from slamb_jax.exchange.settings import Exchange

__all__ = ["Leaf", "Selection", "Strided"]

_LARGEST_MIN_SIZE = 9000  # the authors' grad_size_thr
_DENSE_SHARE = 0.01  # of all parameters: the most that small matrices may hold
_WIDTHS = (128, 64, 32, 16, 8, 4, 2)
_STORED = 2**17  # groups: up to so many, their numbers are a constant of the program
_MOST_BLOCKS = 2**31 - 2**20  # with room for the numbers of unused slots


class Selection(abc.ABC):
    r"""Which coordinates of the momentum are exchanged at a step.

    A leaf is seen as blocks of neighbours, ``x.reshape(-1, block_size)``. At the step
    :math:`t = 1, 2, \ldots`, an int32 scalar that may be traced, the selection answers
    for one :class:`Leaf` which blocks are exchanged, :math:`M_t`, and the age
    :math:`\tau` of each block. The answers must be the same on every worker; no mask is
    ever communicated. Subclass it for a selection of your own: two methods are enough.

    Examples:
      >>> import jax.numpy as jnp, slamb_jax
      >>> class EveryOther(slamb_jax.selections.Selection):
      ...     def blocks(self, step, leaf):
      ...         return 2 * jnp.arange(leaf.size // 2) + step % 2
      ...     def age(self, step, leaf):
      ...         return jnp.minimum(step, (jnp.arange(leaf.size) + step) % 2)[:, None]
      >>> exchange = slamb_jax.Exchange("data", payload=None, selection=EveryOther())
    """

    def for_leaves(self, leaves: Sequence[Leaf]) -> "Selection":
        """The selection for a model of all these leaves."""
        del leaves
        return self

    def dense(self, leaf: Leaf) -> bool:
        """Whether all of the leaf is exchanged at every step (static)."""
        return len(leaf.layer_shape) <= 1

    def block_size(self, leaf: Leaf) -> int:
        """Neighbours in a block (static): a divisor of the leaf's last dimension."""
        del leaf
        return 1

    @abc.abstractmethod
    def blocks(self, step: jax.Array, leaf: Leaf) -> jax.Array:
        """The blocks that are exchanged: int32 of static length, each once.

        An unused slot holds the number of blocks, which is one beyond the last block.
        """

    @abc.abstractmethod
    def age(self, step: jax.Array, leaf: Leaf) -> jax.Array:
        """Steps since each block was exchanged: int32 of shape (blocks, 1).

        It is 0 for the blocks of this step, and ``step`` for blocks that never were.
        """

    def unit(self, leaf: Leaf) -> int | None:
        """Small leaves may be joined if padded to a multiple of so many elements.

        None for a selection that knows leaves by themselves alone.
        """
        del leaf
        return None


@dataclasses.dataclass(frozen=True)
class Strided(Selection):
    r"""A round robin over blocks: one block of every c, each group out of step.

    The leaf's d elements, in row-major order, are divided into blocks of w neighbours,
    and those into groups of c. At step t group j exchanges its block
    :math:`(t + o_j) \bmod c`, where the offset :math:`o_j` is a hash of (seed, leaf,
    j). The age of block i of the group is :math:`\min(t, (t + o_j - i) \bmod c)`.
    Nothing is stored or permuted: blocks are copied in the order of memory.

    w is the largest power of two that divides the last dimension, at most 128, and
    small enough that unused slots cost at most a hundredth of the payload; 1 where
    that dimension is odd.

    It departs from the paper, whose optimizers store a random permutation. It covers
    the same share of the coordinates, spread evenly, with the same period.

    Args:
      compress_ratio: k in (0, 1]; c is ``max(1, round(1/k))``, and k is 1/c.
      min_size: matrices with fewer elements are exchanged densely, at every step, as
        leaves of one dimension or fewer always are. None: 9000, the authors', or less
        where matrices that small would hold more than 1 % of the parameters.
      seed: changes the offsets; must be the same on all workers.

    Raises:
      ValueError: for a value out of range.

    Examples:
      >>> import jax.numpy as jnp
      >>> from slamb_jax.exchange.selections import Leaf, Strided
      >>> leaf, strided = Leaf(0, (2, 6)), Strided(compress_ratio=0.25, min_size=0)
      >>> fresh = [strided.age(jnp.int32(t), leaf) == 0 for t in (1, 2, 3, 4)]
      >>> print(sum(f.astype(int) for f in fresh).T)  # each once in 4 steps
      [[1 1 1 1 1 1 1 1 1 1 1 1]]
    """

    compress_ratio: float = 0.1
    min_size: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_range("compress_ratio", self.compress_ratio, 0.0, 1.0, open_low=True)
        if self.min_size is not None:
            check_integer("min_size", self.min_size, 0)
        check_integer("seed", self.seed)

    @property
    def period(self) -> int:
        """The period c in steps."""
        return max(1, round(1 / self.compress_ratio))

    def for_leaves(self, leaves: Sequence[Leaf]) -> "Strided":
        """With the ``min_size`` that suits all these leaves, if none is given."""
        if self.min_size is not None:
            return self
        return dataclasses.replace(self, min_size=_min_size_for(leaves))

    def dense(self, leaf: Leaf) -> bool:
        """Leaves of one dimension or fewer, small ones, and all if k is 1."""
        if leaf.parts:  # which are all dense, or none
            return self.dense(leaf.parts[0])
        least = _LARGEST_MIN_SIZE if self.min_size is None else self.min_size
        small = len(leaf.layer_shape) <= 1 or leaf.layer_size < least
        return small or leaf.size == 0 or self.period == 1

    def block_size(self, leaf: Leaf) -> int:
        if leaf.parts:
            return leaf.unit // self.period
        room = leaf.size // (100 * (self.period + 1))
        fits = (w for w in _WIDTHS if leaf.shape[-1] % w == 0 and w <= room)
        return next(fits, 1)

    def blocks(self, step: jax.Array, leaf: Leaf) -> jax.Array:
        place, count = self._place(step, leaf), self._count(leaf)
        index = place + np.int32(self.period) * _numbers(len(place))
        # Only a last group that is not full has slots beyond the leaf.
        return jnp.minimum(index, np.int32(count)) if count % self.period else index

    def age(self, step: jax.Array, leaf: Leaf) -> jax.Array:
        # Ages take c values: they are a table that moves with the step, and the
        # division for each block becomes one for each group.
        back = np.arange(self.period, 0, -1, dtype=np.int32)
        since = self._place(step, leaf)[:, None] + back[None]
        since = jnp.minimum(step, lax.rem(since, np.int32(self.period)))
        return since.reshape(-1, 1)[: self._count(leaf)]

    def unit(self, leaf: Leaf) -> int | None:
        """Whole groups."""
        return self.period * self.block_size(leaf)

    def _count(self, leaf: Leaf) -> int:
        """The blocks of the leaf."""
        return leaf.size // self.block_size(leaf)

    def _place(self, step: jax.Array, leaf: Leaf) -> jax.Array:
        """Which of its blocks each group exchanges: int32 in [0, c), one per group."""
        # A hash and not a draw: every worker computes it from the leaf's number alone.
        # Neighbours in a leaf, and equal leaves, do not take their turns together.
        size = self.period * self.block_size(leaf)
        offsets = []
        for part in leaf.parts or (leaf,):
            number: Any = _numbers(-(-part.size // size)).astype(np.uint32)
            salt = hash_words(self.seed, part.index)
            offsets.append(hash_u32(number, salt) % np.uint32(self.period))
        # Parts are small, so that their numbers are constants.
        offset = np.concatenate(offsets) if leaf.parts else offsets[0]
        turn = lax.rem(step, np.int32(self.period)) + offset.astype(np.int32)
        return lax.rem(turn, np.int32(self.period))


class AtStep(NamedTuple):
    """A selection at one step: what is exchanged of a leaf, and its ages."""

    selection: Selection
    step: jax.Array

    def is_dense(self, leaf: Leaf) -> bool:
        """Whether all of the leaf is exchanged."""
        return self.selection.dense(leaf)

    def pack(self, leaf: Leaf, x: jax.Array) -> jax.Array:
        """The blocks that are exchanged, (slots, block_size); any in an unused slot."""
        if self.is_dense(leaf):
            return x
        x = jnp.atleast_1d(x)
        numbers = lax.GatherDimensionNumbers(
            offset_dims=(1,),
            collapsed_slice_dims=tuple(range(x.ndim - 1)),
            start_index_map=tuple(range(x.ndim)),
        )
        sizes = (1,) * (x.ndim - 1) + (self.selection.block_size(leaf),)
        # XLA clamps an index beyond the last by itself; "clip" would do it twice.
        mode = lax.GatherScatterMode.PROMISE_IN_BOUNDS
        return lax.gather(x, self._starts(leaf), numbers, sizes, mode=mode)

    def unpack(self, leaf: Leaf, packed: jax.Array, x: jax.Array) -> jax.Array:
        """``x`` with these blocks replaced."""
        if self.is_dense(leaf):
            return packed
        shape, x = x.shape, jnp.atleast_1d(x)
        numbers = lax.ScatterDimensionNumbers(
            update_window_dims=(1,),
            inserted_window_dims=tuple(range(x.ndim - 1)),
            scatter_dims_to_operand_dims=tuple(range(x.ndim)),
        )
        # Unused slots, beyond the last block, are dropped; no other repeats.
        return lax.scatter(
            x, self._starts(leaf), packed, numbers, unique_indices=True, mode="drop"
        ).reshape(shape)

    def age(self, leaf: Leaf) -> jax.Array | None:
        """Steps since each block was exchanged; None for a dense leaf."""
        return None if self.is_dense(leaf) else self.selection.age(self.step, leaf)

    def _starts(self, leaf: Leaf) -> jax.Array:
        """The first coordinates of each block that is exchanged, (slots, ndim).

        A flat index would need a reshape, after which XLA copies the leaf in place of
        updating it.
        """
        block_size, shape = self.selection.block_size(leaf), leaf.shape or (1,)
        if leaf.size // block_size > _MOST_BLOCKS:
            raise ValueError(
                f"a leaf of shape {leaf.shape} has more blocks of {block_size} than "
                "int32 numbers: pad its last dimension to a multiple of 128, or cut it"
            )
        index, coordinates = self.selection.blocks(self.step, leaf), []
        for size in (shape[-1] // block_size, *shape[-2:0:-1])[: len(shape) - 1]:
            coordinates.append(lax.rem(index, np.int32(size)))
            index = lax.div(index, np.int32(size))
        # An unused slot is beyond the first dimension.
        coordinates = [index, *reversed(coordinates)]
        coordinates[-1] = coordinates[-1] * np.int32(block_size)
        return jnp.stack(coordinates, -1)


def selection_at(exchange: "Exchange", params: Any, step: jax.Array) -> AtStep | None:
    """The exchange's selection at a step; None where it has none."""
    if exchange.selection is None:
        return None
    leaves = leaves_of(params, exchange.layout)
    return AtStep(exchange.selection.for_leaves(leaves), step)


def unit_of_blocks(at: AtStep | None, leaf: Leaf) -> int | None:
    """The elements to a multiple of which a leaf is padded to be joined with others."""
    return 1 if at is None or at.is_dense(leaf) else at.selection.unit(leaf)


def elements_sent(selection: Selection, leaf: Leaf) -> int:
    """Elements of the leaf that are exchanged per step, unused slots included."""
    if selection.dense(leaf):
        return leaf.size
    step = jax.ShapeDtypeStruct((), jnp.int32)
    blocks = jax.eval_shape(lambda step: selection.blocks(step, leaf), step)
    return blocks.size * selection.block_size(leaf)


def _numbers(n: int) -> jax.Array | np.ndarray:
    """0, 1, ..., as a constant where there are few.

    Leaves of one shape then differ in no instruction, and XLA compiles the kernels of
    one for all.
    """
    return np.arange(n, dtype=np.int32) if n <= _STORED else lax.iota(jnp.int32, n)


def _min_size_for(leaves: Sequence[Leaf]) -> int:
    """The size below which matrices together hold at most 1 % of the parameters."""
    matrices = sorted(
        (x.layer_size, x.layer_size * x.layers)
        for x in leaves
        if len(x.layer_shape) > 1
    )
    room = _DENSE_SHARE * sum(x.layer_size * x.layers for x in leaves)
    for size, elements in matrices:
        room -= elements
        if room < 0:
            return min(size, _LARGEST_MIN_SIZE)
    return _LARGEST_MIN_SIZE
