"""Checkpoints of all replicas, with checksums."""

import pathlib
import re
import warnings
from typing import Any, NamedTuple, Self

import chex
import numpy as np

from slamb_jax._core.checks import check_integer
from slamb_jax.checkpoint import format as stored
from slamb_jax.checkpoint.store import DamagedCheckpointError, Store
from slamb_jax.exchange.settings import Exchange, check_exchange
from slamb_jax.workers.mesh import check_replicas


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
        self._selects: dict[str, str] = {}
        if exchange is not None:
            check_exchange(exchange)
            self._selects = {
                name: re.sub(" at 0x[0-9a-f]+", "", repr(getattr(exchange, name)))
                for name in ("selection", "sync_every")
            }
        self._store = Store(directory, keep=keep, asynchronous=asynchronous)

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
        extra = stored.check_extra(extra)
        n = check_replicas("state", state)
        if not n:
            raise ValueError(f"state must have leaves, got {state!r}")
        arrays, leaves = stored.pack(stored.leaves_by_name(state))
        metadata = {"format": stored.FORMAT, "workers": n, "selects": self._selects}
        metadata |= {"states": stored.states_by_name(state)}
        metadata |= {"leaves": leaves, "extra": extra}
        return self._store.write(step, arrays, stored.with_checksum(metadata))

    def wait(self) -> None:
        """Waits until every save is written."""
        self._store.wait()

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
        if workers is not None and (n := check_replicas("like", like)) != workers:
            raise ValueError(f"workers must be those of like, {n}, got {workers!r}")
        steps = self._store.steps()
        if step is not None and step not in steps:
            raise ValueError(f"step must be one of {sorted(steps)}, got {step!r}")
        damaged: dict[int, str] = {}
        restored = None
        for at in steps if step is None else [step]:
            try:
                metadata, state = stored.read_state(self._store, at, like, workers)
            except DamagedCheckpointError as error:
                if step is not None:
                    raise
                damaged[at] = str(error)
                told = f"{error} and is ignored: going back to the one before it"
                warnings.warn(told, stacklevel=2)
                continue
            self._warn_of_another_exchange(at, metadata["selects"])
            restored = Restored(at, state, metadata["extra"])
            break
        if restored is None and len(damaged) > 1:
            raise ValueError(
                f"no checkpoint can be read: {'; '.join(damaged.values())}. All are "
                "kept; to start anew, move them away"
            )
        self._store.damaged |= damaged.keys()
        return restored

    def _warn_of_another_exchange(self, step: int, saved: dict[str, str]) -> None:
        values = [
            f"{name}={value} where it was {saved[name]}"
            for name, value in self._selects.items()
            if saved.get(name, value) != value
        ]
        if values:
            warnings.warn(
                f"checkpoint {step} is of another exchange: {', '.join(values)}. The "
                "ages of coordinates are wrong until each has had its turn",
                stacklevel=3,
            )

    def load(self, step: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Reads a checkpoint to the host, without a state to fit.

        Returns:
          Its metadata (``workers``, ``leaves``, ``extra``), and all replicas by name.
        """
        try:
            metadata = stored.read_metadata(self._store, step)
            return metadata, stored.read_arrays(self._store, step, metadata, {})
        except DamagedCheckpointError as error:
            hint = "remove it, and the one before it is the latest"
            raise ValueError(f"{error}: {hint}") from error

    def latest(self) -> int | None:
        """The step of the latest checkpoint, sound or damaged; None without any."""
        return self._store.latest()

    def close(self) -> None:
        """Waits until every save is written, and releases the directory."""
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
