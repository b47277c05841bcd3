"""Snapshots of each process's own workers, with which the others go on without it."""

import json
import math
import os
import pathlib
import secrets
import warnings
import weakref
import zlib
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from slamb_jax._core.checks import check_integer
from slamb_jax.checkpoint import format as stored
from slamb_jax.checkpoint.store import gathered, lock, together
from slamb_jax.workers import mesh as meshes
from slamb_jax.workers.agreement import differing_replicas
from slamb_jax.workers.keys import keys_of_workers
from slamb_jax.workers.mesh import raw
from slamb_jax.workers.replicas import copied_replicas

_KEPT = 2  # processes are at most one save apart, so that all have one in common


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
        self._job = [0, 0]  # the number of this job, from 1, and its random token
        self._unlock: Any = None  # until this process has the directory

    def save(
        self, step: int, state: chex.ArrayTree, extra: dict[str, Any] | None = None
    ) -> int:
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
        check_integer("step", step, 0)
        if not self._job[0]:
            raise ValueError(
                "restore(like) must come before save: the processes agree there on the "
                "snapshots that they have"
            )
        meshes.check_replicas("state", state)
        by_name, leaves = stored.leaves_by_name(state), {}
        parts: list[Any] = []
        for x in by_name.values():  # all are on their way while the first is written
            for shard in getattr(raw(x), "addressable_shards", ()):
                shard.data.copy_to_host_async()
        for name, x in by_name.items():
            mine = np.ascontiguousarray(meshes.own_replicas(raw(x)))
            mine = mine.reshape(workers := len(mine), -1).view(np.uint8)
            rows = 1 if (mine[1:] == mine[:1]).all() else workers
            parts.append(mine[:rows].reshape(-1))
            leaves[name] = {"rows": rows} | stored.shape_and_dtype(x)
        about: dict[str, Any] = {"job": self._job, "step": step, "workers": workers}
        about |= {"states": stored.states_by_name(state), "leaves": leaves}
        about |= {"extra": stored.check_extra(extra)} | _sums(parts)
        text = json.dumps(stored.with_checksum(about)).encode()
        try:
            _write(self._path(step), text, b"\n", *parts)
            older = [at for at in self._steps() if at < step]
            for at in {*self._steps()} - {*older[1 - _KEPT :], step}:
                self._path(at).unlink()
        except OSError as error:
            raise OSError(
                f"snapshot {step} of {about['bytes']} bytes could not be written into "
                f"{self._directory}: {error}"
            ) from error
        return int(about["bytes"])

    def restore(self, like: chex.ArrayTree) -> Recovered | None:
        """Goes on from the latest snapshot of all processes; None if there is none.

        All processes of a job must call it, before the first save.

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
        held, told = self._begin(like)
        agreed = _agreed(told)
        if agreed is None:
            return None
        step, saved, extras = agreed
        me = jax.process_index()
        mine = _arrays_in(*held[step]) if saved[me] else {}
        leaves = stored.leaves_by_name(like)
        keys = {name: x for name, x in leaves.items() if meshes.is_key(x)}
        own = {name for name, x in keys.items() if differing_replicas([x])[0]}
        arrays: dict[str, Any] = {}
        for name, x in leaves.items():
            one = raw(jnp.asarray(x))
            rows = mine.get(name, np.zeros((1, *one.shape[1:]), one.dtype))
            rows = rows[np.arange(owners.count(me)) % len(rows)]
            if name in own:
                held_keys = meshes.on_raw(meshes.own_replicas, x)
                fresh = keys_of_workers(held_keys, jnp.array(self._job[:1]))[0]
                rows[saved[me] :] = jax.random.key_data(fresh)[saved[me] :]
            here = one.sharding, rows, one.shape
            arrays[name] = jax.make_array_from_process_local_data(*here)
        if 0 in saved:  # processes that have nothing
            names = [name for name in arrays if name not in own]
            full = [r for r, owner in enumerate(owners) if saved[owner]]
            empty = [r for r, owner in enumerate(owners) if not saved[owner]]
            copied = copied_replicas([arrays[name] for name in names], full, empty)
            arrays |= zip(names, copied, strict=True)
        new = [r for r, i in enumerate(owners) if owners[:r].count(i) >= saved[i]]
        extra = extras[me] or next(filter(None, extras), {})
        return Recovered(step, stored.tree_of(arrays, like), extra, new)

    def _path(self, step: int) -> pathlib.Path:
        return self._directory / f"{step}.snapshot"

    def _steps(self) -> list[int]:
        return sorted(int(path.stem) for path in self._directory.glob("*.snapshot"))

    def _begin(self, like: chex.ArrayTree) -> tuple[dict[int, Any], list[Any]]:
        """Begins a job on the directory, which is locked from now on.

        Returns this process's sound snapshots; and of each process its last job, a
        token, and what tells its snapshots apart.
        """
        file = self._directory / "job"
        with together():
            self._directory.mkdir(parents=True, exist_ok=True)
            if self._unlock is None:
                self._unlock = weakref.finalize(self, os.close, lock(self._directory))
            held = self._sound(like)
            last = json.loads(file.read_text()) if file.exists() else [0, 0]
        names = "job", "step", "workers", "extra"
        mine = [[about[name] for name in names] for about, _ in held.values()]
        told = gathered([last, secrets.randbits(31), mine])
        self._job = [max(job for job, _, _ in told)[0] + 1, told[0][1]]
        with together():
            _write(file, json.dumps(self._job).encode())
        return held, told

    def _sound(self, like: chex.ArrayTree) -> dict[int, tuple[dict[str, Any], Any]]:
        """The metadata and bytes of the snapshots that are not damaged, by step."""
        sound = {}
        for step in self._steps():
            what = f"snapshot {self._path(step)}"
            try:
                sound[step] = _read(self._path(step))
            except (ValueError, KeyError, TypeError) as error:
                told = f"{what} is damaged ({error}) and is ignored"
                warnings.warn(told, stacklevel=4)
                continue
            stored.check_fits(what, sound[step][0], like)
        return sound


def _agreed(told: list[Any]) -> tuple[int, list[int], list[dict[str, Any]]] | None:
    """The step to go on from; of each process how many workers it saved, and extra.

    It is the latest step that all have who were in the last job. A process that was
    lost before has other ones: older, or of another job, which took other steps.
    """
    held = [{(*job, step): rest for job, step, *rest in rows} for *_, rows in told]
    pairs = zip(told, held, strict=True)
    jobs = [(job, set(rows)) for (job, *_), rows in pairs if rows]
    if not jobs:
        return None
    last = max(job for job, _ in jobs)
    of_last = [keys for job, keys in jobs if job == last]
    key = max(set.intersection(*of_last) or set.union(*of_last))
    rows = [rows.get(key, [0, {}]) for rows in held]
    return key[-1], [workers for workers, _ in rows], [extra for _, extra in rows]


def _write(path: pathlib.Path, *parts: Any) -> None:
    """Writes a file that no process sees before it is complete."""
    partial = path.with_name("partial")
    with partial.open("wb") as file:
        file.writelines(parts)
    partial.rename(path)


def _sums(parts: list[Any]) -> dict[str, int]:
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, crc)
    return {"bytes": sum(part.nbytes for part in parts), "crc32": crc}


def _read(path: pathlib.Path) -> tuple[dict[str, Any], np.ndarray]:
    """The metadata of a snapshot and its bytes; raises a ValueError if damaged."""
    with path.open("rb") as file:
        about = json.loads(file.readline())
        body = np.memmap(path, np.uint8, "r", file.tell())
    if about != stored.with_checksum(about | _sums([body])):
        raise ValueError("it is not what was saved")
    return about, body


def _arrays_in(about: dict[str, Any], body: np.ndarray) -> dict[str, np.ndarray]:
    """The replicas of each leaf, or the words of their keys."""
    arrays, start = {}, 0
    for name, leaf in about["leaves"].items():
        dtype, shape = stored.dtype_of(leaf), [leaf["rows"], *leaf["shape"]]
        part = body[start : start + math.prod(shape) * dtype.itemsize]
        start += part.size
        rows = part.view(dtype).reshape(shape)
        arrays[name] = np.broadcast_to(rows, (about["workers"], *leaf["shape"]))
    return arrays
