"""Checkpoints of all replicas, with checksums, written through Orbax.

No other module of the library uses Orbax.
"""

import contextlib
import json
import pathlib
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Self

import chex
import jax
import jax.numpy as jnp
import numpy as np

from slamb_jax._core.checks import check_integer
from slamb_jax.checkpoint import files
from slamb_jax.checkpoint import format as stored
from slamb_jax.checkpoint.files import reading, together
from slamb_jax.checkpoint.format import Extra
from slamb_jax.checkpoint.resizing import resize_leaf
from slamb_jax.workers import mesh as meshes
from slamb_jax.workers.agreement import checksums

_METADATA = "about"  # the folder of the metadata in a checkpoint
_INCOMPLETE = ".orbax-checkpoint-tmp"  # what Orbax adds to the name of such a folder


class Restored(NamedTuple):
    """The checkpoint that :meth:`Checkpoints.restore` read."""

    step: int
    state: chex.ArrayTree  # with a leading replica axis, placed like ``like``
    extra: dict[str, Any]


class Checkpoints:
    """Saves and restores all replicas in a directory, for exact resume.

    A leaf whose replicas are equal to the bit (a count, a second moment, parameters
    under the default exchange) is stored once, any other leaf n times, with a 64-bit
    checksum of every stored replica. Where files are damaged, or of something else,
    :meth:`restore` warns and reads the checkpoint before it, and the next save moves
    them aside. What a killed process or a failed save left incomplete is no checkpoint:
    it is removed, at the latest by the next save. One that only reads may stay open,
    and sees what is saved meanwhile.

    All processes must call each method, and see the same directory; each writes the
    arrays that it holds, through Orbax. Needs ``slamb-jax[checkpoint]``.

    Args:
      directory: where to write, on a file system that all processes share; made if it
        is missing. The first :meth:`save` begins to change it: until then read access
        is enough, and then, where the file system has locks, no other run may save
        into it.
      keep: how many checkpoints to keep, the latest ones; at least 2.
      asynchronous: whether :meth:`save` copies the state to the host and returns, and
        threads write the copy; the next save, :meth:`wait` and :meth:`close` wait for
        them and raise their errors.

    Raises:
      ValueError: for ``keep`` out of range.
      OSError: where the directory cannot be made, or not be written to, where processes
        do not share it, while another run saves into it, and where writing fails, on a
        full disk say: earlier checkpoints remain.
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
        check_integer("keep", keep, 2)
        self._directory = pathlib.Path(directory).absolute()
        self._directory.mkdir(parents=True, exist_ok=True)
        try:
            import orbax.checkpoint
        except ImportError as error:
            raise ImportError(
                "checkpoints need Orbax: pip install 'slamb-jax[checkpoint]'"
            ) from error
        self._orbax: Any = orbax.checkpoint
        self._saving: Any = None  # Orbax's, from a save until it is waited for
        self._keep, self._asynchronous = keep, asynchronous
        self._unread: set[int] = set()  # steps later than the one that was restored
        self._writing = False
        self._unlock: Callable[[], object] | None = None  # of process 0, once it writes

    def save(self, step: int, state: chex.ArrayTree, extra: Extra = None) -> int:
        """Writes a checkpoint.

        Args:
          step: its number, larger than those before it.
          state: parameters, optimizer state, random keys: with a leading replica axis.
          extra: a dict that JSON can hold, with the position in the data for example.

        Returns:
          The bytes of its arrays, before Orbax compresses them.

        Raises:
          ValueError: for ``step`` or ``extra`` out of range, or a ``state`` without a
            common replica axis.
        """
        n = meshes.check_replicas("state", state)
        if not n:
            raise ValueError(f"state must have leaves, got {state!r}")
        arrays, sums = _pack(stored.leaves_by_name(state))
        metadata = stored.describe(step, state, extra, workers=n, checksums=sums)
        self.wait()
        if not self._writing:
            self._begin_writing()
        with together():
            self._clean()
        last = max(self._steps(), default=-1)
        if step <= last:
            raise ValueError(f"step must be larger than the last, {last}, got {step}")
        args = self._orbax.args
        sized = {name: x for name, x in arrays.items() if x.size}  # Orbax takes no 0
        items = {"state": args.StandardSave(sized), _METADATA: args.JsonSave(metadata)}
        with self._clean_if_it_fails(f"checkpoint {step}"):
            handler = self._orbax.CompositeCheckpointHandler()
            # A new one each time, as it keeps errors of the save before.
            saving = self._orbax.AsyncCheckpointer(handler)
            saving.save(self._path(step), args=args.Composite(**items))
        self._saving = saving
        if not self._asynchronous:
            self.wait()
        return sum(x.nbytes for x in arrays.values())

    def wait(self) -> None:
        """Waits until every save is written."""
        saving, self._saving = self._saving, None
        if saving is None:
            return
        with self._clean_if_it_fails("a checkpoint"):
            saving.close()
            saved = sorted(files.saved_steps(self._directory))
            self._rename(saved[: -self._keep], f"{_INCOMPLETE}-removed")
            self._clean()

    def restore(
        self, like: chex.ArrayTree, step: int | None = None, *,
        workers: int | None = None,
    ) -> Restored | None:  # fmt: skip
        """Reads the latest sound checkpoint, placed like ``like``; None without any.

        Args:
          like: a state as :func:`replicate` returned it. Its structure, shapes, dtypes
            and shardings count, not its values.
          step: read the checkpoint of this step instead. To go on from there save into
            another directory, or move the later checkpoints away.
          workers: the number of workers of ``like``, which allows a checkpoint of
            another number: it is resized by the rule of :func:`checkpoint.resize`.
            Every process then reads all replicas.

        Raises:
          ValueError: for a checkpoint of another model, optimizer or number of workers
            (without ``workers``); if ``step`` is not there or damaged; or if there are
            checkpoints, and none of them can be read.
          OSError: where reading fails for another reason than the files: memory,
            rights. Nothing is changed then, nor with a ValueError.
        """
        n = meshes.check_replicas("like", like)
        if workers not in (None, n):
            raise ValueError(f"workers must be those of like, {n}, got {workers!r}")
        steps = self._steps()
        if step is not None:
            if step not in steps:
                raise ValueError(f"step must be one of {sorted(steps)}, got {step!r}")
            return self._restore(step, like, workers)
        for latest in sorted(steps, reverse=True):
            try:
                found = self._restore(latest, like, workers)
            except files.DamagedCheckpointError as error:
                if latest not in self._steps():
                    # A run that saves here has removed it, and has newer ones.
                    return self.restore(like, workers=workers)
                if latest == min(steps):
                    raise ValueError(
                        f"{error}, and no other checkpoint can be read. All are kept; "
                        "to start anew, move them away"
                    ) from error
                going_back = f"{error} and is ignored: going back to the one before it"
                warnings.warn(going_back, stacklevel=2)
            else:
                self._unread = {at for at in steps if at > latest}
                return found
        return None

    def latest(self) -> int | None:
        """The step of the latest checkpoint, sound or damaged; None without any."""
        return max(files.saved_steps(self._directory), default=None)

    def close(self) -> None:
        """Waits until every save is written, and releases the directory."""
        try:
            self.wait()
        finally:
            if self._unlock is not None:
                self._unlock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _begin_writing(self) -> None:
        """Takes the directory for this run; raises on all processes if one cannot.

        1. Process 0 locks the directory against other runs, and writes a file.
        2. Every process sees it. Orbax would wait for ever where they do not share the
           directory.
        """
        # A new name: network file systems remember what was not there.
        probe = self._directory / f"0{_INCOMPLETE}-{meshes.gather(time.time_ns())[0]}"
        try:
            with together():  # step 1
                if jax.process_index() == 0:
                    self._unlock = self._unlock or files.lock(self._directory, self)
                    probe.touch()
            with together():  # step 2
                if not probe.exists():
                    raise OSError(
                        "directory must be on a file system that all processes share, "
                        f"got {self._directory}: process {jax.process_index()} does "
                        "not see a file that process 0 wrote"
                    )
        finally:
            files.remove(probe)
        self._writing = True

    def _steps(self) -> set[int]:
        """The steps that process 0 sees: another may see a save before it does."""
        return set(meshes.gather(sorted(files.saved_steps(self._directory)))[0])

    def _rename(self, steps: Iterable[int], suffix: str) -> None:
        """Takes checkpoints away, on process 0, so that nobody reads a part of one."""
        for path in map(self._path, steps) if self._unlock else ():
            with contextlib.suppress(FileNotFoundError):  # it was moved away
                path.rename(f"{path}{suffix}")

    def _clean(self) -> None:
        """Moves aside what could not be read, and removes what is incomplete."""
        self._rename(self._unread, f".unread-{time.time_ns()}")
        self._unread = set()
        if self._unlock is not None:
            for path in self._directory.glob(f"[0-9]*{_INCOMPLETE}*"):
                files.remove(path)

    @contextlib.contextmanager
    def _clean_if_it_fails(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of Orbax, TensorStore or the file system
            with contextlib.suppress(OSError):
                self._clean()
            raise OSError(
                f"{what} could not be written into {self._directory}: {error}; "
                f"the latest complete one is {self.latest()}"
            ) from error

    def _restore(
        self, step: int, like: chex.ArrayTree, workers: int | None
    ) -> Restored:
        """Reads one checkpoint.

        1. The metadata are read and verified. The number of workers, the states and the
           leaves must be those of ``like``.
        2. The arrays are read: each process reads what it holds of ``like``, or, if the
           number of workers is another, and of equal replicas, all.
        3. All replicas are verified, where those of ``like`` are.
        4. Those of another number of workers are resized, and put there.
        """
        path = self._path(step)
        what = f"checkpoint {path}"
        with together(), reading(what):  # step 1
            metadata = json.loads((path / _METADATA / "metadata").read_text())
            stored.check_unchanged(metadata, step)
        n, saved = meshes.check_replicas("like", like), metadata["workers"]
        if n != saved and workers is None:
            raise ValueError(
                f"{what} is of {saved} workers, expected {n}: workers={n} resizes it"
            )
        stored.check_fits(what, metadata, like)
        leaves = stored.leaves_by_name(jax.tree.map(jnp.asarray, like))
        raws = {name: meshes.raw(x) for name, x in leaves.items()}
        sums = metadata["checksums"]
        templates = {name: _template(x, len(sums[name])) for name, x in raws.items()}
        sized = {name: x for name, x in templates.items() if x.size}
        args = self._orbax.args.StandardRestore(sized)
        with together(), reading(what):  # step 2
            handler = self._orbax.StandardCheckpointHandler()
            arrays = templates | handler.restore(path / "state", args=args)
        for name, x in arrays.items():  # step 3
            x = x if len(x) == saved else np.broadcast_to(x, (saved, *x.shape[1:]))
            there = raws[name].sharding
            arrays[name] = meshes.device_put_global(x, there) if n == saved else x
        found = checksums([arrays[name] for name in sums])
        with reading(what):
            for (name, wanted), of_leaf in zip(sums.items(), found, strict=True):
                if (of_leaf != np.array(wanted, np.uint32)).any():
                    raise stored.changed(name)
        if n != saved:  # step 4
            for name, x in arrays.items():
                x = resize_leaf(name, x, n, keys=meshes.is_key(leaves[name]))
                arrays[name] = meshes.device_put_global(x, raws[name].sharding)
        return Restored(step, stored.tree_of(arrays, like), metadata["extra"])

    def _path(self, step: int) -> pathlib.Path:
        return self._directory / str(step)


def _pack(leaves: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arrays to store for the replicas of each leaf, and their checksums."""
    arrays = {name: meshes.raw(x) for name, x in leaves.items()}
    kept = {}
    for name, sums in zip(leaves, checksums(list(arrays.values())), strict=True):
        if once := bool((sums == sums[:1]).all()):
            arrays[name] = np.asarray(meshes.replicated(_first, arrays[name]))
        kept[name] = sums[: 1 if once else None].tolist()
    return arrays, kept


def _first(x: jax.Array) -> jax.Array:
    return x[:1]


def _template(x: jax.Array, stored_replicas: int) -> Any:
    """What Orbax is to read for a leaf: replicas where they belong, or on the host."""
    shape = (stored_replicas, *x.shape[1:])
    if 1 < stored_replicas == len(x):
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=x.sharding)
    return np.broadcast_to(np.zeros((), x.dtype), shape)  # without memory
