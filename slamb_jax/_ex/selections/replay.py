"""Recorded masks, so that a recorded run can be followed."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from slamb_jax._ex.selections.selection import Selection
from slamb_jax._leaves import Leaf


def replay_masks(masks: Sequence[np.ndarray]) -> Selection:
    """A selection that replays recorded masks, so that a recorded run can be followed.

    Step t takes row ``t - 1``; after the last row it starts again at the first. A leaf
    whose recorded masks are all true is dense, whatever its size.

    Args:
      masks: for each leaf, in the order of ``jax.tree.leaves``, a boolean array of
        shape (T, leaf size), T at least 1.

    Returns:
      A selection. The masks become constants of the compiled program.

    Raises:
      ValueError: for masks of another dtype or shape; when used, if they do not fit
        the leaves.

    Examples:
      >>> import numpy as np, slamb_jax
      >>> masks = [np.array([[True, False], [False, True]])]
      >>> replay = slamb_jax.selections.replay_masks(masks)
      >>> tx = slamb_jax.slamb(0.01, slamb_jax.Exchange(selection=replay))
    """
    arrays = [np.asarray(mask) for mask in masks]
    for i, array in enumerate(arrays):
        if array.dtype != np.bool_ or array.ndim != 2 or len(array) == 0:
            raise ValueError(
                "masks must have boolean arrays of shape (T, leaf size) with T > 0, "
                f"got {array.dtype} of shape {array.shape} for leaf {i}"
            )
    return _Replay(arrays)


class _Replay(Selection):
    """See :func:`replay_masks`."""

    def __init__(self, masks: list[np.ndarray]):
        self._masks = masks

    def __repr__(self) -> str:
        return f"replay_masks(<{len(self._masks)} leaves>)"

    def dense(self, leaf: Leaf) -> bool:
        return bool(self._recorded(leaf).all())

    def blocks(self, step: jax.Array, leaf: Leaf) -> jax.Array:
        recorded = self._recorded(leaf)
        table = np.full((len(recorded), recorded.sum(1).max()), leaf.size, np.int32)
        for row, mask in zip(table, recorded, strict=True):
            row[: mask.sum()] = np.flatnonzero(mask)
        return self._at(step, table)

    def age(self, step: jax.Array, leaf: Leaf) -> jax.Array:
        recorded = self._recorded(leaf)
        never = np.iinfo(np.int32).max
        since = np.full(recorded.shape, never, np.int32)
        last = np.full(recorded.shape[1], -1)
        for t, mask in enumerate(np.concatenate([recorded, recorded])):
            last = np.where(mask, t, last)  # the second lap knows the end of the first
            since[t % len(recorded)] = np.where(last >= 0, t - last, never)
        return jnp.minimum(step, self._at(step, since))[:, None]

    def _recorded(self, leaf: Leaf) -> np.ndarray:
        fits = leaf.index < len(self._masks)
        if not fits or self._masks[leaf.index].shape[1] != leaf.size:
            shapes = [mask.shape for mask in self._masks]
            raise ValueError(
                "masks must have one array of shape (T, leaf size) for each leaf, got "
                f"shapes {shapes} for leaf {leaf.index} of {leaf.size} elements"
            )
        return self._masks[leaf.index]

    def _at(self, step: jax.Array, table: np.ndarray) -> jax.Array:
        return jnp.asarray(table)[(step - 1) % len(table)]
