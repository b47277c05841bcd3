"""Checkpoints of all replicas, with checksums, written through Orbax.

No other module of the library uses Orbax.
"""

import contextlib
import pathlib
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Self

import chex
import jax
import numpy as np

from slamb_jax._core.checks import check_integer
from slamb_jax.checkpoint import format as stored
from slamb_jax.checkpoint import processes
from slamb_jax.checkpoint.processes import DamagedCheckpointError, together
from slamb_jax.checkpoint.resizing import resize_leaf
from slamb_jax.exchange.settings import Exchange, check_exchange
from slamb_jax.workers import mesh as meshes
from slamb_jax.workers.agreement import checksums

_METADATA = "about"  # the folder of the metadata in a checkpoint
_MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_NOT_OF_FILES = (OSError, MemoryError, jax.errors.JaxRuntimeError)  # but _MISSING is
_UNFINISHED = "[0-9]*.orbax-checkpoint-tmp*"  # the name of an incomplete save
_UNLIKE = "the checksum of {} is not the one that was saved"
_SHARED = "on a file system that all processes share"


class Restored(NamedTuple):
    """The checkpoint that :meth:`Checkpoints.restore` read."""

    step: int
    state: chex.ArrayTree  # with a leading replica axis, placed like ``like``
    extra: dict[str, Any]


class Checkpoints:
    """Saves and restores all replicas in a directory, for exact resume.

    A leaf whose replicas are equal to the bit (a count, a second moment, parameters
    under the default exchange) is stored once, any other leaf n times, with a 64-bit
    checksum of every stored replica. Where files are damaged, :meth:`restore` warns and
    reads the checkpoint before it. What a killed process left incomplete is no
    checkpoint: the next save removes it.

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
      exchange: the exchange of the state. What it says of which coordinates are
        exchanged when is saved too, and :meth:`restore` warns if it was another: the
        ages of coordinates, and with them rates, then begin wrong. None: not compared.

    Raises:
      ValueError: for ``keep`` out of range, or a ``directory`` that cannot be made; in
        :meth:`save` also for one that cannot be written to, or that processes do not
        share.
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
        check_integer("keep", keep, 2)
        self._selects: dict[str, str] = {}
        if exchange is not None:
            check_exchange(exchange)
            self._selects = {
                name: re.sub(" at 0x[0-9a-f]+", "", repr(getattr(exchange, name)))
                for name in ("selection", "sync_every")
            }
        with _refuse_unless("a path that is there or can be made", repr(directory)):
            self._directory = pathlib.Path(directory).absolute()
            self._directory.mkdir(parents=True, exist_ok=True)
        try:
            import orbax.checkpoint
        except ImportError as error:
            raise ImportError(
                "checkpoints need Orbax: pip install 'slamb-jax[checkpoint]'"
            ) from error
        self._orbax: Any = orbax.checkpoint
        options = self._orbax.CheckpointManagerOptions(
            max_to_keep=keep,
            enable_async_checkpointing=asynchronous,
            cleanup_tmp_directories=False,  # a reader would remove a save in progress
        )
        self._manager = self._orbax.CheckpointManager(self._directory, options=options)
        self._damaged: set[int] = set()  # to be removed before the next save
        self._writing = False
        self._unlock: Callable[[], object] | None = None  # of process 0, once it writes

    def save(
        self, step: int, state: chex.ArrayTree, extra: dict[str, Any] | None = None
    ) -> int:
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
        check_integer("step", step, 0)
        n = meshes.check_replicas("state", state)
        if not n:
            raise ValueError(f"state must have leaves, got {state!r}")
        arrays, leaves = _pack(stored.leaves_by_name(state))
        metadata = stored.describe(
            state, extra, leaves=leaves, format=1, workers=n, selects=self._selects
        )
        if not self._writing:
            self._begin_writing()
        for damaged in sorted(self._damaged):  # their numbers may be written again
            self._manager.delete(damaged)
        self._damaged.clear()
        latest = self.latest()
        if latest is not None and step <= latest:
            raise ValueError(f"step must be larger than the last, {latest}, got {step}")
        args = self._orbax.args
        arrays = {name: x for name, x in arrays.items() if x.size}  # Orbax takes no 0
        items = {"state": args.StandardSave(arrays), _METADATA: args.JsonSave(metadata)}
        with self._explain_errors(f"checkpoint {step}"):
            self._manager.save(step, args=args.Composite(**items), force=True)
        return sum(x.nbytes for x in arrays.values())

    def wait(self) -> None:
        """Waits until every save is written."""
        with self._explain_errors("a checkpoint"):
            self._manager.wait_until_finished()

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
          ValueError: for a checkpoint of another model, optimizer, number of workers
            (without ``workers``), program or later format; if ``step`` is not there or
            damaged; if all of several checkpoints are damaged, which no interrupted
            save does; or if processes see different checkpoints.
          OSError: where reading fails for another reason than the files: memory,
            rights. Nothing is deleted then, nor with a ValueError.
        """
        n = meshes.check_replicas("like", like)
        if workers not in (None, n):
            raise ValueError(f"workers must be those of like, {n}, got {workers!r}")
        steps = self._steps()
        if step is not None:
            if step not in steps:
                raise ValueError(f"step must be one of {sorted(steps)}, got {step!r}")
            return self._restore(step, like, workers)
        damaged: dict[int, str] = {}
        for latest in steps:
            try:
                restored = self._restore(latest, like, workers)
                break
            except DamagedCheckpointError as error:
                damaged[latest] = str(error)
                going_back = f"{error} and is ignored: going back to the one before it"
                warnings.warn(going_back, stacklevel=2)
        else:
            restored = None
            if len(damaged) > 1:
                raise ValueError(
                    f"no checkpoint can be read: {'; '.join(damaged.values())}. All "
                    "are kept; to start anew, move them away"
                )
        self._damaged |= damaged.keys()
        return restored

    def load(self, step: int) -> tuple[stored.Metadata, dict[str, np.ndarray]]:
        """Reads a checkpoint to the host, without a state to fit.

        Returns:
          Its metadata (``workers``, ``leaves``, ``extra``), and all replicas by name.

        Raises:
          ValueError: as :meth:`restore` of a ``step``; remove a damaged one, and the
            one before it is the latest.
        """
        metadata = self._read_metadata(step)
        return metadata, self._read_arrays(step, metadata, {})

    def latest(self) -> int | None:
        """The step of the latest checkpoint, sound or damaged; None without any."""
        return self._manager.latest_step()

    def close(self) -> None:
        """Waits until every save is written, and releases the directory."""
        try:
            self.wait()
        finally:
            self._manager.close()
            if self._unlock is not None:
                self._unlock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _begin_writing(self) -> None:
        """Takes the directory for this run; raises on all processes if one cannot.

        1. Process 0 writes a file, locks the directory against other runs, and removes
           what runs that were killed left incomplete.
        2. Every process sees the file. Orbax would wait for ever where they do not
           share the directory.
        3. Other runs may have written in between: the directory is read once more.
        """
        with contextlib.ExitStack() as until_seen:
            probe = ""
            with together():
                if jax.process_index() == 0:  # step 1
                    with _refuse_unless("one that can be written to", self._directory):
                        file = until_seen.enter_context(
                            tempfile.NamedTemporaryFile(dir=self._directory)
                        )
                    probe = pathlib.Path(file.name).name
                    self._unlock = self._unlock or processes.lock(self._directory, self)
                    for path in [*self._directory.glob(_UNFINISHED)]:
                        shutil.rmtree(path)
            # A new name, as a network file system remembers which files were not there.
            probe = processes.gather(probe)[0]
            with together(), _refuse_unless(_SHARED, self._directory):  # step 2
                if not (self._directory / probe).exists():
                    raise _error_here("does not see a file that process 0 wrote")
        self._writing = True
        self._manager.reload()  # step 3

    @contextlib.contextmanager
    def _explain_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of Orbax, TensorStore or the file system
            raise OSError(
                f"{what} could not be written into {self._directory}: {error}; "
                f"the latest complete one is {self.latest()}"
            ) from error

    def _steps(self) -> list[int]:
        """The steps of all checkpoints, the latest first, alike for all processes."""
        steps = sorted(self._manager.all_steps(), reverse=True)
        with together(), _refuse_unless(_SHARED, self._directory):
            if steps != processes.gather(steps)[0]:
                raise _error_here(f"sees the checkpoints {steps}")
        return steps

    def _restore(
        self, step: int, like: chex.ArrayTree, workers: int | None
    ) -> Restored:
        """Reads one checkpoint.

        1. The metadata are read and verified.
        2. The number of workers, the states and the leaves must be those of ``like``.
        3. The arrays are read and verified: each process reads what it holds of
           ``like``, or, if the number of workers is another, all replicas.
        4. Then they are resized, and put where those of ``like`` are.
        """
        metadata = self._read_metadata(step)  # step 1
        n, saved = meshes.check_replicas("like", like), metadata["workers"]
        if n != (workers or saved):  # step 2
            raise ValueError(
                f"{self._name(step)} is of {saved} workers, expected {n}, to which "
                f"restore(like, workers={n}) resizes it"
            )
        stored.check_fits(self._name(step), metadata, like)
        leaves = stored.leaves_by_name(jax.tree.map(jax.numpy.asarray, like))
        places = {name: meshes.raw(x).sharding for name, x in leaves.items()}
        on_devices = places if n == saved else {}
        arrays = self._read_arrays(step, metadata, on_devices)  # step 3
        if n != saved:  # step 4
            for name, x in arrays.items():
                x = resize_leaf(name, x, n, keys=meshes.is_key(leaves[name]))
                arrays[name] = meshes.device_put_global(x, places[name])
        changes = [
            f"{name}={now} where it was {metadata['selects'][name]}"
            for name, now in self._selects.items()
            if metadata["selects"].get(name, now) != now
        ]
        if changes:
            warnings.warn(
                f"checkpoint {step} is of another exchange: {', '.join(changes)}. The "
                "ages of coordinates are wrong until each has had its turn",
                stacklevel=3,
            )
        return Restored(step, stored.tree_of(arrays, like), metadata["extra"])

    def _read_metadata(self, step: int) -> stored.Metadata:
        """The verified metadata of a checkpoint.

        Raises:
          DamagedCheckpointError: if files are missing, or differ from those saved.
          ValueError: for a checkpoint of another program or version of the format.
        """
        metadata: stored.Metadata = {}
        if (self._directory / str(step) / _METADATA).is_dir():
            metadata = self._read(step, _METADATA, self._orbax.args.JsonRestore())
        if metadata.get("format") != 1 or "leaves" not in metadata:
            problem = "is not one of slamb_jax.Checkpoints"
            if "format" in metadata:
                problem = f"has format {metadata['format']}"
            raise ValueError(
                f"{self._name(step)} could not be read: it {problem}, of which "
                "this version of slamb_jax reads 1; it is kept"
            )
        if metadata != stored.with_checksum(metadata):
            raise self._damage(step, _UNLIKE.format("its metadata"))
        return metadata

    def _read_arrays(
        self, step: int, metadata: stored.Metadata, places: dict[str, Any]
    ) -> dict[str, Any]:
        """All verified replicas, on the devices of ``places``, or on the host."""
        workers, leaves = metadata["workers"], metadata["leaves"]
        arrays: dict[str, Any] = {}
        for name, leaf in leaves.items():
            shape = leaf["shape"] if leaf["once"] else [workers, *leaf["shape"]]
            dtype, place = stored.dtype_of(leaf), places.get(name)
            # Templates, which take no memory.
            arrays[name] = np.broadcast_to(np.zeros((), dtype), shape)
            if place and not leaf["once"]:
                arrays[name] = jax.ShapeDtypeStruct(shape, dtype, sharding=place)
        sized = {name: x for name, x in arrays.items() if x.size}
        arrays |= self._read(step, "state", self._orbax.args.StandardRestore(sized))
        for name, leaf in leaves.items():
            if leaf["once"]:
                x = np.broadcast_to(arrays[name], (workers, *leaf["shape"]))
                x = meshes.device_put_global(x, places[name]) if places else x
                arrays[name] = x
        sums = checksums([arrays[name] for name in leaves])
        for (name, leaf), of_leaf in zip(leaves.items(), sums, strict=True):
            if (of_leaf != np.array(leaf["checksums"], np.uint32)).any():
                raise self._damage(step, _UNLIKE.format(name))
        return arrays

    def _read(self, step: int, item: str, how: Any) -> dict[str, Any]:
        """An item of a checkpoint; raises on all processes if it fails on one.

        Raises:
          DamagedCheckpointError: where the files are to blame.
          OSError: where reading failed for another reason: memory, rights.
        """
        args = self._orbax.args.Composite(**{item: how})
        with together():
            try:
                return dict(self._manager.restore(step, args=args)[item])
            except (
                Exception
            ) as error:  # a damaged file may make a reader raise anything
                problem = f"{type(error).__name__}: {error}".splitlines()[0][:200]
                if isinstance(error, _MISSING) or not isinstance(error, _NOT_OF_FILES):
                    raise self._damage(step, problem) from error
                raise OSError(
                    f"{self._name(step)} could not be read ({problem}); it is kept"
                ) from error

    def _damage(self, step: int, problem: str) -> DamagedCheckpointError:
        return DamagedCheckpointError(f"{self._name(step)} is damaged ({problem})")

    def _name(self, step: int) -> str:
        return f"checkpoint {self._directory / str(step)}"


@contextlib.contextmanager
def _refuse_unless(requirement: str, directory: object) -> Iterator[None]:
    """A ValueError for what the system says of a directory."""
    try:
        yield
    except (OSError, TypeError) as error:
        raise ValueError(
            f"directory must be {requirement}, got {directory}: {error}"
        ) from error


def _error_here(what: str) -> OSError:
    """The error of this process."""
    return OSError(f"process {jax.process_index()} {what}")


def _pack(leaves: dict[str, Any]) -> tuple[dict[str, Any], stored.Metadata]:
    """The arrays to store for the replicas of each leaf, and their metadata."""
    arrays: dict[str, Any] = {}
    packed: stored.Metadata = {}
    all_sums = checksums(list(leaves.values()))
    for (name, x), sums in zip(leaves.items(), all_sums, strict=True):
        arrays[name], once = meshes.raw(x), bool((sums == sums[:1]).all())
        if once:
            arrays[name] = np.asarray(meshes.replicated(_first, arrays[name]))
        packed[name] = {"once": once, "checksums": sums[: 1 if once else None].tolist()}
        packed[name] |= stored.shape_and_dtype(x)
    return arrays, packed


def _first(x: jax.Array) -> jax.Array:
    return x[0]
