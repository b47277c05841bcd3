"""Checkpoints of all replicas, with checksums, written through Orbax.

No other module of the library uses Orbax.
"""

import contextlib
import json
import pathlib
import re
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Self

import chex
import jax
import numpy as np

from slamb_jax._core.checks import check_integer
from slamb_jax.checkpoint import files
from slamb_jax.checkpoint import format as stored
from slamb_jax.checkpoint.files import reading, together
from slamb_jax.checkpoint.format import Extra
from slamb_jax.checkpoint.resizing import resize_leaf
from slamb_jax.exchange.settings import Exchange, check_exchange
from slamb_jax.workers import mesh as meshes
from slamb_jax.workers.agreement import checksums

_SHARED = "on a file system that all processes share"
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
    :meth:`restore` warns and reads the checkpoint before it. What a killed process or a
    failed save left incomplete is no checkpoint: it is removed, at the latest by the
    next save. One that only reads may stay open, and sees what is saved meanwhile.

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
            names = ["selection"] + ["sync_every"] * (exchange.selection is not None)
            self._selects = {
                name: re.sub(" at 0x[0-9a-f]+", "", repr(getattr(exchange, name)))
                for name in names
            }
        with _refuse_unless("a path that is there or can be made", directory):
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
        self._damaged: set[int] = set()  # to be removed before the next save
        self._foreign: set[int] = set()  # not to be counted
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
        rest = {"format": 1, "workers": n, "selects": self._selects}
        metadata = stored.describe(step, state, extra, **rest)
        arrays = _pack(stored.leaves_by_name(state), metadata["leaves"])
        metadata = stored.with_checksum(metadata)
        self.wait()
        if not self._writing:
            self._begin_writing()
        with together():
            self._clean()
        last = max(self._steps() - self._foreign, default=-1)
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
        with self._clean_if_it_fails("a checkpoint"):
            saving, self._saving = self._saving, None
            if saving is not None:
                saving.close()
            saved = files.saved_steps(self._directory) - self._foreign
            self._remove(sorted(saved)[: -self._keep])

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
            (without ``workers``); if ``step`` is not there or damaged; if all of
            several checkpoints are damaged, which no interrupted save does, or none is
            of this program and format; or if processes see different checkpoints.
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

        def read(latest: int) -> Restored | None:
            try:
                return self._restore(latest, like, workers)
            except files.DamagedCheckpointError:
                if latest in self._steps():
                    raise
                # A run that saves here has removed it, and has newer ones.
                return self.restore(like, workers=workers)

        damaged: dict[int, str] = {}
        found = next(files.sound_ones(steps, read, damaged), None)
        if found is None and len(steps) > 1:
            raise ValueError(
                f"no checkpoint can be read: {'; '.join(damaged.values())}. All are "
                "kept; to start anew, move them away"
            )
        self._damaged |= damaged.keys()
        later = {at for at in steps if found and at > found.step}
        self._foreign |= later - self._damaged
        return found

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

        1. Process 0 locks the directory against other runs, and each writes a file.
        2. Every process sees that of process 0. Orbax would wait for ever where they do
           not share the directory.
        """
        with together():  # step 1
            if jax.process_index() == 0:
                self._unlock = self._unlock or files.lock(self._directory, self)
            with _refuse_unless("one that can be written to", self._directory):
                # A new name, as a network file system remembers what was not there.
                probe = tempfile.NamedTemporaryFile(dir=self._directory)  # noqa: SIM115
        with probe, together(), _refuse_unless(_SHARED, self._directory):  # step 2
            first = meshes.gather(pathlib.Path(probe.name).name)[0]
            if not (self._directory / first).exists():
                raise _error_here("does not see a file that process 0 wrote")
        self._writing = True

    def _steps(self) -> set[int]:
        """The steps that all processes see; one may see a save before another does."""
        mine = files.saved_steps(self._directory)
        seen = meshes.gather(sorted(mine))
        steps = mine.intersection(*seen)
        with together(), _refuse_unless(_SHARED, self._directory):
            if not steps and mine != {*seen[0]}:
                raise _error_here(f"sees the checkpoints {sorted(mine)}")
        return steps

    def _remove(self, steps: Iterable[int]) -> None:
        """Removes checkpoints, on process 0 of a run that saves.

        Each is renamed first, so that nobody reads a part of it.
        """
        for step in steps if self._unlock else ():
            removed = self._directory / f"{step}{_INCOMPLETE}-removed"
            with contextlib.suppress(FileNotFoundError):  # it was moved away
                files.remove(self._path(step).rename(removed))

    def _clean(self) -> None:
        """Removes what is damaged, whose steps may be saved again, or incomplete."""
        self._remove(self._damaged)
        self._damaged = set()
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
        arrays = self._read_arrays(step, metadata, places if n == saved else {})  # 3
        if n != saved:  # step 4
            for name, x in arrays.items():
                x = resize_leaf(name, x, n, keys=meshes.is_key(leaves[name]))
                arrays[name] = meshes.device_put_global(x, places[name])
        for name, now in self._selects.items():
            if (was := metadata["selects"].get(name, now)) != now:
                warnings.warn(
                    f"checkpoint {step} is of another exchange: {name}={now} where it "
                    f"was {was}. The ages of coordinates are wrong until each has had "
                    "its turn",
                    stacklevel=3,
                )
        return Restored(step, stored.tree_of(arrays, like), metadata["extra"])

    def _read_metadata(self, step: int) -> stored.Metadata:
        """The verified metadata of a checkpoint, on all processes."""
        path = self._path(step) / _METADATA / "metadata"
        with together(), reading(self._name(step)):
            text = path.read_text() if path.parent.is_dir() else "{}"
            metadata: stored.Metadata = dict(json.loads(text))
            if (found := metadata.get("format")) != 1:
                raise files.ForeignCheckpointError(
                    "it is not one of slamb_jax.Checkpoints, or of a later version: it "
                    f"has format {found}, and this version of slamb_jax reads 1"
                )
            stored.check_unchanged(metadata, step)
            return metadata

    def _read_arrays(
        self, step: int, metadata: stored.Metadata, places: dict[str, Any]
    ) -> dict[str, Any]:
        """All verified replicas, on the devices of ``places``, or on the host."""
        workers, leaves = metadata["workers"], metadata["leaves"]
        arrays: dict[str, Any] = {}
        for name, leaf in leaves.items():
            shape = leaf["shape"] if leaf["once"] else [workers, *leaf["shape"]]
            zero = stored.widened(np.zeros((), stored.dtype_of(leaf)))
            arrays[name] = np.broadcast_to(zero, shape)  # a template without memory
            if places and not leaf["once"]:
                place = places[name]
                arrays[name] = jax.ShapeDtypeStruct(shape, zero.dtype, sharding=place)
        sized = {name: x for name, x in arrays.items() if x.size}
        handler, path = self._orbax.StandardCheckpointHandler(), self._path(step)
        with together(), reading(self._name(step)):
            args = self._orbax.args.StandardRestore(sized)
            arrays |= handler.restore(path / "state", args=args)
        for name in [name for name, leaf in leaves.items() if leaf["once"]]:
            x = np.broadcast_to(arrays[name], (workers, *arrays[name].shape))
            arrays[name] = meshes.device_put_global(x, places[name]) if places else x
        sums = checksums([arrays[name] for name in leaves])
        with together(), reading(self._name(step)):
            for (name, leaf), of_leaf in zip(leaves.items(), sums, strict=True):
                if (of_leaf != np.array(leaf["checksums"], np.uint32)).any():
                    raise stored.changed(name)
        return {
            name: arrays[name].astype(stored.dtype_of(leaf), copy=False)
            for name, leaf in leaves.items()
        }

    def _path(self, step: int) -> pathlib.Path:
        return self._directory / str(step)

    def _name(self, step: int) -> str:
        return f"checkpoint {self._path(step)}"


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


def _pack(leaves: dict[str, Any], metadata: stored.Metadata) -> dict[str, Any]:
    """The arrays to store for the replicas of each leaf; adds to their metadata."""
    arrays = {name: stored.widened(meshes.raw(x)) for name, x in leaves.items()}
    all_sums = checksums(list(arrays.values()))
    for name, sums in zip(leaves, all_sums, strict=True):
        if once := bool((sums == sums[:1]).all()):
            arrays[name] = np.asarray(meshes.replicated(_first, arrays[name]))
        kept = sums[: 1 if once else None].tolist()
        metadata[name] |= {"once": once, "checksums": kept}
    return arrays


def _first(x: jax.Array) -> jax.Array:
    return x[0]
