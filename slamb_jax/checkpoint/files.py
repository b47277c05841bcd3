"""What both stores do with files, and all processes together.

They agree on errors, tell damage from other failures, and take a directory for
themselves.
"""

import contextlib
import errno
import gc
import os
import pathlib
import re
import shutil
import weakref
from collections.abc import Callable, Iterator

import jax

from slamb_jax.workers.mesh import gather


class DamagedCheckpointError(ValueError):
    """Files of a checkpoint are missing, or are not those that were saved."""


#: What processes tell each other, the gravest last.
_ERRORS = (DamagedCheckpointError, ValueError, OSError)
# Errors of the machine, but for those numbers that a file can cause.
_OF_MACHINE = (OSError, MemoryError, jax.errors.JaxRuntimeError)
_OF_FILES = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.ELOOP)


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Raises on all processes the gravest error that the body raises on one of them.

    A process that went on alone would wait for the others for ever.
    """
    raised: Exception | None = None
    try:
        yield
    except _ERRORS as error:
        raised = error
    grade = next((i for i, kind in enumerate(_ERRORS) if isinstance(raised, kind)), -1)
    worst, message = max(gather([grade, str(raised)]))
    if worst >= 0:
        raise _ERRORS[worst](message) from raised


@contextlib.contextmanager
def reading(what: str) -> Iterator[None]:
    """Names what cannot be read, and tells damage from errors of the machine.

    Raises:
      DamagedCheckpointError: where the files are to blame.
      OSError: where reading failed for another reason: memory, rights.
    """
    try:
        yield
    except Exception as error:  # a damaged file may make a reader raise anything
        problem = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        number = getattr(error, "errno", None)
        missing = isinstance(error, FileNotFoundError)  # Orbax's has no number
        if isinstance(error, _OF_MACHINE) and not missing and number not in _OF_FILES:
            raise OSError(
                f"{what} could not be read ({problem}); it is kept"
            ) from error
        problem = str(error) if isinstance(error, DamagedCheckpointError) else problem
        raise DamagedCheckpointError(f"{what} is damaged ({problem})") from error


def saved_steps(directory: pathlib.Path, suffix: str = "") -> set[int]:
    """The steps in the names of the files and folders that are there now."""
    names = [path.name.removesuffix(suffix) for path in directory.glob(f"*{suffix}")]
    return {int(name) for name in names if re.fullmatch("0|[1-9][0-9]*", name)}


def remove(path: pathlib.Path) -> None:
    """Removes a file, a link, or a folder and all that is in it, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def lock(directory: pathlib.Path, owner: object) -> Callable[[], object]:
    """Locks a directory until ``owner`` is gone, or the function returned is called.

    Raises:
      OSError: while another run holds it.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    unlock = weakref.finalize(owner, os.close, descriptor)
    if not _locked(descriptor):
        gc.collect()  # what holds it may be gone, but for a cycle of a traceback
        if not _locked(descriptor):
            unlock()
            raise OSError(
                f"another run is saving into {directory}: end it, or give this one a "
                "directory of its own"
            )
    return unlock


def _locked(descriptor: int) -> bool:
    """Whether a file is locked now; True where nothing has locks."""
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except (ImportError, OSError):  # the system, or the file system, has none
        pass
    return True
