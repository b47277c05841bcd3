"""Checkpoints of all replicas, with checksums."""

import functools
import json
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple, Self, cast

import chex
import jax
import jax.numpy as jnp
import numpy as np

from slamb_jax._tree.checks import check_integer, check_range
from slamb_jax.checkpoint.format import (
    FORMAT,
    LeafMetadata,
    Metadata,
    abstract_array,
    broadcast_replicas,
    check_fits,
    check_format,
    find_damage,
    first_replica,
    leaf_metadata,
    leaves_by_name,
    place_like,
    raw,
    stored_struct,
)
from slamb_jax.checkpoint.store import ForeignCheckpointError, Store, try_read, warn
from slamb_jax.workers.agreement import differing
from slamb_jax.workers.checksums import checksums
from slamb_jax.workers.mesh import local, replicated
from slamb_jax.workers.replicas import check_replicas


class Restored(NamedTuple):
    """The checkpoint that :meth:`Checkpoints.restore` read."""

    step: int
    state: chex.ArrayTree  # with a leading replica axis, placed like ``like``
    extra: dict[str, Any]


class Checkpoints:
    """Saves and restores all replicas in a directory, for exact resume.

    The parameters and moments of n workers differ, so an exact checkpoint holds all n.
    Leaves whose replicas are equal to the bit (counts, keys, moments of what is
    exchanged densely) are stored once. A checkpoint also holds the name, shape and
    dtype of each leaf and a 64-bit checksum of each replica, computed on the devices.
    Where a killed process left a checkpoint incomplete, or it was damaged later,
    :meth:`restore` warns and reads the one before it.

    All processes must call each method, and see the same directory; each array is
    written by the process that holds it. Orbax does the writing, and nothing is
    pickled. Needs ``slamb-jax[checkpoint]``.

    Args:
      directory: where to write; made if it is missing.
      keep: how many checkpoints to keep, the latest ones; at least 2, so that there is
        one before the last.
      asynchronous: True: :meth:`save` copies the state on its devices and returns, and
        threads write the copy; the next save, :meth:`wait` and :meth:`close` wait for
        them and raise their errors. False: it returns when all is written, and copies
        nothing.

    Raises:
      ValueError: for ``keep`` out of range, or a ``directory`` that cannot be written.
      OSError: where writing fails, on a full disk say: earlier checkpoints remain.
      ImportError: without Orbax.

    Examples:
      >>> import tempfile, jax.numpy as jnp, slamb_jax
      >>> state = {"w": jnp.array([[1.0, 2.0], [3.0, 4.0]]), "count": jnp.full(2, 7)}
      >>> with slamb_jax.Checkpoints(tempfile.mkdtemp()) as checkpoints:
      ...     size = checkpoints.save(7, state, extra={"position": 112})
      ...     found = checkpoints.restore(state)
      >>> print(found.step, found.extra, found.state["w"][1])
      7 {'position': 112} [3. 4.]
    """

    def __init__(
        self,
        directory: str | pathlib.Path,
        *,
        keep: int = 2,
        asynchronous: bool = False,
    ) -> None:
        self._store = Store(directory, keep=keep, asynchronous=asynchronous)
        self._asynchronous = asynchronous
        self._damaged: set[int] = set()
        for name in self._store.unfinished:
            warn(f"a save into {self._store.path(name)} was cut short and is ignored")

    def save(
        self,
        step: int,
        state: chex.ArrayTree,
        extra: dict[str, Any] | None = None,
        *,
        rtol: float = 0.0,
    ) -> int:
        """Writes a checkpoint.

        Args:
          step: its number, larger than those before it.
          state: parameters, optimizer state, random keys: with a leading replica axis.
          extra: what JSON can hold, such as the position in the data.
          rtol: floating-point leaves whose replicas agree to this tolerance (see
            :func:`assert_replicas_agree`) are stored once, as the first replica. 0 is
            exact. 1e-5 is compact at steps that averaged the parameters, t = 1, H + 1,
            2H + 1, ...: it stores them once, without the rounding by which the
            replicas differ.

        Returns:
          The bytes of its arrays, before Orbax compresses them.

        Raises:
          ValueError: for ``step``, ``extra`` or ``rtol`` out of range, or a ``state``
            without a common replica axis.
        """
        check_integer("step", step, 0)
        check_range("rtol", rtol, 0.0, open_high=True)
        if extra is not None and not isinstance(extra, dict):
            raise ValueError(f"extra must be a dict, got {extra!r}")
        n = check_replicas("state", state)
        leaves = leaves_by_name(state)
        if not leaves:
            raise ValueError(f"state must have leaves, got {state!r}")
        sums = checksums(list(leaves.values()))
        unlike = (sums != sums[:, :1]).any((1, 2))
        if rtol:
            unlike = np.array(differing(list(leaves.values()), rtol)) > 0
        arrays: dict[str, jax.Array | np.ndarray] = {}
        metadata: dict[str, LeafMetadata] = {}
        for (name, x), same, own in zip(leaves.items(), ~unlike, sums, strict=True):
            if same:  # on the host: older jax cannot slice a replicated array for Orbax
                arrays[name] = np.asarray(local(replicated(first_replica, raw(x))))
            else:  # the caller may donate the state before the threads have written it
                arrays[name] = jnp.copy(raw(x)) if self._asynchronous else raw(x)
            metadata[name] = leaf_metadata(x, own[:1] if same else own, once=bool(same))
        return self.write(step, arrays, n, metadata, extra or {})

    def write(
        self,
        step: int,
        arrays: Mapping[str, jax.Array | np.ndarray],
        workers: int,
        leaves: dict[str, LeafMetadata],
        extra: dict[str, Any],
    ) -> int:
        """Writes arrays as they are stored, with their metadata; returns the bytes."""
        try:
            json.dumps(extra)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"extra must be what JSON can hold, got {error}"
            ) from error
        for damaged in sorted(self._damaged):  # their numbers may be written again
            self._store.delete(damaged)
        self._damaged.clear()
        latest = self._store.latest()
        if latest is not None and step <= latest:
            raise ValueError(f"step must be larger than the last, {latest}, got {step}")
        metadata = Metadata(format=FORMAT, workers=workers, leaves=leaves, extra=extra)
        self._store.write(step, arrays, metadata)
        return sum(x.nbytes for x in arrays.values())

    def wait(self) -> None:
        """Waits until every save is written."""
        self._store.wait()

    def restore(self, like: chex.ArrayTree) -> Restored | None:
        """Reads the latest sound checkpoint, placed like ``like``; None without any.

        Args:
          like: a state as :func:`replicate` returned it. Its structure, shapes, dtypes
            and shardings count, not its values.

        Raises:
          ValueError: if the checkpoint does not fit: of another model or optimizer,
            another number of workers (then :func:`resize` it) or a later format; if
            it was not written by this class; or if there are several and all are
            damaged, which no interrupted save does.
          OSError: where reading fails for another reason than the files: memory,
            rights. Nothing is deleted then, nor with a ValueError.
        """
        skipped: dict[int, str] = {}
        for step in self._store.steps():
            found, problem = self._try_restore(step, like)
            if found is not None:
                self._damaged |= skipped.keys()
                return found
            skipped[step] = problem
            warn(
                f"checkpoint {self._store.path(step)} is damaged ({problem}) and is "
                "ignored: going back to the one before it"
            )
        if len(skipped) > 1:
            problems = "; ".join(f"{step}: {why}" for step, why in skipped.items())
            raise ValueError(
                f"no checkpoint in {self._store.directory} can be read ({problems}): "
                "all are kept; to start anew, move them away"
            )
        self._damaged |= skipped.keys()
        return None

    def _try_restore(
        self, step: int, like: chex.ArrayTree
    ) -> tuple[Restored | None, str]:
        """The checkpoint, or None and how it is damaged."""
        path = self._store.path(step)
        metadata, problem = try_read(path, functools.partial(self.metadata, step))
        if metadata is None:
            return None, problem
        check_fits(metadata, like, path)
        leaves = leaves_by_name(like)
        structs = {
            name: stored_struct(raw(x), once=metadata["leaves"][name]["once"])
            for name, x in leaves.items()
        }
        read = functools.partial(self._store.read, step, structs)
        arrays, problem = try_read(path, read)
        if arrays is None:
            return None, problem
        placed = {name: place_like(arrays[name], x) for name, x in leaves.items()}
        if problem := find_damage(metadata, placed):
            return None, problem
        state = jax.tree.unflatten(jax.tree.structure(like), placed.values())
        return Restored(step, state, metadata["extra"]), ""

    def metadata(self, step: int) -> Metadata:
        """Reads the metadata of a checkpoint: workers, leaves, checksums, extra."""
        found = self._store.metadata(step)
        if not isinstance(found, dict):
            raise ValueError(f"its metadata are {found!r}")
        if "leaves" not in found:
            raise ForeignCheckpointError
        return cast(Metadata, found)

    def load(self, step: int) -> tuple[Metadata, dict[str, np.ndarray]]:
        """Reads a checkpoint to the host, without a state to compare it with."""
        path = self._store.path(step)
        metadata, problem = try_read(path, functools.partial(self.metadata, step))
        if metadata is not None:
            check_format(metadata, path)
            n, leaves = metadata["workers"], metadata["leaves"]
            like = {name: abstract_array(leaf, n) for name, leaf in leaves.items()}
            read = functools.partial(self._store.read, step, like)
            arrays, problem = try_read(path, read)
            if arrays is not None:
                replicas = {
                    name: broadcast_replicas(x, leaves[name], n)
                    for name, x in arrays.items()
                }
                if not (problem := find_damage(metadata, replicas)):
                    return metadata, arrays
        raise ValueError(
            f"checkpoint {path} is damaged ({problem}): "
            "remove it, and the one before it is the latest"
        )

    def latest(self) -> int | None:
        """The step of the latest checkpoint, sound or damaged; None without any."""
        return self._store.latest()

    def close(self) -> None:
        """Waits until every save is written, and releases the directory."""
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
