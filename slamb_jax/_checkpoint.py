"""Checkpoints that hold every replica, and know whether they are whole."""

import functools
import json
import pathlib
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from slamb_jax._agree import checksums, differing
from slamb_jax._checkpoint_form import (
    FORMAT,
    as_written,
    bits,
    blank,
    check_fits,
    check_format,
    damage,
    described,
    first,
    named,
    placed,
    with_replicas,
)
from slamb_jax._checkpoint_store import NotOursError, Store, attempt, tell
from slamb_jax._checks import check_integer, check_range
from slamb_jax._replicas import check_replicas, everywhere, local


class Restored(NamedTuple):
    """What :meth:`Checkpoints.restore` found."""

    step: int
    state: chex.ArrayTree  # with a leading replica axis, placed as it was asked for
    extra: dict[str, Any]


class Checkpoints:
    """Checkpoints of all replicas in a directory, by Orbax, for exact resume.

    n workers' parameters and moments are n different things: an exact checkpoint holds
    n (p, m, v). Leaves whose replicas are the same to the bit (counts, keys, moments of
    what is exchanged whole) are written once. A checkpoint carries the names, shapes
    and dtypes of its leaves and a 64-bit checksum of each replica of each, taken on the
    devices: one that was cut short (its process killed) or has been damaged since is
    found out, and the one before it is restored instead, with a warning.

    All processes call each method, and see the same directory; arrays are written by
    the process that has them. Nothing is pickled. Needs ``slamb-jax[checkpoint]``.

    Args:
      directory: where to write; made if it is missing.
      keep: how many checkpoints to keep, the latest ones; at least 2, so that there is
        one before the last.
      asynchronous: :meth:`save` copies the state on its devices and returns, threads
        write the copy, and the next save, :meth:`wait` and :meth:`close` wait for them
        and raise what went wrong. False: it returns when all is written, and copies
        nothing.

    Raises:
      ValueError: for ``keep`` out of range, or a ``directory`` that cannot be one.
      OSError: where writing fails (a disk that is full): the checkpoints before stay.
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
        self._store = Store(directory, keep=keep, asynchronous=asynchronous)
        self._asynchronous = asynchronous
        self._damaged: set[int] = set()

    def save(
        self,
        step: int,
        state: chex.ArrayTree,
        extra: dict[str, Any] | None = None,
        *,
        rtol: float = 0.0,
    ) -> int:
        """Writes a checkpoint.

        Args:
          step: its number, larger than those before it.
          state: parameters, optimizer state, random keys: with a leading replica axis.
          extra: what JSON can hold: position in the data, a generator's state.
          rtol: leaves of floating point whose replicas agree to this tolerance (see
            :func:`assert_replicas_agree`) are written once, as the first replica's. 0
            loses nothing. 1e-5 is the compact form, for steps at which the parameters
            were averaged, t = 1, H + 1, 2H + 1, ...: p is written once, and what is
            lost is the rounding by which the replicas differed.

        Returns:
          The bytes of its arrays, before Orbax compresses them.

        Raises:
          ValueError: for ``step``, ``extra`` or ``rtol`` out of range, or a ``state``
            without a common replica axis.
        """
        check_integer("step", step, 0)
        check_range("rtol", rtol, 0.0, open_high=True)
        if extra is not None and not isinstance(extra, dict):
            raise ValueError(f"extra must be a dict, got {extra!r}")
        n = check_replicas("state", state)
        if not jax.tree.leaves(state):
            raise ValueError(f"state must have leaves, got {state!r}")
        leaves = named(state)
        once = [not u for u in differing(list(leaves.values()), rtol)]
        sums = checksums(list(leaves.values()))
        arrays: dict[str, Any] = {}
        told = {}
        for (name, x), one, words in zip(leaves.items(), once, sums, strict=True):
            # The state is donated to the next step, perhaps before it is written.
            arrays[name] = jnp.copy(bits(x)) if self._asynchronous else bits(x)
            if one:  # on the host: Orbax slices replicated arrays as old jax cannot
                arrays[name] = np.asarray(local(everywhere(first, bits(x))))
            told[name] = described(x, words[:1] if one else words, once=one)
        return self.write(step, arrays, n, told, extra or {})

    def write(
        self,
        step: int,
        arrays: dict[str, Any],
        workers: int,
        leaves: dict[str, Any],
        extra: dict[str, Any],
    ) -> int:
        """Writes arrays by name, with what :meth:`about` is to tell of them."""
        about = {
            "format": FORMAT, "workers": workers, "leaves": leaves, "extra": extra,
        }  # fmt: skip
        try:
            json.dumps(extra)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"extra must be what JSON can hold, got {error}"
            ) from error
        for passed_over in sorted(self._damaged):  # before what replaces them
            self._store.delete(passed_over)
        self._damaged.clear()
        latest = self._store.latest()
        if latest is not None and step <= latest:
            raise ValueError(f"step must be larger than the last, {latest}, got {step}")
        self._store.write(step, arrays, about)
        return sum(x.nbytes for x in arrays.values())

    def wait(self) -> None:
        """Returns when all that was saved is whole."""
        self._store.wait()

    def restore(self, like: chex.ArrayTree) -> Restored | None:
        """The latest checkpoint that is whole, placed like ``like``; None if none is.

        Args:
          like: the state that is expected, as :func:`replicate` returned it: its
            structure, shapes, dtypes and places count, not its values.

        Raises:
          ValueError: if the checkpoint does not fit: of another model or optimizer,
            another number of workers (:func:`resize` that) or a later format; or of
            something else than this class; or if there are several and none is whole,
            which no interrupted save does.
          OSError: where it is not the file that reading fails for: memory, rights.
            Nothing is deleted then, nor with a ValueError.
        """
        passed_over: dict[int, str] = {}
        for step in self._store.steps():
            where = self._store.directory / str(step)
            about, problem = attempt(where, functools.partial(self.about, step))
            state = None
            if not problem:
                check_fits(about, like, where)
                read = functools.partial(self._read, step, about, like)
                state, problem = attempt(where, read)
            if not problem:
                problem = damage(about, named(state))
            if not problem:
                self._damaged |= passed_over.keys()
                return Restored(step, state, about["extra"])
            passed_over[step] = problem
            tell(
                f"checkpoint {where} is damaged ({problem}) and is ignored: going "
                "back to the one before it"
            )
        if len(passed_over) > 1:
            told = "; ".join(f"{step}: {why}" for step, why in passed_over.items())
            raise ValueError(
                f"no checkpoint in {self._store.directory} can be read ({told}): all "
                "are kept; to start anew, move them away"
            )
        self._damaged |= passed_over.keys()
        return None

    def about(self, step: int) -> dict[str, Any]:
        """What a checkpoint says of itself: workers, leaves, checksums, extra."""
        found: dict[str, Any] = self._store.about(step)
        if not isinstance(found, dict):
            raise ValueError(f"it tells {found!r} of itself")
        if "leaves" not in found:
            raise NotOursError("it is not one of slamb_jax.Checkpoints")
        return found

    def load(self, step: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """A whole checkpoint without a state to compare it with, on the host."""
        where = self._store.directory / str(step)
        about, problem = attempt(where, functools.partial(self.about, step))
        arrays: dict[str, Any] = {}
        if not problem:
            check_format(about, where)
            like = {name: blank(x, about) for name, x in about["leaves"].items()}
            read = functools.partial(self._store.read, step, like)
            arrays, problem = attempt(where, read)
        if not problem:
            problem = damage(about, with_replicas(arrays, about))
        if problem:
            raise ValueError(
                f"checkpoint {where} is damaged ({problem}): "
                "remove it, and the one before it is the latest"
            )
        return about, arrays

    def latest(self) -> int | None:
        """The step of the latest checkpoint, whole or damaged; None without any."""
        return self._store.latest()

    def _read(self, step: int, about: dict[str, Any], like: chex.ArrayTree) -> Any:
        leaves = named(like)
        shapes = {
            name: as_written(bits(x), once=about["leaves"][name]["once"])
            for name, x in leaves.items()
        }
        read = self._store.read(step, shapes)
        treedef: Any = jax.tree.structure(like)
        return treedef.unflatten([placed(read[name], x) for name, x in leaves.items()])

    def close(self) -> None:
        """Lets go of the directory."""
        self._store.close()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
