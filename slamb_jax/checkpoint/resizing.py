"""Turns the state of n workers into the state of m."""

from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from slamb_jax._core.checks import check_integer, is_complex
from slamb_jax._core.rounding import hash_u32, hash_words
from slamb_jax.workers.mesh import check_replicas, is_key, on_raw


def resize(state: chex.ArrayTree, workers: int) -> chex.ArrayTree:
    r"""Turns the state of n workers into the state of m workers, and keeps its means.

    The n old workers, and the m new workers, divide the same interval into equal parts.
    A new worker gets the mean of the old workers that its part overlaps: with
    :math:`w_{ji}` the share of new worker j's part that old worker i covers,

    .. math::

      x'_j = \sum_i w_{ji}\,x_i, \qquad
      \frac{1}{m} \sum_j x'_j = \frac{1}{n} \sum_i x_i

    for every floating-point or complex leaf, to the rounding of its dtype, so no
    momentum that still waits for its exchange is lost. From 4 to 2 each pair becomes
    its mean; from 2 to 8 each worker is copied four times, exactly. A leaf of another
    type (a count) must be equal on all workers and stays; a leaf that numbers the
    workers, 0 to n - 1, numbers the new ones. Typed random keys that are equal stay
    equal; where each old worker has its own key, each new worker has its own. Scaling
    the learning rate is up to the caller. If the batch of each worker changes, v
    converges to another value.

    Args:
      state: a tree of arrays of shape ``(n, ...)``, all of them on this process; with
        several processes, save it and restore it with ``workers=m``.
      workers: m, at least 1.

    Returns:
      A tree like ``state`` of NumPy arrays (and typed keys) of shape ``(m, ...)``,
      which :func:`per_worker_step` places on its mesh.

    Raises:
      ValueError: for ``workers`` out of range, leaves without a common leading axis,
        and counts that differ between workers.
      RuntimeError: by jax, for leaves on several processes.

    Examples:
      >>> import jax.numpy as jnp
      >>> from slamb_jax.checkpoint import resize
      >>> state = {"m": jnp.array([1.0, 3.0, 5.0, 7.0]), "count": jnp.full(4, 9)}
      >>> resize(state, 2)
      {'count': array([9, 9], dtype=int32), 'm': array([2., 6.], dtype=float32)}
    """
    check_integer("workers", workers, 1)
    check_replicas("state", state)

    def resized(path: Any, x: Any) -> Any:
        name = jax.tree_util.keystr(path)
        return on_raw(partial(resize_leaf, name, m=workers, keys=is_key(x)), x)

    return jax.tree_util.tree_map_with_path(resized, state)


def resize_leaf(name: str, x: Any, m: int, *, keys: bool) -> np.ndarray:
    """Turns the n replicas of a leaf, or the words of n keys, into m.

    1. Floating point: each new worker gets the mean of the old ones it overlaps.
    2. What is equal on all old workers is so on all new ones.
    3. Keys: each new worker gets that of the old one in whose part its own begins,
       hashed with its number if the worker before it has that key.
    4. The numbers of the workers become those of the new ones.

    Raises:
      ValueError: for any other leaf: no value of it is right for all workers.
    """
    x = np.asarray(x)
    n = len(x)
    if jnp.issubdtype(x.dtype, jnp.inexact):  # step 1
        return np.stack([_mean_of_overlap(x, j, m) for j in range(m)])
    if (x == x[:1]).all():  # step 2
        return np.broadcast_to(x[:1], (m, *x.shape[1:])).copy()
    if keys:  # step 3
        old = np.arange(m) * n // m
        words = x[old].astype(np.uint32)
        for j in np.flatnonzero(old[1:] == old[:-1]) + 1:
            words[j] = hash_u32(words[j], hash_words(int(j)))
        return words
    if x.ndim == 1 and (x == np.arange(n)).all():  # step 4
        return np.arange(m, dtype=x.dtype)
    raise ValueError(
        f"state{name} must be the same on all workers, or floating point, to "
        f"be resized, got {x.dtype} {x.tolist()!r:.60}"
    )


def _mean_of_overlap(x: np.ndarray, j: int, m: int) -> np.ndarray:
    """The mean of the old workers that new worker j overlaps, in units of 1/(n m).

    1. In these units old worker i has the part from i m to (i + 1) m, and new worker j
       that from j n to (j + 1) n: a range of old workers overlaps it.
    2. One old worker is copied, exactly.
    3. Several are averaged in float64, each with the length of its overlap.
    """
    n = len(x)
    old = np.arange(n)
    overlap = np.minimum((old + 1) * m, (j + 1) * n) - np.maximum(old * m, j * n)
    parts = x[overlap > 0]  # step 1
    if len(parts) == 1:  # step 2
        return parts[0]
    wide = parts.astype(np.complex128 if is_complex(x) else np.float64)  # step 3
    mean = np.average(wide, axis=0, weights=overlap[overlap > 0])
    return mean.astype(x.dtype)
