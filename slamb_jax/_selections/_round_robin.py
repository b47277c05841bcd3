"""Round robins: each coordinate is sent exactly once in c steps."""

import dataclasses

import jax
import jax.numpy as jnp

from slamb_jax._hashing import hash_u32, hash_words
from slamb_jax._leaves import Leaf
from slamb_jax._selections._selection import RandK


class _RoundRobin(RandK):
    """``c = max(1, round(1/k))`` turns; each coordinate is sent once in c steps."""

    @property
    def turns(self) -> int:
        """The number of turns c; the ratio that is reached is 1/c."""
        return max(1, round(1 / self.compress_ratio))

    def whole(self, leaf: Leaf) -> bool:
        return super().whole(leaf) or self.turns == 1

    def _since(self, step: jax.Array, turn: jax.Array) -> jax.Array:
        """Steps since the turn came round, were it always so."""
        since = step % self.turns - turn
        return jnp.minimum(step, jnp.where(since < 0, since + self.turns, since))


@dataclasses.dataclass(frozen=True)
class Strided(_RoundRobin):
    r"""Round robin over neighbours: of every c rows one, each group out of step.

    The leaf's d elements, in row-major order, are cut into rows of w neighbours, and
    those into groups of c. At step t group j sends its row :math:`(t + o_j) \bmod c`,
    where the offset :math:`o_j` is a hash of (seed, leaf, j). The age is arithmetic,
    :math:`\min(t, (t + o_j - i) \bmod c)` for row i of the group. Nothing is stored or
    permuted: what travels is copied row by row, in the order of memory.

    w is the largest power of two that divides the last dimension, up to 64 and to a
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

    def _width(self, leaf: Leaf) -> int:
        """Neighbours that travel together, w."""
        room = leaf.size // (100 * (self.turns + 1))
        widths = (64, 32, 16, 8, 4, 2)
        return next((w for w in widths if leaf.shape[-1] % w == 0 and w <= room), 1)

    def _rows(self, leaf: Leaf) -> int:
        return leaf.size // self._width(leaf)

    def _offset(self, leaf: Leaf) -> jax.Array:
        """The offset of each group: int32 of shape (groups,)."""
        group = jnp.arange(-(-self._rows(leaf) // self.turns), dtype=jnp.uint32)
        hashed = hash_u32(group, hash_words(self.seed, leaf.index))
        return (hashed % jnp.uint32(self.turns)).astype(jnp.int32)

    def _turn(self, leaf: Leaf) -> jax.Array:
        """The turn of each row, such that it is sent at t with t % c == turn."""
        place = jnp.arange(self.turns, dtype=jnp.int32)
        turn = place[None, :] - self._offset(leaf)[:, None]
        turn = jnp.where(turn < 0, turn + self.turns, turn)
        return turn.reshape(-1)[: self._rows(leaf), None]

    def _chosen(self, step: jax.Array, leaf: Leaf) -> jax.Array:
        """The row that each group sends; beyond the last where it has none."""
        place = step % self.turns + self._offset(leaf)
        place = jnp.where(place >= self.turns, place - self.turns, place)
        return jnp.arange(place.size, dtype=jnp.int32) * self.turns + place

    def mask(self, step: jax.Array, leaf: Leaf) -> jax.Array:
        return self._turn(leaf) == step % self.turns

    def age(self, step: jax.Array, leaf: Leaf) -> jax.Array:
        return self._since(step, self._turn(leaf))


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

    def _turn(self, leaf: Leaf) -> jax.Array:
        """The turn of each element: int32 of shape (d, 1)."""
        element = jnp.arange(leaf.size, dtype=jnp.int32)
        return self._shuffle(leaf, element, inverse=False)[:, None] % self.turns

    def _chosen(self, step: jax.Array, leaf: Leaf) -> jax.Array:
        """Flat indices of the chosen elements; ``d`` where a slot stays empty."""
        slot = jnp.arange(-(-leaf.size // self.turns), dtype=jnp.int32)
        place = step % self.turns + self.turns * slot
        element = self._shuffle(leaf, jnp.minimum(place, leaf.size - 1), inverse=True)
        return jnp.where(place < leaf.size, element, leaf.size)

    def mask(self, step: jax.Array, leaf: Leaf) -> jax.Array:
        return self._turn(leaf) == step % self.turns

    def age(self, step: jax.Array, leaf: Leaf) -> jax.Array:
        return self._since(step, self._turn(leaf))
