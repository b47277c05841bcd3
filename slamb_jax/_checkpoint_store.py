"""A directory of numbered checkpoints, by Orbax: arrays by name, and JSON about them.

No other module of the library knows Orbax.
"""

import pathlib
import re
import warnings
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from slamb_jax._checks import check_integer


class Store:
    """The latest checkpoints in a directory; all processes call each method."""

    def __init__(
        self, directory: str | pathlib.Path, *, keep: int, asynchronous: bool
    ) -> None:
        check_integer("keep", keep, 2)
        self.directory = _directory(directory)
        self._orbax = _orbax()
        options = self._orbax.CheckpointManagerOptions(
            max_to_keep=keep,
            enable_async_checkpointing=asynchronous,
            cleanup_tmp_directories=True,
        )
        torn = _cut_short(self.directory)
        self._manager = self._orbax.CheckpointManager(
            self.directory, options=options, item_names=("state", "about")
        )
        for name in torn:
            tell(f"a save into {self.directory / name} was cut short and is ignored")

    def steps(self) -> list[int]:
        """Those there are, the latest first."""
        return sorted(self._manager.all_steps(), reverse=True)

    def latest(self) -> int | None:
        """The latest of the steps."""
        return self._manager.latest_step()

    def delete(self, step: int) -> None:
        """Removes a checkpoint."""
        self._manager.delete(step)

    def write(self, step: int, arrays: dict[str, Any], about: dict[str, Any]) -> None:
        """Writes a checkpoint; in the background, if that was asked for."""
        args = self._orbax.args
        items = args.Composite(
            state=args.StandardSave(arrays), about=args.JsonSave(about)
        )
        try:
            self._manager.save(step, args=items, force=True)
        except Exception as error:  # of Orbax, TensorStore or the file system
            raise self._failed(f"checkpoint {step}", error) from error

    def wait(self) -> None:
        """Until what is being written is whole."""
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._failed("a checkpoint", error) from error

    def close(self) -> None:
        """Lets go of the directory, when what is being written is whole."""
        try:
            self.wait()
        finally:
            self._manager.close()

    def about(self, step: int) -> Any:
        """What was told of a checkpoint."""
        if not (self.directory / str(step) / "about").is_dir():
            raise NotOursError("it is not one of slamb_jax.Checkpoints")
        args = self._orbax.args
        found = self._manager.restore(
            step, args=args.Composite(about=args.JsonRestore())
        )
        return found.about

    def read(self, step: int, like: dict[str, Any]) -> dict[str, Any]:
        """The arrays of a checkpoint, placed like those of ``like``."""
        args = self._orbax.args
        found = self._manager.restore(
            step, args=args.Composite(state=args.StandardRestore(like))
        )
        return found.state

    def _failed(self, what: str, error: Exception) -> OSError:
        return OSError(
            f"{what} could not be written into {self.directory}: {error}; "
            f"the latest whole one is {self.latest()}"
        )


class NotOursError(ValueError):
    """A checkpoint of something else."""


def attempt(where: pathlib.Path, read: Callable[[], Any]) -> tuple[Any, str]:
    """What ``read`` returns, and how what it reads is damaged, on any process.

    Raises, on all processes, where it is not the files that one of them failed for.
    """
    found, problem, failure = None, "", None
    try:
        found = read()
    except Exception as error:  # whatever a damaged file makes a reader raise
        problem = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        failure = error if _spares_the_files(error) else None
    if jax.process_count() > 1:
        state = 2 if failure else 1 if problem else 0
        states = multihost_utils.process_allgather(np.int32(state))
        worst = int(np.argmax(states))
        if states[worst] > state:
            problem = f"seen by process {worst}"
            failure = OSError(problem) if states[worst] == 2 else None
    if failure is not None:
        message = f"checkpoint {where} could not be read ({problem}); it is kept"
        kind = ValueError if isinstance(failure, NotOursError) else OSError
        raise kind(message) from failure
    return found, problem


def _spares_the_files(error: Exception) -> bool:
    """Whether an error is of memory, rights or the like, not of a damaged file."""
    if isinstance(error, OSError):
        return not isinstance(
            error, FileNotFoundError | NotADirectoryError | IsADirectoryError
        )
    return isinstance(error, MemoryError | jax.errors.JaxRuntimeError | NotOursError)


def tell(message: str) -> None:
    """Warns who called the caller of this."""
    warnings.warn(message, UserWarning, stacklevel=3)


def _directory(directory: str | pathlib.Path) -> pathlib.Path:
    if not isinstance(directory, str | pathlib.Path):
        raise ValueError(f"directory must be a path, got {directory!r}")
    path = pathlib.Path(directory).absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".writable-{jax.process_index()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(
            f"directory must be one that can be written to, got {directory}: {error}"
        ) from error
    return path


def _cut_short(directory: pathlib.Path) -> list[str]:
    """Names of saves that a killed process left unfinished."""
    found = (d for d in directory.iterdir() if re.match(r"\d+", d.name) and d.is_dir())
    whole = re.compile(r"\d+")
    return sorted(
        d.name
        for d in found
        if not whole.fullmatch(d.name) or not (d / "_CHECKPOINT_METADATA").exists()
    )


def _orbax() -> Any:
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise ImportError(
            "checkpoints need Orbax: pip install 'slamb-jax[checkpoint]'"
        ) from error
    return orbax.checkpoint
