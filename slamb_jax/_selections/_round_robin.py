"""Round robins: each coordinate is sent exactly once in c steps."""

import abc
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from slamb_jax._hashing import hash_u32, hash_words
from slamb_jax._leaves import Leaf
from slamb_jax._selections._selection import RandK


def _modulo(x: jax.Array, divisor: int) -> jax.Array:
    """``x % divisor`` of int32 that is not negative, which spares instructions."""
    return lax.rem(x, np.int32(divisor))


class _RoundRobin(RandK, abc.ABC):
    """``c = max(1, round(1/k))`` turns; each coordinate is sent once in c steps."""

    @property
    def turns(self) -> int:
        """The number of turns c; the ratio that is reached is 1/c."""
        return max(1, round(1 / self.compress_ratio))

    def whole(self, leaf: Leaf) -> bool:
        return super().whole(leaf) or self.turns == 1

    @abc.abstractmethod
    def age(self, step: jax.Array, leaf: Leaf) -> jax.Array:
        """See :class:`Selection`."""

    def mask(self, step: jax.Array, leaf: Leaf) -> jax.Array:
        """Which rows travel: bool, of the shape of the age."""
        return self.age(step, leaf) == 0


@dataclasses.dataclass(frozen=True)
class Strided(_RoundRobin):
    r"""Round robin over neighbours: of every c rows one, each group out of step.

    The leaf's d elements, in row-major order, are cut into rows of w neighbours, and
    those into groups of c. At step t group j sends its row :math:`(t + o_j) \bmod c`,
    where the offset :math:`o_j` is a hash of (seed, leaf, j). The age is arithmetic,
    :math:`\min(t, (t + o_j - i) \bmod c)` for row i of the group. Nothing is stored or
    permuted: what travels is copied row by row, in the order of memory.

    w is the largest power of two that divides the last dimension, up to 128 and to a
    size at which unfilled slots cost no more than a hundredth of what travels; 1 where
    that dimension is odd.

    This is not in the paper, whose optimizers store a random permutation; it covers
    the same share of the coordinates, spread evenly, with the same period.

    Args:
      compress_ratio: k in (0, 1]; c is ``max(1, round(1/k))``.
      min_size: leaves with fewer elements are exchanged whole.
      seed: changes the offsets.

    Examples:
      >>> import jax.numpy as jnp
      >>> from slamb_jax import Leaf, Strided
      >>> leaf = Leaf(index=0, offset=0, shape=(2, 6), total=12)
      >>> strided = Strided(compress_ratio=0.25, min_size=0)
      >>> masks = [strided.mask(jnp.int32(t), leaf) for t in (1, 2, 3, 4)]
      >>> print(sum(m.astype(int) for m in masks).T)  # each is sent once in 4 steps
      [[1 1 1 1 1 1 1 1 1 1 1 1]]
    """

    def width(self, leaf: Leaf) -> int:
        """Neighbours that travel together, w."""
        room = leaf.size // (100 * (self.turns + 1))
        widths = (128, 64, 32, 16, 8, 4, 2)
        return next((w for w in widths if leaf.shape[-1] % w == 0 and w <= room), 1)

    def rows(self, step: jax.Array, leaf: Leaf) -> jax.Array:
        count = leaf.size // self.width(leaf)
        place = _modulo(self._place(step, leaf), self.turns)
        row = place + np.arange(0, len(place) * self.turns, self.turns, dtype=np.int32)
        return row if count % self.turns == 0 else jnp.minimum(row, jnp.int32(count))

    def age(self, step: jax.Array, leaf: Leaf) -> jax.Array:
        count = leaf.size // self.width(leaf)
        turns = np.arange(self.turns, 0, -1, dtype=np.int32)
        since = _modulo(self._place(step, leaf)[:, None] + turns[None], self.turns)
        return jnp.minimum(step, since).reshape(-1)[:count, None]

    def _place(self, step: jax.Array, leaf: Leaf) -> jax.Array:
        """Which of its c rows each group sends, modulo c: int32, one per group."""
        # The offsets are a constant (one number to c w elements): leaves of one shape
        # then differ in no instruction, and XLA compiles the kernels of one for all.
        groups = -(-(leaf.size // self.width(leaf)) // self.turns)
        words = np.arange(groups, dtype=np.uint32)
        hashed = hash_u32(words, hash_words(self.seed, leaf.index))
        offset = (hashed % np.uint32(self.turns)).astype(np.int32)
        return _modulo(step, self.turns) + offset


@dataclasses.dataclass(frozen=True)
class Permutation(_RoundRobin):
    r"""The authors' round robin: a random permutation, dealt out in c turns.

    Coordinate e has the place :math:`\pi(e)` in a pseudo-random permutation of its
    leaf and travels at the steps :math:`t \equiv \pi(e) \pmod c`. The permutation is
    computed, not stored: a swap-or-not network, which maps any ``range(d)`` onto
    itself element by element and runs backwards as easily. That, a gather and a
    scatter make it slower than :class:`Strided`.

    The authors permute all coordinates of the model together and cut the result
    into chunks; here each leaf is permuted by itself.

    Args:
      compress_ratio: k in (0, 1]; c is ``max(1, round(1/k))``.
      min_size: leaves with fewer elements are exchanged whole.
      seed: changes the permutation.

    Examples:
      >>> import jax.numpy as jnp
      >>> from slamb_jax import Leaf, Permutation
      >>> leaf = Leaf(index=0, offset=0, shape=(2, 3), total=6)
      >>> permutation = Permutation(compress_ratio=0.5, min_size=0)
      >>> masks = [permutation.mask(jnp.int32(t), leaf) for t in (1, 2)]
      >>> print(sum(m.astype(int) for m in masks).T)  # each is sent once in 2 steps
      [[1 1 1 1 1 1]]

    References:
      Hoang, Morris, Rogaway, `An Enciphering Scheme Based on a Card Shuffle
      <https://arxiv.org/abs/1208.1176>`_, CRYPTO 2012.
    """

    def _shuffle(self, leaf: Leaf, x: jax.Array, *, inverse: bool) -> jax.Array:
        """Places of elements, or the elements in places: int32 in ``[0, d)``."""
        rounds = leaf.size.bit_length() + 8  # 256 ways to each place, or more
        words = [hash_words(self.seed, leaf.index, r) for r in range(rounds)]
        pivots = jnp.asarray([word % leaf.size for word in words], jnp.int32)
        salts = jnp.asarray([hash_words(word) for word in words], jnp.uint32)

        def swap_or_not(i: jax.Array, x: jax.Array) -> jax.Array:
            i = rounds - 1 - i if inverse else i
            partner = pivots[i] - x
            partner = jnp.where(partner < 0, partner + leaf.size, partner)
            top = jnp.maximum(x, partner).astype(jnp.uint32)
            return jnp.where(hash_u32(top, salts[i]) >> 31 == 1, partner, x)

        return jax.lax.fori_loop(0, rounds, swap_or_not, x)

    def rows(self, step: jax.Array, leaf: Leaf) -> jax.Array:
        slot = jnp.arange(-(-leaf.size // self.turns), dtype=jnp.int32)
        place = step % self.turns + self.turns * slot
        element = self._shuffle(leaf, jnp.minimum(place, leaf.size - 1), inverse=True)
        return jnp.where(place < leaf.size, element, leaf.size)

    def age(self, step: jax.Array, leaf: Leaf) -> jax.Array:
        element = jnp.arange(leaf.size, dtype=jnp.int32)
        place = self._shuffle(leaf, element, inverse=False)[:, None]
        return jnp.minimum(step, (step - place) % self.turns)
