"""Top-k of what all workers know: rows chosen by what was agreed on, and by age."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from slamb_jax._checks import check_integer
from slamb_jax._hashing import hash_u32, hash_words
from slamb_jax._leaves import Leaf
from slamb_jax._selections._round_robin import Strided
from slamb_jax._selections._selection import RandK, Selection

# Scores end below the first, their products with an age below the last.
_HIGHEST, _UNKNOWN, _OVERDUE = 1e20, 1e28, 1e31


class ChosenRows(NamedTuple):
    """What :class:`TopK` keeps of a leaf of R rows: the same bits on every worker."""

    age: jax.Array  # int32, (R, 1): steps since each row was exchanged
    score: jax.Array  # float32, (R, 1): how much each is worth sending, per step
    sent: jax.Array  # int32, (ceil(R / c),): the rows that the last step sent


@dataclasses.dataclass(frozen=True)
class TopK(RandK):
    r"""The rows that were largest when they were last agreed on, grown with age.

    A leaf is cut into rows of w neighbours as :class:`Strided` cuts it, and of R rows
    :math:`\lceil R/c \rceil` travel per step, with c = ``max(1, round(1/k))``: as many
    bytes as :class:`Strided` sends, and no indices, since every worker computes the
    same choice from what it knows of the last exchanges. With :math:`s_i` the root
    mean square of row i, as it was agreed on when it was last exchanged, and
    :math:`\tau_i` the steps since then, the rows with the largest

    .. math:: s_i\,(\tau_i + 1)

    travel, all that wait longer than ``patience`` times c steps before them, the oldest
    first. (If what a row of scale s accumulates unsent costs :math:`s^2\tau^2`, this
    sends each as often as it is worth.) So no row waits longer than ``(patience + 1)``
    times c steps, whatever the values are, NaN included. Rows that were never sent
    come first: the first c steps are a round robin in an order that ``seed`` draws.
    In front of any optimizer, where what was not sent adds up in a residual, s is the
    root mean square over the steps that it took to add up.

    It has a state, 8 bytes for each row, in the state of
    :func:`randk_compress_with_error_feedback`; so :func:`slamb` and that function take
    it, and the links behind it, which cannot see that state, do not. Nor does
    :class:`Piecewise`.

    Not in the paper, whose authors lacked a layer-wise scaling for top-k. Here the
    ratios of the parts serve as they are: their norms are of m over the root of v, in
    which the scale by which rows are chosen cancels.

    Args:
      compress_ratio: k in (0, 1]; c is ``max(1, round(1/k))``.
      min_size: leaves with fewer elements are exchanged whole.
      seed: changes the order of the first c steps.
      patience: the rounds of c steps after which a row goes before all others, at
        least 1.

    Examples:
      >>> import jax, jax.numpy as jnp, slamb_jax
      >>> tx = slamb_jax.randk_compress_with_error_feedback(
      ...     slamb_jax.TopK(compress_ratio=0.5, min_size=0)
      ... )
      >>> g = jnp.array([[1.0], [2.0], [30.0], [40.0]])
      >>> state = tx.init(g)
      >>> for _ in range(4):
      ...     sent, state = tx.update(g, state)
      >>> print(sent[:, 0])  # the third time that the large ones go
      [ 0.  0. 30. 40.]
    """

    patience: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("patience", self.patience, 1)

    @property
    def strided(self) -> Strided:
        """The round robin whose rows these are."""
        return Strided(self.compress_ratio, self.min_size, self.seed)

    def whole(self, leaf: Leaf) -> bool:
        return self.strided.whole(leaf)

    def width(self, leaf: Leaf) -> int:
        """Neighbours that travel together, w."""
        return self.strided.width(leaf)

    def rows(self, step: jax.Array, leaf: Leaf) -> jax.Array:
        self._refuse()

    def age(self, step: jax.Array, leaf: Leaf) -> jax.Array:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ValueError(
            f"selection={self!r} chooses by a state that only "
            "randk_compress_with_error_feedback has: layerwise_trust_ratio, "
            "elementwise_rescale and whatever else is not handed it cannot ask. Use "
            "slamb_jax.slamb, which tells them what was chosen."
        )

    def initial(self, leaf: Leaf) -> ChosenRows | None:
        """The state of a leaf of which nothing was sent yet; None if it goes whole."""
        if self.whole(leaf):
            return None
        count = leaf.size // self.width(leaf)
        words = np.arange(count, dtype=np.uint32)
        hashed = hash_u32(words, hash_words(self.seed, leaf.index))
        return ChosenRows(
            jnp.zeros((count, 1), jnp.int32),
            jnp.asarray(_UNKNOWN * (1 + hashed[:, None] / 2**32), jnp.float32),
            jnp.zeros(-(-count // self.strided.turns), jnp.int32),
        )

    def choose(self, kept: ChosenRows) -> ChosenRows:
        """The rows of this step, and the ages with them."""
        age = kept.age + 1
        wanted = kept.score * age.astype(jnp.float32)
        late = (age - self.patience * self.strided.turns).astype(jnp.float32)
        first = jnp.minimum(wanted, jnp.float32(0.1 * _OVERDUE))
        key = jnp.where(late > 0, _OVERDUE * late, first)
        sent = lax.top_k(key[:, 0], len(kept.sent))[1].astype(jnp.int32)
        return ChosenRows(_set(age, sent, 0), kept.score, sent)

    def learn(
        self, kept: ChosenRows, now: ChosenRows, agreed: jax.Array, *, added_up: bool
    ) -> ChosenRows:
        """``now`` with the scores of the rows that were sent, of shape (slots, w)."""
        square = jnp.square(agreed.astype(jnp.float32))
        score = jnp.sqrt(jnp.mean(square, axis=1, keepdims=True))
        if added_up:
            score = score / (kept.age[now.sent] + 1).astype(jnp.float32)
        finite = jnp.where(jnp.isfinite(score), score, jnp.float32(0))
        score = jnp.minimum(finite, jnp.float32(_HIGHEST))
        return now._replace(score=_set(now.score, now.sent, score))


@dataclasses.dataclass(frozen=True)
class Chosen:
    """What a :class:`TopK` chose at one step, as a selection like the others."""

    top_k: TopK
    leaves: Sequence[ChosenRows | None]  # in the order of jax.tree.leaves

    def whole(self, leaf: Leaf) -> bool:
        return self.top_k.whole(leaf)

    def width(self, leaf: Leaf) -> int:
        return self.top_k.width(leaf)

    def rows(self, step: jax.Array, leaf: Leaf) -> jax.Array:
        del step
        return self._of(leaf).sent

    def age(self, step: jax.Array, leaf: Leaf) -> jax.Array:
        del step
        return self._of(leaf).age

    def _of(self, leaf: Leaf) -> ChosenRows:
        rows = self.leaves[leaf.index]
        assert rows is not None
        return rows


Kept = tuple[ChosenRows | None, ...] | None


def kept_at_first(selection: TopK, leaves: Sequence[Leaf]) -> Kept:
    """What there is to keep of all leaves from step to step."""
    return tuple(selection.initial(leaf) for leaf in leaves)


def chosen_now(selection: Selection, kept: Kept, leaves: Sequence[Leaf]) -> Selection:
    """``selection``, or what it chooses for these leaves at this step."""
    if kept is None or not isinstance(selection, TopK):
        return selection
    rows = list(kept)
    for i in (leaf.index for leaf in leaves):
        was = kept[i]
        rows[i] = was if was is None else selection.choose(was)
    return Chosen(selection, tuple(rows))


def learned(
    kept: Kept,
    chosen: Selection,
    leaves: Sequence[Leaf],
    means: Sequence[jax.Array],
    *,
    added_up: bool,
) -> Kept:
    """What to keep, now that the rows of these leaves were agreed on."""
    if kept is None or not isinstance(chosen, Chosen):
        return None
    rows = list(chosen.leaves)
    for leaf, mean in zip(leaves, means, strict=True):
        was, now = kept[leaf.index], rows[leaf.index]
        if was is not None and now is not None:
            learn = chosen.top_k.learn
            rows[leaf.index] = learn(was, now, mean, added_up=added_up)
    return tuple(rows)


def chosen_last(selection: Selection, kept: Any) -> Selection:
    """``selection``, or what it chose at the step that left ``kept``."""
    return Chosen(selection, kept) if isinstance(selection, TopK) else selection


def _set(x: jax.Array, rows: jax.Array, values: Any) -> jax.Array:
    """``x`` with these rows replaced; the numbers of a top-k are each there once."""
    return x.at[rows].set(values, unique_indices=True, mode="promise_in_bounds")
