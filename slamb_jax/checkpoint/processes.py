"""What all processes of a run do together: tell each other, fail, take a directory."""

import contextlib
import json
import os
import pathlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from jax.experimental import multihost_utils


class DamagedCheckpointError(ValueError):
    """Files of a checkpoint are missing, or are not those that were saved."""


_ERRORS = (DamagedCheckpointError, ValueError, OSError)  # the gravest last


def gather(value: Any) -> list[Any]:
    """``value`` of each process, as JSON holds it."""
    text = json.dumps(value).encode()
    longest = int(multihost_utils.process_allgather(np.uint32(len(text))).max())
    padded = np.frombuffer(text.ljust(longest), np.uint8)
    return [json.loads(x.tobytes()) for x in multihost_utils.process_allgather(padded)]


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
    if raised is not None and grade == worst:
        raise raised
    if worst >= 0:
        raise _ERRORS[worst](message) from raised


def lock(directory: pathlib.Path, owner: object) -> Callable[[], object]:
    """Locks a directory until ``owner`` is gone, or the function returned is called.

    Raises:
      OSError: while another run holds it.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:
        os.close(descriptor)
        raise OSError(
            f"another run is saving into {directory}: end it, or give this one a "
            "directory of its own"
        ) from error
    except (ImportError, OSError):  # the system, or the file system, has no locks
        pass
    return weakref.finalize(owner, os.close, descriptor)
