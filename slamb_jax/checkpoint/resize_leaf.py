"""The replicas of one leaf for another number of workers."""

import jax.numpy as jnp
import numpy as np

from slamb_jax.workers.keys import resized_words


def resize_leaf(name: str, x: np.ndarray, m: int, *, keys: bool) -> np.ndarray:
    """The n replicas of a leaf as m, by the rule of :func:`resize`.

    Raises:
      ValueError: for a leaf that is not floating point and differs between workers.
    """
    if jnp.issubdtype(x.dtype, jnp.floating):
        return np.stack([_weighted_mean(x, j, m) for j in range(m)])
    if (x != x[:1]).any():
        if keys:
            return resized_words(x, m)
        if x.ndim == 1 and (x == np.arange(len(x))).all():
            return np.arange(m, dtype=x.dtype)
        raise ValueError(
            f"state{name} must be the same on all workers, or floating point, to "
            f"be resized, got {x.dtype} {x.tolist()!r:.60}"
        )
    return np.broadcast_to(x[:1], (m, *x.shape[1:])).copy()


def _weighted_mean(x: np.ndarray, j: int, m: int) -> np.ndarray:
    """The mean over the old workers that new worker j overlaps, in units of 1/(n m)."""
    n = len(x)
    below = range(j * n // m, -(-(j + 1) * n // m))
    if len(below) == 1:
        return x[below[0]]
    overlap = [min((i + 1) * m, (j + 1) * n) - max(i * m, j * n) for i in below]
    wide = x[below[0] : below[-1] + 1].astype(np.float64)
    return np.average(wide, axis=0, weights=overlap).astype(x.dtype)
