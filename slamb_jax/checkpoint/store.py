"""A directory of numbered checkpoints: arrays by name, and JSON metadata.

No other module of the library uses Orbax.
"""

import pathlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from slamb_jax._checks import check_integer
from slamb_jax.checkpoint.writer import Writer

T = TypeVar("T")
_METADATA = "about"  # the name of its folder in a checkpoint


class ForeignCheckpointError(ValueError):
    """A checkpoint that slamb_jax.Checkpoints did not write."""


class Store:
    """The latest checkpoints of a directory; all processes must call each method."""

    def __init__(
        self, directory: str | pathlib.Path, *, keep: int, asynchronous: bool
    ) -> None:
        check_integer("keep", keep, 2)
        self.directory = _made(directory)
        try:
            import orbax.checkpoint
        except ImportError as error:
            raise ImportError(
                "checkpoints need Orbax: pip install 'slamb-jax[checkpoint]'"
            ) from error
        self._orbax: Any = orbax.checkpoint
        self._writer = Writer(self.directory)
        self.unfinished = self._writer.unfinished()
        options = self._orbax.CheckpointManagerOptions(
            max_to_keep=keep,
            enable_async_checkpointing=asynchronous,
            cleanup_tmp_directories=False,  # a reader would remove a save in progress
        )
        self._manager = self._orbax.CheckpointManager(
            self.directory, options=options, item_names=("state", _METADATA)
        )

    def path(self, step: int | str) -> pathlib.Path:
        """The directory of a checkpoint."""
        return self.directory / str(step)

    def steps(self) -> list[int]:
        """The steps of all checkpoints, the latest first."""
        return sorted(self._manager.all_steps(), reverse=True)

    def latest(self) -> int | None:
        """The latest step."""
        return self._manager.latest_step()

    def begin_writing(self) -> None:
        """Before anything is changed: raises if another run is saving here."""
        if self._writer.begin():
            self._manager.reload()  # another run may have written in between

    def delete(self, step: int) -> None:
        """Removes a checkpoint."""
        self._manager.delete(step)

    def write(
        self,
        step: int,
        arrays: Mapping[str, jax.Array | np.ndarray],
        metadata: Mapping[str, Any],
    ) -> None:
        """Writes a checkpoint, in the background if the store is asynchronous."""
        args = self._orbax.args
        arrays = {name: x for name, x in arrays.items() if x.size}  # Orbax takes no 0
        items = {"state": args.StandardSave(arrays), _METADATA: args.JsonSave(metadata)}
        try:
            self._manager.save(step, args=args.Composite(**items), force=True)
        except Exception as error:  # of Orbax, TensorStore or the file system
            raise self._write_error(f"checkpoint {step}", error) from error

    def wait(self) -> None:
        """Waits for what is being written."""
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._write_error("a checkpoint", error) from error

    def close(self) -> None:
        """Waits for what is being written, and releases the directory."""
        try:
            self.wait()
        finally:
            self._manager.close()
            self._writer.end()

    def metadata(self, step: int) -> Any:
        """The metadata of a checkpoint, as JSON holds them."""
        found: Any = {}
        if (self.path(step) / _METADATA).is_dir():
            found = self._restore(step, _METADATA, self._orbax.args.JsonRestore())
        if not isinstance(found, dict):
            raise ValueError(f"its metadata are {found!r}")
        if "leaves" not in found:
            raise ForeignCheckpointError("it is not one of slamb_jax.Checkpoints")
        return found

    def read(self, step: int, like: Mapping[str, Any]) -> dict[str, Any]:
        """The arrays of a checkpoint, placed like those of ``like``."""
        return self._restore(step, "state", self._orbax.args.StandardRestore(like))

    def _restore(self, step: int, item: str, how: Any) -> Any:
        args = self._orbax.args.Composite(**{item: how})
        return self._manager.restore(step, args=args)[item]

    def _write_error(self, what: str, error: Exception) -> OSError:
        return OSError(
            f"{what} could not be written into {self.directory}: {error}; "
            f"the latest complete one is {self.latest()}"
        )


def try_read(path: pathlib.Path, read: Callable[[], T]) -> tuple[T | None, str]:
    """What ``read`` returns; or None, and what is damaged, on any of the processes.

    Raises on all processes if one of them failed for another reason than the files.
    """
    found, problem, failure = None, "", None
    try:
        found = read()
    except Exception as error:  # a damaged file may make a reader raise anything
        problem = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        failure = None if _is_damage(error) else error
    if jax.process_count() > 1:
        state = 2 if failure else 1 if problem else 0
        states = multihost_utils.process_allgather(np.int32(state))
        worst = int(np.argmax(states))
        if states[worst] > state:
            problem = f"seen by process {worst}"
            failure = OSError(problem) if states[worst] == 2 else None
    if failure is not None:
        message = f"checkpoint {path} could not be read ({problem}); it is kept"
        foreign = isinstance(failure, ForeignCheckpointError)
        raise (ValueError if foreign else OSError)(message) from failure
    return (None if problem else found), problem


def _is_damage(error: Exception) -> bool:
    """Whether reading failed because of the files, not of memory or rights."""
    if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
        return True
    other = OSError | MemoryError | jax.errors.JaxRuntimeError | ForeignCheckpointError
    return not isinstance(error, other)


def _made(directory: str | pathlib.Path) -> pathlib.Path:
    if not isinstance(directory, str | pathlib.Path):
        raise ValueError(f"directory must be a path, got {directory!r}")
    path = pathlib.Path(directory).absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"directory must be one that is there or can be made, got {directory}: "
            f"{error}"
        ) from error
    return path
