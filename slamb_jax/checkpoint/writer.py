"""Who writes into a directory: one at a time, and readers change nothing."""

import contextlib
import errno
import importlib
import os
import pathlib
import shutil
import time
import weakref
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

locks: Any = None  # where there are none, nothing is told
with contextlib.suppress(ImportError):
    locks = importlib.import_module("fcntl")

_UNFINISHED = ".orbax-checkpoint-tmp"  # in the name of what Orbax has not finished
_PATIENCE = 1.0  # seconds: a reader that asks holds the lock for an instant
_DONE, _TAKEN, _REFUSED = range(3)


class Writer:
    """The right to write into a directory, taken by process 0 before the first save."""

    def __init__(self, directory: pathlib.Path) -> None:
        self._directory = directory
        self._begun = False
        self._release: Any = None

    def unfinished(self) -> list[str]:
        """The saves that were cut short; none where another process is saving now."""
        names = self._names()
        fd = _locked(self._directory, exclusive=False) if names else None
        if fd is None:
            return []
        os.close(fd)
        return names

    def begin(self) -> bool:
        """Takes the lock and removes what was cut short; False if it was taken before.

        Raises:
          OSError: on all processes, while another run saves into the directory.
          ValueError: on all processes, if process 0 cannot write there.
        """
        if self._begun:
            return False
        found, problem = _DONE, ""
        if jax.process_index() == 0:
            try:
                found = self._begin()
            except OSError as error:
                found, problem = _REFUSED, f": {error}"
        if jax.process_count() > 1:
            found = int(np.max(multihost_utils.process_allgather(np.int32(found))))
        if found == _TAKEN:
            raise OSError(
                f"another run is saving into {self._directory}: end it, or give this "
                "one a directory of its own"
            )
        if found == _REFUSED:
            raise ValueError(
                f"directory must be one that can be written to, got {self._directory}"
                f"{problem}"
            )
        self._begun = True
        return True

    def _begin(self) -> int:
        probe = self._directory / ".writable"
        probe.touch()
        probe.unlink()
        deadline = time.monotonic() + _PATIENCE
        while (fd := _locked(self._directory, exclusive=True)) is None:
            if time.monotonic() > deadline:
                return _TAKEN
            time.sleep(_PATIENCE / 20)
        self._release = weakref.finalize(self, os.close, fd)
        for name in self._names():
            shutil.rmtree(self._directory / name)
        return _DONE

    def _names(self) -> list[str]:
        found = (x.name for x in self._directory.iterdir() if x.name[0].isdecimal())
        return sorted(name for name in found if _UNFINISHED in name)

    def end(self) -> None:
        """Lets others write."""
        if self._release is not None:
            self._release()
        self._begun, self._release = False, None


def _locked(directory: pathlib.Path, *, exclusive: bool) -> int | None:
    """A descriptor that holds the lock of the directory; None where another does."""
    fd = os.open(directory, os.O_RDONLY)
    if locks is None:
        return fd
    try:
        kind = locks.LOCK_EX if exclusive else locks.LOCK_SH
        locks.flock(fd, kind | locks.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            os.close(fd)
            return None
    return fd  # also where the file system has no locks
