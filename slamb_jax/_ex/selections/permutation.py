"""The authors' round robin, over a random permutation."""

import dataclasses

import jax
import jax.numpy as jnp

from slamb_jax._ex.selections.strided import RoundRobin
from slamb_jax._leaves import Leaf
from slamb_jax._rounding import hash_u32, hash_words


@dataclasses.dataclass(frozen=True)
class Permutation(RoundRobin):
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

    def blocks(self, step: jax.Array, leaf: Leaf) -> jax.Array:
        slot = jnp.arange(-(-leaf.size // self.period), dtype=jnp.int32)
        place = step % self.period + self.period * slot
        element = self._shuffle(leaf, jnp.minimum(place, leaf.size - 1), inverse=True)
        return jnp.where(place < leaf.size, element, leaf.size)

    def age(self, step: jax.Array, leaf: Leaf) -> jax.Array:
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
