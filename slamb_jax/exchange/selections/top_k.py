"""Top-k by what all workers know: blocks chosen by their last mean, and by age."""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from slamb_jax._tree.checks import check_integer
from slamb_jax._tree.hashing import hash_u32, hash_words
from slamb_jax._tree.leaves import Leaf
from slamb_jax.exchange.selections.selection import RandK
from slamb_jax.exchange.selections.strided import Strided

# Scores end below the first, their products with an age below the last.
_HIGHEST, _UNKNOWN, _OVERDUE = 1e20, 1e28, 1e31


class TopKState(NamedTuple):
    """State of :class:`TopK` for a leaf of R blocks: the same bits on every worker."""

    age: jax.Array  # int32, (R, 1): steps since each block was exchanged
    score: jax.Array  # float32, (R, 1): how much each is worth sending, per step
    blocks: jax.Array  # int32, (ceil(R / c),): the blocks of the last step


@dataclasses.dataclass(frozen=True)
class TopK(RandK):
    r"""The blocks whose last mean was largest, weighted by age.

    A leaf is divided into blocks as by :class:`Strided`, and of R blocks
    :math:`\lceil R/c \rceil` are exchanged per step, with c = ``max(1, round(1/k))``:
    as many bytes as with :class:`Strided`, and no indices, since every worker computes
    the same choice from the means of earlier exchanges. With :math:`s_i` the root mean
    square of block i's mean when it was last exchanged, and :math:`\tau_i` its age, the
    blocks with the largest

    .. math:: s_i\,(\tau_i + 1)

    are exchanged; before them, the oldest first, all that wait longer than ``patience``
    times c steps. So no block waits longer than ``(patience + 1)`` times c steps,
    whatever the values are, NaN included. (If what a block of scale s accumulates
    unsent costs :math:`s^2\tau^2`, each is sent as often as it is worth.) Blocks that
    were never exchanged come first: the first c steps are a round robin in an order
    that ``seed`` draws. In front of any optimizer, where what was not sent adds up in a
    residual, s is divided by the steps over which it added up.

    Its state takes 8 bytes per block. :func:`slamb`, :func:`scale_by_slamb` and
    :func:`randk_compress_with_error_feedback` hold it; :func:`layerwise_trust_ratio`
    and :func:`elementwise_rescale` cannot see it and refuse it.

    It is not in the paper, whose authors lacked a layer-wise scaling for top-k. Here
    the ratios of the two parts serve: they are of m over the root of v, in which the
    scale by which blocks are chosen cancels.

    Args:
      compress_ratio: k in (0, 1]; c is ``max(1, round(1/k))``.
      min_size: leaves with fewer elements are dense.
      seed: changes the order of the first c steps.
      patience: the rounds of c steps after which a block goes before all others, at
        least 1.

    Examples:
      >>> import jax, jax.numpy as jnp, slamb_jax
      >>> top_k = slamb_jax.selections.TopK(compress_ratio=0.5, min_size=0)
      >>> tx = slamb_jax.randk_compress_with_error_feedback(
      ...     slamb_jax.Exchange(selection=top_k)
      ... )
      >>> g = jnp.array([[1.0], [2.0], [30.0], [40.0]])
      >>> state = tx.init(g)
      >>> for _ in range(4):
      ...     sent, state = tx.update(g, state)
      >>> print(sent[:, 0])  # the third time that the large ones are exchanged
      [ 0.  0. 30. 40.]
    """

    patience: int = 3
    stateful: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("patience", self.patience, 1)

    @property
    def _strided(self) -> Strided:
        """The round robin with the same blocks."""
        return Strided(self.compress_ratio, self.min_size, self.seed)

    def dense(self, leaf: Leaf) -> bool:
        return self._strided.dense(leaf)

    def block_size(self, leaf: Leaf) -> int:
        return self._strided.block_size(leaf)

    def blocks(self, step: jax.Array, leaf: Leaf, state: Any = None) -> jax.Array:
        return state.blocks

    def age(self, step: jax.Array, leaf: Leaf, state: Any = None) -> jax.Array:
        return state.age

    def init(self, leaf: Leaf) -> TopKState:
        count = leaf.size // self.block_size(leaf)
        index = np.arange(count, dtype=np.uint32)
        hashed = hash_u32(index, hash_words(self.seed, leaf.index))
        return TopKState(
            jnp.zeros((count, 1), jnp.int32),
            jnp.asarray(_UNKNOWN * (1 + hashed[:, None] / 2**32), jnp.float32),
            jnp.zeros(-(-count // self._strided.period), jnp.int32),
        )

    def choose(self, state: TopKState, leaf: Leaf) -> TopKState:
        age = state.age + 1
        wanted = state.score * age.astype(jnp.float32)
        late = (age - self.patience * self._strided.period).astype(jnp.float32)
        key = jnp.minimum(wanted, jnp.float32(0.1 * _OVERDUE))
        key = jnp.where(late > 0, _OVERDUE * late, key)
        blocks = lax.top_k(key[:, 0], len(state.blocks))[1].astype(jnp.int32)
        return TopKState(_replace(age, blocks, 0), state.score, blocks)

    def learn(
        self,
        before: TopKState,
        chosen: TopKState,
        leaf: Leaf,
        mean: jax.Array,
        *,
        accumulated: bool,
    ) -> TopKState:
        square = jnp.square(mean.astype(jnp.float32))
        score = jnp.sqrt(jnp.mean(square, axis=1, keepdims=True))
        if accumulated:
            score = score / (before.age[chosen.blocks] + 1).astype(jnp.float32)
        finite = jnp.where(jnp.isfinite(score), score, jnp.float32(0))
        score = jnp.minimum(finite, jnp.float32(_HIGHEST))
        return chosen._replace(score=_replace(chosen.score, chosen.blocks, score))


def _replace(x: jax.Array, blocks: jax.Array, values: Any) -> jax.Array:
    """``x`` with these blocks replaced; the indices of a top-k are distinct."""
    return x.at[blocks].set(values, unique_indices=True, mode="promise_in_bounds")
