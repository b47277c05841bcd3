"""Workers: devices on one machine or on many, and the signals that stop them."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from examples.common import AXIS
from examples.common.options import Options


def start(options: Options) -> Mesh:
    """Joins the processes and arranges the workers; call it before jax is used."""
    if options.coordinator or options.distributed:  # jax finds what is None
        given = options.coordinator, options.num_processes, options.process_id
        jax.distributed.initialize(*given, heartbeat_timeout_seconds=options.timeout)
        sys.excepthook = leave
    if not options.distributed or options.num_processes:
        return local_mesh(options.workers // (options.num_processes or 1))
    return mesh_of(options.workers)


def leave(kind: type[BaseException], error: BaseException, trace: Any) -> None:
    """Ends at once; but for a broken link, of which jax will say whose end is gone."""
    sys.__excepthook__(kind, error, trace)
    if not issubclass(kind, jax.errors.JaxRuntimeError):
        os._exit(1)  # jax would wait for all other processes


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


def on_mesh(mesh: Mesh, local: Any, *axes: str) -> Any:
    """A tree of what this process has of arrays over all of them, split by ``axes``."""
    sharding = NamedSharding(mesh, PartitionSpec(*axes))
    make = jax.make_array_from_process_local_data
    return jax.tree.map(lambda x: make(sharding, x), local)


@contextlib.contextmanager
def stopping() -> Iterator[Callable[[int], int]]:
    """A function that says at the same step in all processes that one is to stop.

    By SIGTERM, or by Ctrl-C; a second Ctrl-C ends it without saving. Call it once at
    every step, with the number of its calls; it returns the exit status, or 0.
    """
    alone, told = jax.process_count() == 1, list[int]()

    def note(number: int, frame: object) -> None:
        told.append(number)
        if number == signal.SIGINT:
            signal.signal(number, before[signal.SIGINT])
            if not alone:
                os.kill(os.getpid(), signal.SIGTERM)

    def status(calls: int) -> int:
        # jax counts from 1, also where a run goes on from a later step: of a larger
        # number first, a signal that came before it would be forgotten.
        stop = told if alone else multihost_utils.reached_preemption_sync_point(calls)
        return 128 + (told[0] if told else signal.SIGTERM) if stop else 0

    # With several processes jax has a handler of SIGTERM, and agrees on the step.
    numbers = [signal.SIGINT, signal.SIGTERM] if alone else [signal.SIGINT]
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield status
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
