"""A directory of numbered checkpoints, which one run at a time writes through Orbax.

No other module of the library uses Orbax.
"""

import contextlib
import importlib
import json
import os
import pathlib
import secrets
import shutil
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from slamb_jax._core.checks import check_integer

locks: Any = None  # where there are none, two runs can save into one directory
with contextlib.suppress(ImportError):
    locks = importlib.import_module("fcntl")

T = TypeVar("T")
_METADATA = "about"  # the folder of the metadata in a checkpoint
_UNFINISHED = "[0-9]*.orbax-checkpoint-tmp*"  # the name of an incomplete save
_MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_NO_DAMAGE = (OSError, MemoryError, jax.errors.JaxRuntimeError)  # _MISSING excepted


class DamagedCheckpointError(ValueError):
    """Files of a checkpoint are missing, or are not those that were saved."""


_ERRORS = (DamagedCheckpointError, ValueError, OSError)  # the gravest last


class Store:
    """The latest checkpoints of a directory; all processes must call each method."""

    def __init__(self, directory: Any, *, keep: int, asynchronous: bool) -> None:
        check_integer("keep", keep, 2)
        try:
            self.directory = pathlib.Path(directory).absolute()
            self.directory.mkdir(parents=True, exist_ok=True)
        except (OSError, TypeError) as error:
            raise ValueError(
                "directory must be a path that is there or can be made, got "
                f"{directory!r}: {error}"
            ) from error
        try:
            import orbax.checkpoint
        except ImportError as error:
            raise ImportError(
                "checkpoints need Orbax: pip install 'slamb-jax[checkpoint]'"
            ) from error
        self._orbax: Any = orbax.checkpoint
        self.damaged: set[int] = set()  # to be removed before the next save
        self._writing = False
        self._unlock: Callable[[], Any] = lambda: None  # until process 0 has the lock
        options = self._orbax.CheckpointManagerOptions(
            max_to_keep=keep,
            enable_async_checkpointing=asynchronous,
            cleanup_tmp_directories=False,  # a reader would remove a save in progress
        )
        self._manager = self._orbax.CheckpointManager(
            self.directory, options=options, item_names=("state", _METADATA)
        )

    def steps(self) -> list[int]:
        """The steps of all checkpoints, the latest first, alike for all processes."""
        steps = sorted(self._manager.all_steps(), reverse=True)
        with together():
            if steps != gathered(steps)[0]:
                raise self._not_shared(f"sees the checkpoints {steps}")
        return steps

    def latest(self) -> int | None:
        """The latest step."""
        return self._manager.latest_step()

    def write(self, step: int, arrays: dict[str, Any], metadata: dict[str, Any]) -> int:
        """Writes a checkpoint, in the background if asynchronous; returns its bytes."""
        if not self._writing:
            self._begin_writing()
        for damaged in sorted(self.damaged):  # their numbers may be written again
            self._manager.delete(damaged)
        self.damaged.clear()
        latest = self.latest()
        if latest is not None and step <= latest:
            raise ValueError(f"step must be larger than the last, {latest}, got {step}")
        args = self._orbax.args
        arrays = {name: x for name, x in arrays.items() if x.size}  # Orbax takes no 0
        items = {"state": args.StandardSave(arrays), _METADATA: args.JsonSave(metadata)}
        with self._write_errors(f"checkpoint {step}"):
            self._manager.save(step, args=args.Composite(**items), force=True)
        return sum(x.nbytes for x in arrays.values())

    def wait(self) -> None:
        """Waits until every save is written."""
        with self._write_errors("a checkpoint"):
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits until every save is written, and releases the directory."""
        try:
            self.wait()
        finally:
            self._manager.close()
            self._unlock()

    def metadata(self, step: int) -> dict[str, Any]:
        """The metadata of a checkpoint; empty if they are missing."""
        if not (self.directory / str(step) / _METADATA).is_dir():
            return {}
        return dict(self._restore(step, _METADATA, self._orbax.args.JsonRestore()))

    def read(self, step: int, like: Mapping[str, Any]) -> dict[str, Any]:
        """The arrays of a checkpoint, placed like those of ``like``."""
        return self._restore(step, "state", self._orbax.args.StandardRestore(like))

    def _restore(self, step: int, item: str, how: Any) -> Any:
        args = self._orbax.args.Composite(**{item: how})
        return self._manager.restore(step, args=args)[item]

    def _begin_writing(self) -> None:
        """Takes the directory for this run, and removes incomplete saves.

        All processes raise while another run saves there, if process 0 cannot write
        there, and if another process does not see a file that process 0 wrote.
        """
        # A new name, as a network file system remembers which files were not there.
        probe = self.directory / f".probe-{gathered(secrets.randbits(31))[0]:08x}"
        first = jax.process_index() == 0
        try:
            with together():
                if first:
                    self._lock_and_clear(probe)
            with together():
                end = time.monotonic() + 10.0  # a network file system may be late
                while not os.path.exists(probe):
                    if time.monotonic() > end:
                        problem = "does not see a file that process 0 wrote"
                        raise self._not_shared(problem)
                    time.sleep(0.05)
        except (ValueError, OSError):
            self._unlock()
            raise
        finally:
            if first:
                with contextlib.suppress(OSError):
                    probe.unlink()
        self._writing = True
        self._manager.reload()  # another run may have written in between

    def _lock_and_clear(self, probe: pathlib.Path) -> None:
        try:
            probe.touch()
        except OSError as error:
            raise ValueError(
                f"directory must be one that can be written to, got {self.directory}: "
                f"{error}"
            ) from error
        self._unlock = weakref.finalize(self, os.close, lock(self.directory))
        for path in [*self.directory.glob(_UNFINISHED)]:
            shutil.rmtree(path)

    def _not_shared(self, problem: str) -> ValueError:
        return ValueError(
            "directory must be on a file system that all processes share, got "
            f"{self.directory}: process {jax.process_index()} {problem}"
        )

    @contextlib.contextmanager
    def _write_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # of Orbax, TensorStore or the file system
            raise OSError(
                f"{what} could not be written into {self.directory}: {error}; "
                f"the latest complete one is {self.latest()}"
            ) from error


def try_read(path: pathlib.Path, read: Callable[[], T]) -> T:
    """What ``read`` returns; raises on all processes if it fails on one.

    Raises:
      DamagedCheckpointError: where the files are to blame.
      OSError: where reading failed for another reason: memory, rights.
    """
    with together():
        try:
            return read()
        except Exception as error:  # a damaged file may make a reader raise anything
            problem = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            if isinstance(error, _MISSING) or not isinstance(error, _NO_DAMAGE):
                raise damaged_at(path, problem) from error
            message = f"checkpoint {path} could not be read ({problem}); it is kept"
            raise OSError(message) from error


def damaged_at(path: pathlib.Path, problem: str) -> DamagedCheckpointError:
    """The error of one checkpoint."""
    return DamagedCheckpointError(f"checkpoint {path} is damaged ({problem})")


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Raises on all processes the gravest error that the body raises on one of them."""
    raised, grade = None, 0
    try:
        yield
    except _ERRORS as error:
        raised = error
        grade = 1 + [isinstance(error, kind) for kind in _ERRORS].index(True)
    worst, message = max(gathered([grade, str(raised)]))
    if raised is not None and grade == worst:
        raise raised
    if worst:
        raise _ERRORS[worst - 1](message) from raised


def gathered(value: Any) -> list[Any]:
    """``value`` of each process, as JSON holds it."""
    text = json.dumps(value).encode()
    longest = int(multihost_utils.process_allgather(np.uint32(len(text))).max())
    padded = np.frombuffer(text.ljust(longest), np.uint8)
    return [json.loads(x.tobytes()) for x in multihost_utils.process_allgather(padded)]


def lock(directory: pathlib.Path) -> int:
    """A descriptor that holds the lock of the directory.

    Raises:
      OSError: while another run holds it.
    """
    fd = os.open(directory, os.O_RDONLY)
    try:
        if locks is not None:
            locks.flock(fd, locks.LOCK_EX | locks.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        os.close(fd)
        raise OSError(
            f"another run is saving into {directory}: end it, or give this one a "
            "directory of its own"
        ) from error
    except OSError:  # the file system has no locks
        pass
    return fd
