"""Workers: devices on one machine or on many, and the signals that stop them."""

import contextlib
import functools
import os
import signal
from types import FrameType
from typing import Any, Self

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from examples.common import AXIS
from examples.common.options import Options


def start(options: Options) -> Mesh:
    """Joins the processes and arranges the workers; call it before jax is used."""
    if options.coordinator or options.distributed:  # jax finds what is None
        jax.distributed.initialize(
            options.coordinator, options.num_processes, options.process_id
        )
    if not options.distributed or options.num_processes:
        return local_mesh(options.workers // (options.num_processes or 1))
    return mesh_of(options.workers)


def local_mesh(here: int) -> Mesh:
    """A mesh of so many workers in each process; call it before jax is used."""
    with contextlib.suppress(RuntimeError):  # jax runs already, on its devices
        jax.config.update("jax_num_cpu_devices", here)
    return mesh_of(here * jax.process_count())


def mesh_of(workers: int) -> Mesh:
    """A mesh of that many accelerators, or else of as many CPU devices."""
    processes = jax.process_count()
    here = workers // processes
    for devices in (jax.devices(), jax.devices("cpu")):
        mine = [[d for d in devices if d.process_index == p] for p in range(processes)]
        if workers == here * processes and min(map(len, mine)) >= here:
            return Mesh(np.array([d for own in mine for d in own[:here]]), (AXIS,))
    raise SystemExit(
        f"--workers: {workers} asked for; there are {processes} processes with "
        f"{len(jax.local_devices())} devices here"
    )


def split(mesh: Mesh, local: Any) -> Any:
    """This process's part of a batch as its part of an array over all workers."""
    return placed(NamedSharding(mesh, PartitionSpec(AXIS)), local)


def placed(sharding: NamedSharding, local: Any) -> Any:
    """A tree of what this process has of global arrays as these."""
    put = functools.partial(jax.make_array_from_process_local_data, sharding)
    return jax.tree.map(put, local)


def replicated(mesh: Mesh) -> NamedSharding:
    """The same on all devices, so that every process can read it."""
    return NamedSharding(mesh, PartitionSpec())


class Stop:
    """Reports, at the same step on all processes, that one was told to stop.

    By SIGTERM, or by Ctrl-C; a second Ctrl-C ends it without saving.
    """

    def __init__(self) -> None:
        self.number: int | None = None  # of the signal
        self.calls = 0
        self.alone = jax.process_count() == 1

    def __enter__(self) -> Self:
        # With several processes jax has a handler of SIGTERM, and agrees on the step.
        numbers = [signal.SIGINT, signal.SIGTERM] if self.alone else [signal.SIGINT]
        self.before = {n: signal.signal(n, self._note) for n in numbers}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    @property
    def status(self) -> int:
        """The exit status of a run that was stopped."""
        return 128 + (self.number or signal.SIGTERM)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        if number == signal.SIGINT:
            signal.signal(number, self.before[signal.SIGINT])
            if not self.alone:
                os.kill(os.getpid(), signal.SIGTERM)

    def now(self) -> bool:
        """Whether to save and stop; call it once at every step, on all processes."""
        if self.alone:
            return self.number is not None
        # jax counts from 1, also where a run goes on from a later step: of a larger
        # number first, a signal that came before it would be forgotten.
        self.calls += 1
        return bool(multihost_utils.reached_preemption_sync_point(self.calls))
