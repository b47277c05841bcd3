"""Checkpoints of all replicas, with checksums."""

import json
import pathlib
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import chex
import jax
import jax.numpy as jnp
import numpy as np

from slamb_jax._checks import check_integer, check_range
from slamb_jax.checkpoint.checks import another_selection, check_count, selects_of
from slamb_jax.checkpoint.format import (
    FORMAT,
    LeafMetadata,
    Metadata,
    leaf_metadata,
    leaves_by_name,
    read_checkpoint,
    with_checksum,
)
from slamb_jax.checkpoint.store import Store
from slamb_jax.exchange import Exchange
from slamb_jax.workers.agreement import differing
from slamb_jax.workers.checksums import checksums
from slamb_jax.workers.mesh import raw, replicated
from slamb_jax.workers.replicas import check_replicas


class Restored(NamedTuple):
    """The checkpoint that :meth:`Checkpoints.restore` read."""

    step: int
    state: chex.ArrayTree  # with a leading replica axis, placed like ``like``
    extra: dict[str, Any]


class Checkpoints:
    """Saves and restores all replicas in a directory, for exact resume.

    Leaves whose replicas are equal to the bit (counts, keys, moments of what is
    exchanged densely) are stored once, others n times, with a 64-bit checksum of every
    replica. Where a killed process left a checkpoint incomplete, or it was damaged
    later, :meth:`restore` warns and reads the one before it.

    All processes must call each method, and see the same directory; each array is
    written by the process that holds it, through Orbax. Needs
    ``slamb-jax[checkpoint]``.

    Args:
      directory: where to write; made if it is missing. Until the first :meth:`save`
        nothing in it is changed, and it may be one that can only be read. Only one run
        may save into it at a time, where the file system has locks.
      keep: how many checkpoints to keep, the latest ones; at least 2, so that there is
        one before the last.
      asynchronous: whether :meth:`save` copies the state on its devices and returns,
        and threads write the copy; the next save, :meth:`wait` and :meth:`close` wait
        for them and raise their errors.
      exchange: that of the state. Which coordinates it exchanges when is saved too, and
        :meth:`restore` warns where that was another: ages then begin wrong, and with
        them rates. None: this is not looked at.

    Raises:
      ValueError: for ``keep`` out of range, or a ``directory`` that cannot be made, or
        in :meth:`save` not be written to.
      OSError: where writing fails, on a full disk say, or while another run saves into
        the directory: earlier checkpoints remain.
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
        exchange: Exchange | None = None,
    ) -> None:
        self._selects = selects_of(exchange)
        self._store = Store(directory, keep=keep, asynchronous=asynchronous)
        self._asynchronous = asynchronous
        self._damaged: set[int] = set()
        for name in self._store.unfinished:
            path = self._store.path(name)
            warnings.warn(
                f"a save into {path} was cut short and is ignored", stacklevel=2
            )

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
            exact; 1e-5 is compact at steps that averaged the parameters, t = 1, H + 1,
            2H + 1, ...

        Returns:
          The bytes of its arrays, before Orbax compresses them.

        Raises:
          ValueError: for ``step``, ``extra`` or ``rtol`` out of range, a ``state``
            without a common replica axis, or counts of steps that differ between
            workers.
        """
        check_integer("step", step, 0)
        check_range("rtol", rtol, 0.0, open_high=True)
        if extra is not None and not isinstance(extra, dict):
            raise ValueError(f"extra must be a dict, got {extra!r}")
        n = check_replicas("state", state)
        leaves = leaves_by_name(state)
        if not leaves:
            raise ValueError(f"state must have leaves, got {state!r}")
        values = list(leaves.values())
        sums = checksums(values)
        unlike = differing(values, sums, rtol)
        arrays: dict[str, jax.Array | np.ndarray] = {}
        metadata: dict[str, LeafMetadata] = {}
        for (name, x), apart, own in zip(leaves.items(), unlike, sums, strict=True):
            check_count(name, x, int(apart), n)
            if apart:  # the caller may donate the state before the threads have written
                arrays[name] = jnp.copy(raw(x)) if self._asynchronous else raw(x)
            else:  # on the host: older jax cannot slice a replicated array for Orbax
                arrays[name] = np.asarray(replicated(_first, raw(x)))
                own = own[:1]
            metadata[name] = leaf_metadata(x, own.tolist(), once=not apart)
        return self.write(step, arrays, n, metadata, extra or {})

    def write(
        self,
        step: int,
        arrays: Mapping[str, jax.Array | np.ndarray],
        workers: int,
        leaves: dict[str, LeafMetadata],
        extra: dict[str, Any],
        selects: dict[str, str] | None = None,
    ) -> int:
        """Writes arrays as they are stored, with their metadata; returns the bytes."""
        try:
            json.dumps(extra)
        except (TypeError, ValueError) as error:
            raise ValueError(f"extra must be what JSON can hold: {error}") from error
        self._store.begin_writing()
        for damaged in sorted(self._damaged):  # their numbers may be written again
            self._store.delete(damaged)
        self._damaged.clear()
        latest = self._store.latest()
        if latest is not None and step <= latest:
            raise ValueError(f"step must be larger than the last, {latest}, got {step}")
        metadata = {"format": FORMAT, "workers": workers, "leaves": leaves}
        selects = self._selects if selects is None else selects
        metadata |= {"extra": extra, "selects": selects}
        self._store.write(step, arrays, with_checksum(metadata))
        return sum(x.nbytes for x in arrays.values())

    def wait(self) -> None:
        """Waits until every save is written."""
        self._store.wait()

    def restore(
        self,
        like: chex.ArrayTree,
        step: int | None = None,
        *,
        workers: int | None = None,
    ) -> Restored | None:
        """Reads the latest sound checkpoint, placed like ``like``; None without any.

        Args:
          like: a state as :func:`replicate` returned it. Its structure, shapes, dtypes
            and shardings count, not its values.
          step: read this one instead. To go on from there save into another
            directory, or move the later ones away.
          workers: the number of workers that ``like`` has, to allow a checkpoint of
            another number, which is resized by the rule of :func:`resize`. Every
            process then reads all replicas.

        Raises:
          ValueError: if the checkpoint does not fit: of another model or optimizer,
            another number of workers (without ``workers``) or a later format; if
            it was not written by this class; if ``step`` is not there or damaged; or
            if there are several and all are damaged, which no interrupted save does.
          OSError: where reading fails for another reason than the files: memory,
            rights. Nothing is deleted then, nor with a ValueError.
        """
        if workers is not None and (n := check_replicas("like", like)) != workers:
            raise ValueError(f"workers must be those of like, {n}, got {workers!r}")
        skipped: dict[int, str] = {}
        steps = self._store.steps()
        if step is not None and step not in steps:
            raise ValueError(f"step must be one of {sorted(steps)}, got {step!r}")
        for at in steps if step is None else [step]:
            found, problem = read_checkpoint(
                self._store, at, like, resized=workers is not None
            )
            if found is not None:
                self._damaged |= skipped.keys()
                metadata, leaves = found
                path = self._store.path(at)
                if other := another_selection(metadata["selects"], self._selects):
                    warnings.warn(f"checkpoint {path} is of {other}", stacklevel=2)
                state = jax.tree.unflatten(jax.tree.structure(like), leaves.values())
                return Restored(at, state, metadata["extra"])
            if step is not None:
                path = self._store.path(step)
                raise ValueError(f"checkpoint {path} is damaged ({problem})")
            skipped[at] = problem
            warnings.warn(
                f"checkpoint {self._store.path(at)} is damaged ({problem}) and is "
                "ignored: going back to the one before it",
                stacklevel=2,
            )
        if len(skipped) > 1:
            problems = "; ".join(f"{step}: {why}" for step, why in skipped.items())
            raise ValueError(
                f"no checkpoint in {self._store.directory} can be read ({problems}): "
                "all are kept; to start anew, move them away"
            )
        self._damaged |= skipped.keys()
        return None

    def metadata(self, step: int) -> Metadata:
        """Reads the metadata of a checkpoint: workers, leaves, checksums, extra."""
        return self._store.metadata(step)

    def load(self, step: int) -> tuple[Metadata, dict[str, np.ndarray]]:
        """Reads a checkpoint to the host as it is stored, without a state to fit."""
        found, problem = read_checkpoint(self._store, step)
        if found is None:
            raise ValueError(
                f"checkpoint {self._store.path(step)} is damaged ({problem}): "
                "remove it, and the one before it is the latest"
            )
        metadata, leaves = found
        once = {name: leaf["once"] for name, leaf in metadata["leaves"].items()}
        return metadata, {k: x[0, ...] if once[k] else x for k, x in leaves.items()}

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


def _first(x: jax.Array) -> jax.Array:
    return x[0]
