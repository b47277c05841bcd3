"""Turns the state of n workers into the state of m."""

import pathlib
from functools import partial
from typing import Any

import chex
import jax

from slamb_jax._checks import check_integer
from slamb_jax.checkpoint.checkpoints import Checkpoints
from slamb_jax.checkpoint.format import holds_keys, resize_leaf, with_checksum
from slamb_jax.workers.agreement import checksums
from slamb_jax.workers.mesh import check_replicas, is_key, on_raw


def resize(state: chex.ArrayTree, workers: int) -> chex.ArrayTree:
    r"""Turns the state of n workers into the state of m workers, and keeps its means.

    The n old workers, and the m new workers, divide the same interval into equal parts.
    A new worker gets the mean of the old workers that its part overlaps: with
    :math:`w_{ji}` the share of new worker j's part that old worker i covers,

    .. math::

      x'_j = \sum_i w_{ji}\,x_i, \qquad
      \frac{1}{m} \sum_j x'_j = \frac{1}{n} \sum_i x_i

    for every floating-point leaf, to the rounding of its dtype, so no momentum that
    still waits for its exchange is lost. From 4 to 2 each pair becomes its mean; from 2
    to 8 each worker is copied four times, exactly. A leaf of another type (a count)
    must be equal on all workers and stays; a leaf that numbers the workers, 0 to n - 1,
    numbers the new ones. Typed random keys that are equal stay equal; where each old
    worker has its own key, each new worker has its own. Scaling the learning rate is up
    to the caller. If the batch of each worker changes, v converges to another value.

    Args:
      state: a tree of arrays of shape ``(n, ...)``, all of them on this process; with
        several processes, resize the checkpoint instead (``slamb-jax resize``).
      workers: m, at least 1.

    Returns:
      A tree like ``state`` of NumPy arrays (and typed keys) of shape ``(m, ...)``,
      which :func:`per_worker_step` places on its mesh.

    Raises:
      ValueError: for ``workers`` out of range, leaves without a common leading axis,
        leaves on several processes, and counts that differ between workers.

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
        if isinstance(x, jax.Array) and not x.is_fully_addressable:
            raise ValueError(
                f"state{name} is on several processes: save a checkpoint and resize "
                f"that (slamb-jax resize CHECKPOINT OUT --workers {workers})"
            )
        return on_raw(partial(resize_leaf, name, m=workers, keys=is_key(x)), x)

    return jax.tree_util.tree_map_with_path(resized, state)


def resize_checkpoint(source: pathlib.Path, out: pathlib.Path, workers: int) -> str:
    """Resizes the latest checkpoint of a directory into another; returns a summary."""
    check_integer("workers", workers, 1)
    if not source.is_dir():
        raise ValueError(f"CHECKPOINT must be a directory of checkpoints, got {source}")
    if out.exists() and any(out.iterdir() if out.is_dir() else [out]):
        raise ValueError(f"OUT must be a directory that is empty or new, got {out}")
    with Checkpoints(source) as checkpoints:
        step = checkpoints.latest()
        if step is None:
            hint = f": did you mean {source.parent}?" if source.name.isdigit() else ""
            raise ValueError(f"CHECKPOINT must hold a checkpoint, got {source}{hint}")
        metadata, arrays = checkpoints.load(step)
    leaves = metadata["leaves"]
    for name, leaf in leaves.items():
        if not leaf["once"]:
            keys = holds_keys(leaf)
            arrays[name] = resize_leaf(name, arrays[name], workers, keys=keys)
            leaf["checksums"] = checksums([arrays[name]])[0].tolist()
    with Checkpoints(out) as checkpoints:
        new = with_checksum(metadata | {"workers": workers})
        size = checkpoints._store.write(step, arrays, new)
    return (
        f"{out / str(step)}: step {step}, {metadata['workers']} workers to {workers}, "
        f"{len(leaves)} leaves, {size} bytes"
    )
