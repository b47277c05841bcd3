"""Workers: devices on one machine or on many, and the signal that stops them."""

import contextlib
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
    if options.coordinator:
        jax.distributed.initialize(
            options.coordinator, options.num_processes, options.process_id
        )
    elif options.distributed:
        jax.distributed.initialize()
    if not options.distributed or options.num_processes:
        return local_mesh(options.workers // (options.num_processes or 1))
    return mesh_of(options.workers)


def local_mesh(here: int) -> Mesh:
    """A mesh of so many workers in each process; call it before jax is used."""
    with contextlib.suppress(RuntimeError):  # jax runs already, with what it has
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
    sharding = NamedSharding(mesh, PartitionSpec(AXIS))
    return jax.tree.map(
        lambda x: jax.make_array_from_process_local_data(sharding, x), local
    )


def replicated(mesh: Mesh) -> NamedSharding:
    """The same on all devices, so that every process can read it."""
    return NamedSharding(mesh, PartitionSpec())


class Stop:
    """Reports, at the same step on all processes, that SIGTERM reached one of them."""

    def __init__(self) -> None:
        self.came = False
        self.alone = jax.process_count() == 1

    def __enter__(self) -> Self:
        if self.alone:  # else jax has a handler of its own, and agrees on the step
            self.before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *exception: object) -> None:
        if self.alone:
            signal.signal(signal.SIGTERM, self.before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.came = True

    def at(self, step: int) -> bool:
        """Whether to save and stop now; call it once at every step."""
        if self.alone:
            return self.came
        return bool(multihost_utils.reached_preemption_sync_point(step))
