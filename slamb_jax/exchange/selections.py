"""Which coordinates of the momentum SLAMB exchanges at a step."""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from slamb_jax._core.checks import check_integer, check_range
from slamb_jax._core.leaves import Leaf
from slamb_jax._core.rounding import hash_u32, hash_words

__all__ = ["Leaf", "Selection", "Strided"]

_LARGEST_MIN_SIZE = 9000  # the authors' grad_size_thr
_DENSE_SHARE = 0.01  # of all parameters: the most that small matrices may hold
_TILE = 8, 128  # rows and columns of a TPU's memory
_WIDTHS = (128, 64, 32, 16, 8, 4, 2)
_STORED = 2**17  # groups: up to so many, their numbers are a constant of the program


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


@dataclasses.dataclass(frozen=True)
class Strided(Selection):
    r"""A round robin over blocks: one block of every c, each group out of step.

    The leaf's d elements, in row-major order, are divided into blocks of w neighbours,
    and those into groups of c. At step t group j exchanges its block
    :math:`(t + o_j) \bmod c`, where the offset :math:`o_j` is a hash of (seed, leaf,
    j). The age of block i of the group is :math:`\min(t, (t + o_j - i) \bmod c)`.
    Nothing is stored or permuted: blocks are copied in the order of memory. In large
    leaves a group has the blocks of one row in c neighbouring tiles of 8 rows, so that
    a TPU moves nothing within its tiles.

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
        least = _LARGEST_MIN_SIZE if self.min_size is None else self.min_size
        small = len(leaf.layer_shape) <= 1 or leaf.layer_size < least
        return small or leaf.size == 0 or self.period == 1

    def block_size(self, leaf: Leaf) -> int:
        return next((w for w in _WIDTHS if self._fits(leaf, 1, w)), 1)

    def blocks(self, step: jax.Array, leaf: Leaf) -> jax.Array:
        rows, columns = self._rows(leaf), self._columns(leaf)
        place = lax.rem(self._place(step, leaf), np.int32(self.period))
        index = _numbers(len(place), jnp.int32)
        if rows == 1:
            index = place + np.int32(self.period) * index
        else:
            chunk, row = divided(index, rows)
            above, column = divided(place + np.int32(self.period) * chunk, columns)
            index = (above * np.int32(rows) + row) * np.int32(columns) + column
        count = leaf.size // self.block_size(leaf)
        # Only a last group that is not full has slots beyond the leaf.
        uneven = count // rows % self.period
        return jnp.minimum(index, np.int32(count)) if uneven else index

    def age(self, step: jax.Array, leaf: Leaf) -> jax.Array:
        # Ages take c values: they are a table that moves with the step, and the
        # division for each block becomes one for each group.
        back = np.arange(self.period, 0, -1, dtype=np.int32)
        since = self._place(step, leaf)[:, None] + back[None]
        since = jnp.minimum(step, lax.rem(since, np.int32(self.period)))
        return self.in_leaf(since, leaf)[:, None]

    def fresh(self, step: jax.Array, leaf: Leaf) -> jax.Array:
        """Which blocks of each group are exchanged: bool (groups, c)."""
        place = lax.rem(self._place(step, leaf), np.int32(self.period))
        return place[:, None] == np.arange(self.period, dtype=np.int32)[None]

    def in_groups(self, x: jax.Array, leaf: Leaf) -> jax.Array:
        """(blocks, ...) in the leaf's order as (groups, c, ...), padded with zeros."""
        rows, rest = self._rows(leaf), x.shape[1:]
        x = x.reshape(-1, rows, self._columns(leaf), *rest).swapaxes(1, 2)
        x = x.reshape(-1, rows, *rest)  # by tiles
        padding = ((0, -len(x) % self.period), *((0, 0) for _ in x.shape[1:]))
        x = jnp.pad(x, padding).reshape(-1, self.period, rows, *rest)
        return x.swapaxes(1, 2).reshape(-1, self.period, *rest)

    def in_leaf(self, x: jax.Array, leaf: Leaf) -> jax.Array:
        """Undoes :meth:`in_groups`."""
        rows, rest = self._rows(leaf), x.shape[2:]
        x = x.reshape(-1, rows, self.period, *rest).swapaxes(1, 2)
        x = x.reshape(-1, rows, *rest)[: leaf.size // self.block_size(leaf) // rows]
        x = x.reshape(-1, self._columns(leaf), rows, *rest).swapaxes(1, 2)
        return x.reshape(-1, *rest)

    def _rows(self, leaf: Leaf) -> int:
        """Rows that take their turns side by side, each with groups of its own."""
        rows, width = _TILE
        even = len(leaf.shape) > 1 and leaf.shape[-2] % rows == 0
        return rows if even and self._fits(leaf, rows, width) else 1

    def _fits(self, leaf: Leaf, rows: int, width: int) -> bool:
        """Whether unused slots cost at most a hundredth with tiles of this size."""
        room = leaf.size // (100 * (self.period + 1))
        return leaf.shape[-1] % width == 0 and rows * width <= room

    def _columns(self, leaf: Leaf) -> int:
        return leaf.shape[-1] // self.block_size(leaf)

    def _place(self, step: jax.Array, leaf: Leaf) -> jax.Array:
        """The block that each group exchanges, modulo c: int32, one per group."""
        rows = self._rows(leaf)
        tiles = leaf.size // (self.block_size(leaf) * rows)
        index = _numbers(-(-tiles // self.period) * rows, jnp.uint32)
        # A hash and not a draw: every worker computes it from the leaf's number alone.
        # Neighbours in a leaf, and equal leaves, do not take their turns together.
        hashed = hash_u32(index, hash_words(self.seed, leaf.index))
        offset = (hashed % np.uint32(self.period)).astype(np.int32)
        return lax.rem(step, np.int32(self.period)) + offset


def elements_sent(selection: Selection, leaf: Leaf) -> int:
    """Elements of the leaf that are exchanged per step, unused slots included."""
    if selection.dense(leaf):
        return leaf.size

    def blocks(step: jax.Array) -> jax.Array:
        return selection.blocks(step, leaf)

    slots = jax.eval_shape(blocks, jax.ShapeDtypeStruct((), jnp.int32)).size
    return slots * selection.block_size(leaf)


def divided(x: jax.Array, by: int) -> tuple[jax.Array, jax.Array]:
    """Quotient and remainder of integers that are not negative, in few instructions."""
    if by & (by - 1) == 0:
        bits = by.bit_length() - 1
        return lax.shift_right_logical(x, np.int32(bits)), x & np.int32(by - 1)
    return lax.div(x, np.int32(by)), lax.rem(x, np.int32(by))


def _numbers(n: int, dtype: DTypeLike) -> Any:
    """0, 1, ..., as a constant where there are few.

    Leaves of one shape then differ in no instruction, and XLA compiles the kernels of
    one for all.
    """
    return np.arange(n, dtype=dtype) if n <= _STORED else lax.iota(dtype, n)


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
