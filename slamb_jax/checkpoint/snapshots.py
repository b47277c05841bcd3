"""Snapshots of each process's own workers, with which the others go on without it."""

import json
import pathlib
import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from slamb_jax.checkpoint import files
from slamb_jax.checkpoint import format as stored
from slamb_jax.checkpoint.files import together
from slamb_jax.checkpoint.format import Extra
from slamb_jax.workers import agreement
from slamb_jax.workers import mesh as meshes
from slamb_jax.workers.mesh import gather, raw
from slamb_jax.workers.replicas import copied_replicas, keys_of_workers

_SUFFIX, _JOB = ".snapshot", ".job"


class Recovered(NamedTuple):
    """The snapshot from which all processes go on."""

    step: int
    state: chex.ArrayTree  # with a leading replica axis, placed like ``like``
    extra: dict[str, Any]
    newcomers: list[int]  # the workers that begin with a copy of another's replica


class Snapshots:
    r"""Keeps this process's own workers on its own host, to go on when one is lost.

    :class:`Checkpoints` are shared, and written now and then. A snapshot is local, on a
    RAM disk such as ``/dev/shm``, and written every few steps, and no process waits for
    another. If a process is lost, the others start again, without it or with another in
    its place, from the latest step that all who are left have. Each worker gets its own
    replica, and newcomer j a copy of survivor j mod s, of s survivors, with new typed
    random keys where those of the workers differ. All that is equal on all workers
    stays equal, to the bit: under the default exchange all but the momentum. The
    momentum of the lost worker is gone, and where workers step by themselves all that
    it did since the last average.

    Args:
      directory: this process's own, and the same when it starts again under another
        number; made if it is missing. It holds at most three snapshots.

    Examples:
      >>> import tempfile, jax.numpy as jnp, slamb_jax
      >>> state = {"w": jnp.array([[1.0, 2.0], [3.0, 4.0]]), "count": jnp.full(2, 7)}
      >>> snapshots = slamb_jax.Snapshots(tempfile.mkdtemp())
      >>> assert snapshots.restore(state) is None  # nothing is saved yet
      >>> size = snapshots.save(7, state, extra={"position": 112})
      >>> found = snapshots.restore(state)
      >>> print(found.step, found.extra, found.state["w"][1], found.newcomers)
      7 {'position': 112} [3. 4.] []
    """

    def __init__(self, directory: str | pathlib.Path) -> None:
        self._directory = pathlib.Path(directory).absolute()
        self._job = 0  # when it began, in ns
        self._unlock: Callable[[], object] | None = None  # once it has the directory

    def save(self, step: int, state: chex.ArrayTree, extra: Extra = None) -> int:
        """Writes the replicas of this process's workers, and asks no other process.

        Args:
          step: its number. All snapshots but this one and the one before are removed.
          state: parameters, optimizer state, random keys: with a leading replica axis.
          extra: a dict that JSON can hold, with the position in the data for example.

        Returns:
          The bytes of its arrays; replicas of one process that are equal count once.

        Raises:
          ValueError: for ``step`` or ``extra`` out of range, for a ``state`` without a
            common replica axis, and before :meth:`restore`.
          OSError: where the directory is full, or cannot be written to.
        """
        if not self._job:
            raise ValueError("restore(like) must come before save: it begins the job")
        meshes.check_replicas("state", state)
        by_name = stored.leaves_by_name(state)
        for x in by_name.values():  # all are on their way while the first is written
            for shard in getattr(raw(x), "addressable_shards", ()):
                shard.data.copy_to_host_async()
        arrays: dict[str, Any] = {}
        for name, x in by_name.items():
            mine = np.ascontiguousarray(meshes.own_replicas(raw(x)))
            mine = mine.reshape(workers := len(mine), -1).view(np.uint8)
            arrays[name] = mine[:1] if (mine[1:] == mine[:1]).all() else mine
        size = sum(x.nbytes for x in arrays.values())
        metadata = stored.describe(step, state, extra, job=self._job, workers=workers)
        text = np.frombuffer(json.dumps(metadata).encode(), np.uint8)
        path, partial = self._path(step), self._directory / "partial.npz"
        try:
            files.remove(partial)  # of a process that was killed
            np.savez(partial, metadata=text, **arrays)
            partial.replace(path)
            saved = files.saved_steps(self._directory, _SUFFIX)
            before = max((at for at in saved if at < step), default=step)
            for other in saved - {before, step}:
                files.remove(self._path(other))
        except OSError as error:
            files.remove(partial)
            where = f"into {self._directory}"
            error.add_note(f"snapshot {step} of {size} bytes was not written {where}")
            raise
        return size

    def restore(self, like: chex.ArrayTree) -> Recovered | None:
        """Goes on from the latest snapshot of all processes; None if there is none.

        All processes of a job must call it, before the first save.

        1. Each process reads which sound snapshots it has.
        2. All agree on a step, and on who has it.
        3. A process puts its replicas where they belong. If it has more workers now,
           the new ones get copies of its own, in turn.
        4. Where typed random keys differ between workers, the new ones get new ones.
        5. Workers of a process that has nothing get copies over the mesh, in turn.

        Args:
          like: a state as :func:`replicate` returned it, for the workers of this job.
            Its structure, shapes, dtypes and shardings count; of its values only the
            typed random keys: of those that differ those of newcomers are made.

        Raises:
          ValueError: for a snapshot of another model or optimizer, and for a worker
            whose devices belong to several processes.
          OSError: for a ``directory`` that another process uses, or that cannot be
            read or written to. Either is raised on all processes.
        """
        owners = meshes.processes_of_workers(like)
        agreed = _agreed(self._begin_job(like))  # steps 1 and 2
        if agreed is None:
            return None
        step, saved, extras = agreed
        me = jax.process_index()
        mine = _read(self._path(step))[1] if saved[me] else {}
        leaves = stored.leaves_by_name(like)
        keys = [name for name, x in leaves.items() if meshes.is_key(x)]
        differing = {name for name in keys if agreement.differing(name, leaves[name])}
        arrays: dict[str, Any] = {}
        for name, x in leaves.items():
            one = raw(jnp.asarray(x))
            rows = mine.get(name, np.zeros((1, one.nbytes // len(one)), np.uint8))
            rows = rows[np.arange(owners.count(me)) % len(rows)]  # step 3
            rows = rows.view(one.dtype).reshape(len(rows), *one.shape[1:])
            if name in differing:  # step 4
                drawn = meshes.on_raw(meshes.own_replicas, x)
                fresh = keys_of_workers(drawn, jnp.array([self._job % 2**31]))[0]
                rows[saved[me] :] = jax.random.key_data(fresh)[saved[me] :]
            arrays[name] = jax.make_array_from_process_local_data(
                one.sharding, rows, one.shape
            )
        if 0 in saved:  # step 5
            names = [name for name in arrays if name not in differing]
            full = [r for r, owner in enumerate(owners) if saved[owner]]
            empty = [r for r, owner in enumerate(owners) if not saved[owner]]
            copied = copied_replicas([arrays[name] for name in names], full, empty)
            arrays |= zip(names, copied, strict=True)
        new = [r for r, i in enumerate(owners) if owners[:r].count(i) >= saved[i]]
        extra = extras[me] or next(filter(None, extras), {})
        return Recovered(step, stored.tree_of(arrays, like), extra, new)

    def _path(self, step: int) -> pathlib.Path:
        return self._directory / f"{step}{_SUFFIX}"

    def _begin_job(self, like: chex.ArrayTree) -> list[Any]:
        """Begins a job on the directory, which is locked from now on.

        A job has the time at which it began for a name, and an empty file in the
        directory of each of its processes.

        Returns of each process its last job, and of each of its sound snapshots the
        job, the step, the number of workers and extra.
        """
        mine = []
        with together():
            self._directory.mkdir(parents=True, exist_ok=True)
            self._unlock = self._unlock or files.lock(self._directory, self)
            jobs = files.saved_steps(self._directory, _JOB)
            for step in files.saved_steps(self._directory, _SUFFIX):
                path = self._path(step)
                try:
                    metadata = _read(path)[0]
                except files.DamagedCheckpointError as error:
                    warnings.warn(f"{error} and is ignored", stacklevel=3)
                    continue
                stored.check_fits(f"snapshot {path}", metadata, like)
                mine.append([metadata[k] for k in ("job", "step", "workers", "extra")])
        told = gather([max(jobs, default=0), mine, time.time_ns()])
        # Later than all before it, whatever the clock of process 0 says.
        self._job = max(told[0][-1], 1 + max(job for job, *_ in told))
        with together():
            (self._directory / f"{self._job}{_JOB}").touch()
            for job in jobs:
                files.remove(self._directory / f"{job}{_JOB}")
        return told


def _agreed(told: list[Any]) -> tuple[int, list[int], list[dict[str, Any]]] | None:
    """The step to go on from; of each process how many workers it saved, and extra.

    It is the latest step that all have who were in the last job. A process that was
    lost before has other ones: older, or of another job, which took other steps.
    """
    held = [{(job, at): rest for job, at, *rest in rows} for _, rows, _ in told]
    pairs = zip(told, held, strict=True)
    jobs = [(job, set(rows)) for (job, *_), rows in pairs if rows]
    if not jobs:
        return None
    last = max(job for job, _ in jobs)
    of_last = [keys for job, keys in jobs if job == last]
    key = max(set.intersection(*of_last) or set.union(*of_last))
    rows = [rows.get(key, [0, {}]) for rows in held]
    return key[-1], [workers for workers, _ in rows], [extra for _, extra in rows]


def _read(path: pathlib.Path) -> tuple[stored.Metadata, dict[str, np.ndarray]]:
    """The metadata of a snapshot, and the bytes of each leaf, checked by zip's sums."""
    with files.reading(f"snapshot {path}"), path.open("rb") as opened:
        file = np.load(opened)
        metadata = json.loads(file["metadata"].tobytes())
        stored.check_unchanged(metadata, int(path.stem))
        # Of all leaves: damage of the file's table of contents may hide one.
        return metadata, {name: file[name] for name in metadata["leaves"]}
