"""Independent draws: each coordinate with probability k at each step."""

import dataclasses
import math

import jax
import jax.numpy as jnp

from slamb_jax._checks import check_range
from slamb_jax._hashing import hash_u32, hash_words
from slamb_jax._leaves import Leaf
from slamb_jax._selections._selection import RandK

_Back = tuple[jax.Array, jax.Array, jax.Array]  # step looked at, age, met


@dataclasses.dataclass(frozen=True)
class Bernoulli(RandK):
    r"""The authors' other choice: each coordinate by itself with probability k.

    A draw is a hash of (seed, leaf, step, coordinate). The number of coordinates
    drawn varies, but what travels has a static size, so a leaf of d elements has a
    capacity of :math:`kd + s\sqrt{k(1-k)d}`, rounded up. Coordinates that are drawn
    beyond it are not exchanged at that step: they stay in the local momentum and
    keep their age. Counting starts at a place that is drawn anew each step, so that
    it is not always the same coordinates that wait. (The authors have no capacity.)

    Nothing is stored, so the age is found by looking back, draw by draw, until every
    coordinate has been met: about ln(d)/k draws. A round robin is much cheaper.

    Args:
      compress_ratio: k in (0, 1].
      min_size: leaves with fewer elements are exchanged whole.
      seed: changes the draws.
      slack: s, the standard deviations of room above the expected number. At 4 one
        leaf overflows in about 30,000 steps.

    Examples:
      >>> import jax.numpy as jnp
      >>> from slamb_jax import Bernoulli, Leaf
      >>> leaf = Leaf(index=0, offset=0, shape=(100, 100), total=10000)
      >>> bernoulli = Bernoulli(compress_ratio=0.1)
      >>> sent = int(bernoulli.mask(jnp.int32(1), leaf).sum())
      >>> 800 < sent <= bernoulli.capacity(leaf) == 1120
      True
    """

    slack: float = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("slack", self.slack, 0.0, math.inf, open_high=True)

    def capacity(self, leaf: Leaf) -> int:
        """The most elements of a leaf that travel in one step."""
        k, d = self.compress_ratio, leaf.size
        return min(d, math.ceil(k * d + self.slack * math.sqrt(k * (1 - k) * d)))

    def mask(self, step: jax.Array, leaf: Leaf) -> jax.Array:
        """Which elements travel: bool, of the shape of the age."""
        salt = hash_u32(step.astype(jnp.uint32), hash_words(self.seed, leaf.index))
        element = jnp.arange(leaf.size, dtype=jnp.uint32)
        threshold = min(round(self.compress_ratio * 2**32), 2**32 - 1)
        drawn = hash_u32(element, salt) < jnp.uint32(threshold)

        def cut(drawn: jax.Array) -> jax.Array:
            start = (hash_u32(salt, 1) % jnp.uint32(leaf.size)).astype(jnp.int32)
            drawn = jnp.roll(drawn, -start)
            rank = jnp.cumsum(drawn, dtype=jnp.int32)
            return jnp.roll(drawn & (rank <= self.capacity(leaf)), start)

        overflow = jnp.sum(drawn, dtype=jnp.int32) > self.capacity(leaf)
        kept = jax.lax.cond(overflow, cut, lambda drawn: drawn, drawn)
        return kept[:, None]

    def age(self, step: jax.Array, leaf: Leaf) -> jax.Array:
        def unmet(carry: _Back) -> jax.Array:
            past, _, met = carry
            return (past > 0) & ~jnp.all(met)

        def look_back(carry: _Back) -> _Back:
            past, age, met = carry
            sent = self.mask(past, leaf)
            return past - 1, jnp.where(sent & ~met, step - past, age), met | sent

        sent = self.mask(step, leaf)
        age = jnp.where(sent, 0, step)
        return jax.lax.while_loop(unmet, look_back, (step - 1, age, sent))[1]

    def rows(self, step: jax.Array, leaf: Leaf) -> jax.Array:
        mask = self.mask(step, leaf).reshape(-1)
        size = self.capacity(leaf)
        return jnp.nonzero(mask, size=size, fill_value=leaf.size)[0].astype(jnp.int32)
