"""The state of n workers as the state of m."""

import pathlib
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from slamb_jax._agree import checksums
from slamb_jax._checkpoint import Checkpoints
from slamb_jax._checks import check_integer
from slamb_jax._replicas import check_replicas, is_key


def resize(state: chex.ArrayTree, workers: int) -> chex.ArrayTree:
    r"""The state of n workers, with a leading replica axis, as one of m workers.

    Lay the n old workers side by side on a line of length 1, and the m new ones on the
    same line. A new worker gets the mean of the old ones below it, weighted by how much
    of its stretch each covers: with :math:`w_{ji}` the share of new worker j's stretch
    that lies on old worker i's,

    .. math::

      x'_j = \sum_i w_{ji}\,x_i, \qquad
      \frac{1}{m} \sum_j x'_j = \frac{1}{n} \sum_i x_i

    for parameters, moments, residuals and whatever else is floating point: the mean
    over the workers is the same before and after (to the rounding of the dtype), and
    with the mean of m everything that was still unsent. From 4 to 2 each pair becomes
    its mean; from 2 to 8 each is copied four times, exactly; 8 to 1 is the mean.
    Leaves of other types (counts, keys) must be the same on all workers, and stay.

    What does not stay is the spread: the mean of v is that of the old workers'
    gradients, and if each worker's batch changes so does what v converges to. n in the
    update is that of the new mesh by itself; the learning rate is the caller's.

    Args:
      state: a tree of arrays of shape ``(n, ...)`` that this process has whole; of
        several processes, resize their checkpoint (``slamb-jax resize``).
      workers: m, at least 1.

    Returns:
      A tree like ``state`` of NumPy arrays (and typed keys) of shape ``(m, ...)``, for
      :func:`per_worker_step` to place.

    Raises:
      ValueError: for ``workers`` out of range, leaves without a common leading axis,
        leaves of several processes, and counts that differ between workers.

    Examples:
      >>> import jax.numpy as jnp, slamb_jax
      >>> state = {"m": jnp.array([1.0, 3.0, 5.0, 7.0]), "count": jnp.full(4, 9)}
      >>> slamb_jax.resize(state, 2)
      {'count': array([9, 9], dtype=int32), 'm': array([2., 6.], dtype=float32)}
    """
    check_integer("workers", workers, 1)
    check_replicas("state", state)
    return jax.tree_util.tree_map_with_path(
        lambda path, x: _resized(jax.tree_util.keystr(path), x, workers), state
    )


def resize_checkpoint(source: pathlib.Path, out: pathlib.Path, workers: int) -> str:
    """Resizes the latest checkpoint of a directory into another; says what it did."""
    check_integer("workers", workers, 1)
    if not source.is_dir():
        raise ValueError(f"CHECKPOINT must be a directory of checkpoints, got {source}")
    if out.exists() and any(out.iterdir() if out.is_dir() else [out]):
        raise ValueError(f"OUT must be a directory that is empty or new, got {out}")
    with Checkpoints(source) as checkpoints:
        step = checkpoints.latest()
        if step is None:
            raise ValueError(f"CHECKPOINT must hold a checkpoint, got {source}")
        about, arrays = checkpoints.load(step)
    told = {}
    for name, leaf in about["leaves"].items():
        if not leaf["once"]:
            arrays[name] = _resized(name, arrays[name], workers)
        x = arrays[name][None] if leaf["once"] else arrays[name]
        told[name] = leaf | {"checksums": checksums([x])[0].tolist()}
    with Checkpoints(out) as checkpoints:
        size = checkpoints.write(step, arrays, workers, told, about["extra"])
    return (
        f"{out / str(step)}: step {step}, {about['workers']} workers to {workers}, "
        f"{len(told)} leaves, {size} bytes"
    )


def _resized(name: str, x: Any, m: int) -> Any:
    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        raise ValueError(
            f"state{name} lies on several processes: save a checkpoint and resize that "
            f"(slamb-jax resize CHECKPOINT OUT --workers {m})"
        )
    if is_key(x):
        bits = _resized(name, jax.random.key_data(x), m)
        return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(x))
    x = np.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        if (x != x[:1]).any():
            raise ValueError(
                f"state{name} must be the same on all workers, or floating point, to "
                f"be resized, got {x.dtype} {x.tolist()!r:.60}"
            )
        return np.broadcast_to(x[:1], (m, *x.shape[1:])).copy()
    return np.stack([_stretch(x, j, m) for j in range(m)])


def _stretch(x: np.ndarray, j: int, m: int) -> np.ndarray:
    """The mean over the new worker's stretch, in units of 1/(n m)."""
    n = len(x)
    below = range(j * n // m, -(-(j + 1) * n // m))
    if len(below) == 1:
        return x[below[0]]
    cover = [min((i + 1) * m, (j + 1) * n) - max(i * m, j * n) for i in below]
    wide = x[below[0] : below[-1] + 1].astype(np.float64)
    return np.average(wide, axis=0, weights=cover).astype(x.dtype)
