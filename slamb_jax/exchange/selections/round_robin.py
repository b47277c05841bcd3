"""Round robins: each coordinate is exchanged exactly once in c steps."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from slamb_jax._tree.hashing import hash_u32, hash_words
from slamb_jax._tree.leaves import Leaf
from slamb_jax.exchange.selections.selection import RandK, State


def _modulo(x: jax.Array, divisor: int) -> jax.Array:
    """``x % divisor`` of int32 that is not negative, in fewer instructions."""
    return lax.rem(x, np.int32(divisor))


class _RoundRobin(RandK):
    """Exchanges each coordinate once in ``c = max(1, round(1/k))`` steps."""

    @property
    def period(self) -> int:
        """The period c in steps; the ratio that is reached is 1/c."""
        return max(1, round(1 / self.compress_ratio))

    def dense(self, leaf: Leaf) -> bool:
        return super().dense(leaf) or self.period == 1


@dataclasses.dataclass(frozen=True)
class Strided(_RoundRobin):
    r"""A round robin over blocks: one block of every c, each group out of step.

    The leaf's d elements, in row-major order, are divided into blocks of w neighbours,
    and those into groups of c. At step t group j exchanges its block
    :math:`(t + o_j) \bmod c`, where the offset :math:`o_j` is a hash of (seed, leaf, j).
    The age of block i of the group is :math:`\min(t, (t + o_j - i) \bmod c)`. Nothing is
    stored or permuted: blocks are copied in the order of memory.

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
        place = _modulo(self._place(step, leaf), self.period)
        first = np.arange(0, len(place) * self.period, self.period, dtype=np.int32)
        index = place + first
        return index if count % self.period == 0 else jnp.minimum(index, np.int32(count))

    def age(self, step: jax.Array, leaf: Leaf, state: State = None) -> jax.Array:
        count = leaf.size // self.block_size(leaf)
        back = np.arange(self.period, 0, -1, dtype=np.int32)
        since = _modulo(self._place(step, leaf)[:, None] + back[None], self.period)
        return jnp.minimum(step, since).reshape(-1)[:count, None]

    def _place(self, step: jax.Array, leaf: Leaf) -> jax.Array:
        """The block that each group exchanges, modulo c: int32, one per group."""
        # A constant (one number to c w elements): leaves of one shape then differ in
        # no instruction, and XLA compiles the kernels of one for all.
        groups = -(-(leaf.size // self.block_size(leaf)) // self.period)
        index = np.arange(groups, dtype=np.uint32)
        hashed = hash_u32(index, hash_words(self.seed, leaf.index))
        offset = (hashed % np.uint32(self.period)).astype(np.int32)
        return _modulo(step, self.period) + offset


@dataclasses.dataclass(frozen=True)
class Permutation(_RoundRobin):
    r"""The authors' round robin: a random permutation, exchanged in c chunks.

    Coordinate e has the place :math:`\pi(e)` in a pseudo-random permutation of its
    leaf and is exchanged at the steps :math:`t \equiv \pi(e) \pmod c`. The permutation
    is computed, not stored: a swap-or-not network maps any ``range(d)`` onto itself
    element by element, in both directions. That, a gather and a scatter make it slower
    than :class:`Strided`.

    The authors permute all coordinates of the model together; here each leaf is
    permuted by itself.

    Args:
      compress_ratio: k in (0, 1]; c is ``max(1, round(1/k))``.
      min_size: leaves with fewer elements are dense.
      seed: changes the permutation.

    Examples:
      >>> import jax.numpy as jnp
      >>> from slamb_jax.selections import Leaf, Permutation
      >>> leaf, permutation = Leaf(0, (2, 3)), Permutation(0.5, min_size=0)
      >>> fresh = [permutation.age(jnp.int32(t), leaf) == 0 for t in (1, 2)]
      >>> print(sum(f.astype(int) for f in fresh).T)  # each once in 2 steps
      [[1 1 1 1 1 1]]

    References:
      Hoang, Morris, Rogaway, `An Enciphering Scheme Based on a Card Shuffle
      <https://arxiv.org/abs/1208.1176>`_, CRYPTO 2012.
    """

    def blocks(self, step: jax.Array, leaf: Leaf, state: State = None) -> jax.Array:
        slot = jnp.arange(-(-leaf.size // self.period), dtype=jnp.int32)
        place = step % self.period + self.period * slot
        element = self._shuffle(leaf, jnp.minimum(place, leaf.size - 1), inverse=True)
        return jnp.where(place < leaf.size, element, leaf.size)

    def age(self, step: jax.Array, leaf: Leaf, state: State = None) -> jax.Array:
        element = jnp.arange(leaf.size, dtype=jnp.int32)
        place = self._shuffle(leaf, element, inverse=False)[:, None]
        return jnp.minimum(step, (step - place) % self.period)

    def _shuffle(self, leaf: Leaf, x: jax.Array, *, inverse: bool) -> jax.Array:
        """Places of elements, or the elements in places: int32 in ``[0, d)``."""
        rounds = leaf.size.bit_length() + 8  # 256 ways to each place, or more
        words = [hash_words(self.seed, leaf.index, r) for r in range(rounds)]
        pivots = jnp.asarray([word % leaf.size for word in words], jnp.int32)
        seeds = jnp.asarray([hash_words(word) for word in words], jnp.uint32)

        def swap_or_not(i: jax.Array, x: jax.Array) -> jax.Array:
            i = rounds - 1 - i if inverse else i
            partner = pivots[i] - x
            partner = jnp.where(partner < 0, partner + leaf.size, partner)
            top = jnp.maximum(x, partner).astype(jnp.uint32)
            return jnp.where(hash_u32(top, seeds[i]) >> 31 == 1, partner, x)

        return jax.lax.fori_loop(0, rounds, swap_or_not, x)
