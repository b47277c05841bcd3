"""The default selection: a round robin over blocks of neighbours."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from slamb_jax._tree.hashing import hash_u32, hash_words
from slamb_jax._tree.leaves import Leaf
from slamb_jax.exchange.selections.selection import RandK, State

_STORED = 2**17  # groups: above, as in a leaf without even dimensions, none is stored


class RoundRobin(RandK):
    """Exchanges each coordinate once in ``c = max(1, round(1/k))`` steps."""

    @property
    def period(self) -> int:
        """The period c in steps; the ratio that is reached is 1/c."""
        return max(1, round(1 / self.compress_ratio))

    def dense(self, leaf: Leaf) -> bool:
        return super().dense(leaf) or self.period == 1


@dataclasses.dataclass(frozen=True)
class Strided(RoundRobin):
    r"""A round robin over blocks: one block of every c, each group out of step.

    The leaf's d elements, in row-major order, are divided into blocks of w neighbours,
    and those into groups of c. At step t group j exchanges its block
    :math:`(t + o_j) \bmod c`, where the offset :math:`o_j` is a hash of (seed, leaf,
    j). The age of block i of the group is :math:`\min(t, (t + o_j - i) \bmod c)`.
    Nothing is stored or permuted: blocks are copied in the order of memory.

    w is the largest power of two that divides the last dimension, at most 128, and
    small enough that unused slots cost at most a hundredth of the payload; 1 where
    that dimension is odd.

    It departs from the paper, whose optimizers store a random permutation: it covers
    the same share of the coordinates, spread evenly, with the same period.

    Args:
      compress_ratio: k in (0, 1]; c is ``max(1, round(1/k))``.
      min_size: leaves with fewer elements are dense.
      seed: changes the offsets.

    Examples:
      >>> import jax.numpy as jnp
      >>> from slamb_jax.selections import Leaf, Strided
      >>> leaf, strided = Leaf(0, (2, 6)), Strided(compress_ratio=0.25, min_size=0)
      >>> fresh = [strided.age(jnp.int32(t), leaf) == 0 for t in (1, 2, 3, 4)]
      >>> print(sum(f.astype(int) for f in fresh).T)  # each once in 4 steps
      [[1 1 1 1 1 1 1 1 1 1 1 1]]
    """

    def block_size(self, leaf: Leaf) -> int:
        room = leaf.size // (100 * (self.period + 1))
        sizes = (128, 64, 32, 16, 8, 4, 2)
        return next((w for w in sizes if leaf.shape[-1] % w == 0 and w <= room), 1)

    def blocks(self, step: jax.Array, leaf: Leaf, state: State = None) -> jax.Array:
        count = leaf.size // self.block_size(leaf)
        place = lax.rem(self._place(step, leaf), np.int32(self.period))
        index = place + np.int32(self.period) * _numbers(len(place), jnp.int32)
        return jnp.minimum(index, np.int32(count)) if count % self.period else index

    def age(self, step: jax.Array, leaf: Leaf, state: State = None) -> jax.Array:
        count = leaf.size // self.block_size(leaf)
        back = np.arange(self.period, 0, -1, dtype=np.int32)
        since = self._place(step, leaf)[:, None] + back[None]
        since = lax.rem(since, np.int32(self.period))
        return jnp.minimum(step, since).reshape(-1)[:count, None]

    def _place(self, step: jax.Array, leaf: Leaf) -> jax.Array:
        """The block that each group exchanges, modulo c: int32, one per group."""
        groups = -(-(leaf.size // self.block_size(leaf)) // self.period)
        index = _numbers(groups, jnp.uint32)
        hashed = hash_u32(index, hash_words(self.seed, leaf.index))
        offset = (hashed % np.uint32(self.period)).astype(np.int32)
        return lax.rem(step, np.int32(self.period)) + offset


def _numbers(n: int, dtype: DTypeLike) -> Any:
    """0, 1, ..., as a constant where there are few.

    Leaves of one shape then differ in no instruction, and XLA compiles the kernels of
    one for all.
    """
    return np.arange(n, dtype=dtype) if n <= _STORED else lax.iota(dtype, n)
