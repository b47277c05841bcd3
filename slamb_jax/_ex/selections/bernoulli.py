"""Independent draws: each coordinate with probability k at each step."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from slamb_jax._checks import check_range
from slamb_jax._ex.selections.selection import RandK
from slamb_jax._leaves import Leaf
from slamb_jax._rounding import hash_u32, hash_words

_Back = tuple[jax.Array, jax.Array, jax.Array]  # step looked at, age, seen


@dataclasses.dataclass(frozen=True)
class Bernoulli(RandK):
    r"""The authors' other selection: each coordinate with probability k at each step.

    A draw is a hash of (seed, leaf, step, coordinate). The number of coordinates drawn
    varies, and the payload's size is static: a leaf of d elements has a capacity of
    :math:`kd + s\sqrt{k(1-k)d}`, rounded up. Coordinates drawn beyond it are not
    exchanged at that step: they stay in the local momentum and keep their age. The
    capacity is counted from a place that is drawn anew each step, so that it is not
    always the same coordinates that wait. (The authors have no capacity.)

    Nothing is stored, so ages are found by looking back, step by step, until every
    coordinate was drawn: about ln(d)/k draws. A round robin is much cheaper.

    Args:
      compress_ratio: k in (0, 1].
      min_size: leaves with fewer elements are dense.
      seed: changes the draws.
      slack: s, the standard deviations of room above the expected number. At 4 a leaf
        overflows about once in 30,000 steps.

    Examples:
      >>> import jax.numpy as jnp
      >>> from slamb_jax.selections import Bernoulli, Leaf
      >>> leaf, bernoulli = Leaf(0, (100, 100)), Bernoulli(compress_ratio=0.1)
      >>> drawn = int((bernoulli.age(jnp.int32(1), leaf) == 0).sum())
      >>> 800 < drawn <= bernoulli.capacity(leaf) == 1120
      True
    """

    slack: float = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("slack", self.slack, 0.0, math.inf, open_high=True)

    def capacity(self, leaf: Leaf) -> int:
        """The most elements of a leaf that are exchanged in one step."""
        k, d = self.compress_ratio, leaf.size
        return min(d, math.ceil(k * d + self.slack * math.sqrt(k * (1 - k) * d)))

    def blocks(self, step: jax.Array, leaf: Leaf) -> jax.Array:
        mask = self._mask(step, leaf).reshape(-1)
        size = self.capacity(leaf)
        return jnp.nonzero(mask, size=size, fill_value=leaf.size)[0].astype(jnp.int32)

    def age(self, step: jax.Array, leaf: Leaf) -> jax.Array:
        def unseen(carry: _Back) -> jax.Array:
            past, _, seen = carry
            return (past > 0) & ~jnp.all(seen)

        def look_back(carry: _Back) -> _Back:
            past, age, seen = carry
            drawn = self._mask(past, leaf)
            age = jnp.where(drawn & ~seen, step - past, age)
            return past - 1, age, seen | drawn

        drawn = self._mask(step, leaf)
        age = jnp.where(drawn, 0, step)
        return jax.lax.while_loop(unseen, look_back, (step - 1, age, drawn))[1]

    def _mask(self, step: jax.Array, leaf: Leaf) -> jax.Array:
        """Which elements are exchanged: bool, (size, 1)."""
        seed = hash_u32(step.astype(jnp.uint32), hash_words(self.seed, leaf.index))
        element = jnp.arange(leaf.size, dtype=jnp.uint32)
        threshold = min(round(self.compress_ratio * 2**32), 2**32 - 1)
        drawn = hash_u32(element, seed) < jnp.uint32(threshold)

        def limited(drawn: jax.Array) -> jax.Array:
            start = (hash_u32(seed, 1) % jnp.uint32(leaf.size)).astype(jnp.int32)
            drawn = jnp.roll(drawn, -start)
            rank = jnp.cumsum(drawn, dtype=jnp.int32)
            return jnp.roll(drawn & (rank <= self.capacity(leaf)), start)

        overflow = jnp.sum(drawn, dtype=jnp.int32) > self.capacity(leaf)
        kept = jax.lax.cond(overflow, limited, lambda drawn: drawn, drawn)
        return kept[:, None]
