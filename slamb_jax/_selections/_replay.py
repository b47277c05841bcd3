"""Recorded masks, so that a recorded run can be followed."""

import jax
import jax.numpy as jnp
import numpy as np

from slamb_jax._leaves import Leaf
from slamb_jax._selections._selection import Selection


class _Replay:
    """See :func:`replay_masks`."""

    def __init__(self, masks: np.ndarray):
        self._masks = masks

    def __repr__(self) -> str:
        return f"replay_masks(<{self._masks.shape} bool>)"

    def _recorded(self, leaf: Leaf) -> np.ndarray:
        if leaf.total != self._masks.shape[1]:
            raise ValueError(
                f"masks must have one column per coordinate: got shape "
                f"{self._masks.shape} for a tree of {leaf.total} elements"
            )
        return self._masks[:, leaf.offset : leaf.offset + leaf.size]

    def _now(self, step: jax.Array, table: np.ndarray) -> jax.Array:
        return jnp.asarray(table)[(step - 1) % len(table)]

    def whole(self, leaf: Leaf) -> bool:
        return bool(self._recorded(leaf).all())

    def width(self, leaf: Leaf) -> int:
        del leaf
        return 1

    def mask(self, step: jax.Array, leaf: Leaf) -> jax.Array:
        return self._now(step, self._recorded(leaf))[:, None]

    def age(self, step: jax.Array, leaf: Leaf) -> jax.Array:
        recorded = self._recorded(leaf)
        never = np.iinfo(np.int32).max
        since = np.full(recorded.shape, never, np.int32)
        last = np.full(recorded.shape[1], -1)
        for t, sent in enumerate(np.concatenate([recorded, recorded])):
            last = np.where(sent, t, last)  # the second lap knows the end of the first
            since[t % len(recorded)] = np.where(last >= 0, t - last, never)
        return jnp.minimum(step, self._now(step, since))[:, None]

    def rows(self, step: jax.Array, leaf: Leaf) -> jax.Array:
        recorded = self._recorded(leaf)
        table = np.full((len(recorded), recorded.sum(1).max()), leaf.size, np.int32)
        for row, sent in zip(table, recorded, strict=True):
            row[: sent.sum()] = np.flatnonzero(sent)
        return self._now(step, table)


def replay_masks(masks: np.ndarray) -> Selection:
    """A selection that replays recorded masks, so that a recorded run can be followed.

    Step t takes row ``t - 1``; after the last row it starts again at the first. A
    leaf whose recorded masks are all true is one that is always exchanged whole,
    whatever its size.

    Args:
      masks: ``(T, d)`` boolean array, d in the order of ``jax.tree.leaves``.

    Returns:
      A selection. The masks become constants of the compiled program.

    Raises:
      ValueError: if ``masks`` is not a boolean array of two dimensions with at least
        one row; when used, if d is not the number of elements in the tree.

    Examples:
      >>> import numpy as np, slamb_jax
      >>> masks = np.array([[True, False], [False, True]])
      >>> tx = slamb_jax.slamb(0.01, selection=slamb_jax.replay_masks(masks))
    """
    array = np.asarray(masks)
    if array.dtype != np.bool_ or array.ndim != 2 or len(array) == 0:
        raise ValueError(
            "masks must be a boolean array of shape (T, d) with T > 0, got "
            f"{array.dtype} of shape {array.shape}"
        )
    return _Replay(array)
