"""Round robins: each coordinate is sent exactly once in c steps."""

import dataclasses

import jax
import jax.numpy as jnp

from slamb_jax._hashing import hash_u32, hash_words
from slamb_jax._leaves import Leaf
from slamb_jax._selections._selection import RandK, gather, scatter


class _RoundRobin(RandK):
    """``c = max(1, round(1/k))`` turns; each coordinate is sent once in c steps."""

    @property
    def turns(self) -> int:
        """The number of turns c; the ratio that is reached is 1/c."""
        return max(1, round(1 / self.compress_ratio))

    def whole(self, leaf: Leaf) -> bool:
        return super().whole(leaf) or self.turns == 1

    def _slots(self, leaf: Leaf) -> int:
        """Length of what travels: ``ceil(d/c)``."""
        return -(-leaf.size // self.turns)


@dataclasses.dataclass(frozen=True)
class Strided(_RoundRobin):
    r"""Round robin over the rows of a ``(c, d/c)`` view, each column out of step.

    The leaf's d elements, in row-major order and padded, are viewed as an array of c
    rows and :math:`\lceil d/c \rceil` columns. At step t column j sends its row
    :math:`(t + o_j) \bmod c`, where the offset :math:`o_j` is a hash of (seed, leaf,
    j). The age is arithmetic, :math:`\min(t, (t + o_j - \text{row}) \bmod c)`. No
    gather, no stored permutation: packing is a select-and-reduce over the rows,
    unpacking a ``where``.

    This is not in the paper, whose optimizers store a random permutation; it covers
    the same share of the coordinates with the same period.

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
      >>> print(sum(m.astype(int) for m in masks))  # each is sent once in 4 steps
      [[1 1 1 1 1 1]
       [1 1 1 1 1 1]]
    """

    def _sent_row(self, step: jax.Array, leaf: Leaf) -> jax.Array:
        """The row that each column sends: int32 of shape (1, columns)."""
        column = jnp.arange(self._slots(leaf), dtype=jnp.uint32)
        salt = hash_words(self.seed, leaf.index)
        offset = (hash_u32(column, salt) % jnp.uint32(self.turns)).astype(jnp.int32)
        row = step % self.turns + offset
        return jnp.where(row >= self.turns, row - self.turns, row)[None, :]

    def _row(self) -> jax.Array:
        return jnp.arange(self.turns, dtype=jnp.int32)[:, None]

    def _grid(self, leaf: Leaf, x: jax.Array) -> jax.Array:
        padding = self.turns * self._slots(leaf) - leaf.size
        return jnp.pad(x.reshape(-1), (0, padding)).reshape(self.turns, -1)

    def _ungrid(self, leaf: Leaf, grid: jax.Array) -> jax.Array:
        return grid.reshape(-1)[: leaf.size].reshape(leaf.shape)

    def mask(self, step: jax.Array, leaf: Leaf) -> jax.Array:
        return self._ungrid(leaf, self._row() == self._sent_row(step, leaf))

    def age(self, step: jax.Array, leaf: Leaf) -> jax.Array:
        since = self._sent_row(step, leaf) - self._row()
        since = jnp.where(since < 0, since + self.turns, since)
        return self._ungrid(leaf, jnp.minimum(step, since))

    def pack(self, step: jax.Array, leaf: Leaf, x: jax.Array) -> jax.Array:
        chosen = self._row() == self._sent_row(step, leaf)
        grid = self._grid(leaf, x)
        return jnp.sum(jnp.where(chosen, grid, jnp.zeros_like(grid)), 0, dtype=x.dtype)

    def unpack(
        self, step: jax.Array, leaf: Leaf, packed: jax.Array, x: jax.Array
    ) -> jax.Array:
        chosen = self._row() == self._sent_row(step, leaf)
        return self._ungrid(
            leaf, jnp.where(chosen, packed[None, :], self._grid(leaf, x))
        )


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

    References:
      Hoang, Morris, Rogaway, `An Enciphering Scheme Based on a Card Shuffle
      <https://arxiv.org/abs/1208.1176>`_, CRYPTO 2012.
    """

    rounds = 40  # 2**40 trajectories, some hundred for each place of a 2**32 leaf

    def _shuffle(self, leaf: Leaf, x: jax.Array, *, inverse: bool) -> jax.Array:
        """Places of elements, or the elements in places: int32 in ``[0, d)``."""
        for r in range(self.rounds)[:: -1 if inverse else 1]:
            salt = hash_words(self.seed, leaf.index, r)
            partner = salt % leaf.size - x
            partner = jnp.where(partner < 0, partner + leaf.size, partner)
            top = jnp.maximum(x, partner).astype(jnp.uint32)
            swap = hash_u32(top, hash_words(salt)) >> 31
            x = jnp.where(swap == 1, partner, x)
        return x

    def _turn(self, leaf: Leaf) -> jax.Array:
        """The turn of each element, int32 of the leaf's shape."""
        element = jnp.arange(leaf.size, dtype=jnp.int32)
        place = self._shuffle(leaf, element, inverse=False)
        return (place % self.turns).reshape(leaf.shape)

    def _chosen(self, step: jax.Array, leaf: Leaf) -> jax.Array:
        """Flat indices of the chosen elements; ``d`` where a slot stays empty."""
        slot = jnp.arange(self._slots(leaf), dtype=jnp.int32)
        place = step % self.turns + self.turns * slot
        element = self._shuffle(leaf, jnp.minimum(place, leaf.size - 1), inverse=True)
        return jnp.where(place < leaf.size, element, leaf.size)

    def mask(self, step: jax.Array, leaf: Leaf) -> jax.Array:
        return self._turn(leaf) == step % self.turns

    def age(self, step: jax.Array, leaf: Leaf) -> jax.Array:
        since = step % self.turns - self._turn(leaf)
        since = jnp.where(since < 0, since + self.turns, since)
        return jnp.minimum(step, since)

    def pack(self, step: jax.Array, leaf: Leaf, x: jax.Array) -> jax.Array:
        return gather(x, self._chosen(step, leaf))

    def unpack(
        self, step: jax.Array, leaf: Leaf, packed: jax.Array, x: jax.Array
    ) -> jax.Array:
        return scatter(x, self._chosen(step, leaf), packed)
