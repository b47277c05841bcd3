"""One host's process: makes the steps that each line of its input asks for.

It answers each line with a report: the seconds of each step, the bytes sent, and the
loss where that is asked for.
"""

import dataclasses
import functools
import itertools
import json
import operator
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

import slamb_jax
from benchmarks.network import counters
from benchmarks.network.losses import Setting, method_of
from benchmarks.train.tasks import task
from examples.common.simulated import AXIS, DEFAULT, Program

WARM = 3  # steps before those that count
BARRIERS = 9  # to know the latency


@dataclasses.dataclass(frozen=True)
class Ask:
    """The steps to make: of which method, in which setting."""

    setting: Setting
    method: str
    rate: float
    seed: int
    steps: int  # that count
    is_training: bool = False  # all steps count, and the loss after them

    @classmethod
    def of_line(cls, line: str) -> "Ask":
        found = json.loads(line)
        return cls(**found | {"setting": Setting(**found["setting"])})


@functools.cache
def program(setting: Setting, method: str, mesh: Mesh) -> tuple[Program, float]:
    """A compiled program, and the seconds that took."""
    made = Program(
        task(setting.task), method_of(method, setting), mesh=mesh,
        workers=setting.workers, batch=setting.batch, steps=setting.steps,
        schedule=task(setting.task).schedule(setting.steps),
    )  # fmt: skip
    return made, made.compile()


def run(ask: Ask, mesh: Mesh, barrier: Callable[[], float]) -> dict[str, Any]:
    """Steps that follow one another."""
    made, compile_seconds = program(ask.setting, ask.method, mesh)
    state, batches = made.start(ask.rate, ask.seed), iter(made.batches(ask.seed))
    for batch in itertools.islice(batches, 0 if ask.is_training else WARM):
        state, _ = jax.block_until_ready(made.step(state, batch))
    barrier()
    before, seconds = counters.read(), []
    for batch in itertools.islice(batches, ask.steps):
        began = time.perf_counter()
        state, _ = jax.block_until_ready(made.step(state, batch))
        seconds.append(time.perf_counter() - began)
    sent = jax.tree.map(operator.sub, counters.read(), before)
    return {
        "compile_seconds": compile_seconds,
        "seconds": seconds,
        "loss": made.evaluate(state) if ask.is_training else None,
        "sent": sent._asdict(),
        "barrier": statistics.median(barrier() for _ in range(BARRIERS)),
    }


def make_barrier(mesh: Mesh) -> Callable[[], float]:
    """An all-reduce of one number: no worker leaves before all have come."""
    run = slamb_jax.per_worker_step(
        lambda x, _: (slamb_jax.average_parameters(x, AXIS), ()), mesh, DEFAULT
    )
    state = slamb_jax.replicate(jnp.zeros(1), mesh, DEFAULT)

    def barrier() -> float:
        nonlocal state
        start = time.perf_counter()
        state, _ = jax.block_until_ready(run(state, ()))
        return time.perf_counter() - start

    return barrier


def use_own_cores(workers: int, index: int) -> None:
    """Keeps this process to its share of the cores, like a host of its own."""
    cores = sorted(os.sched_getaffinity(0))
    first = index * len(cores) // workers
    past = max(first + 1, (index + 1) * len(cores) // workers)
    os.sched_setaffinity(0, cores[first:past])


def main(coordinator: str, workers: int, index: int) -> None:
    use_own_cores(workers, index)
    jax.distributed.initialize(coordinator, workers, index)
    mesh = jax.make_mesh((workers,), (AXIS,))
    barrier = make_barrier(mesh)
    barrier()
    print("report {}", flush=True)
    for line in sys.stdin:
        found = run(Ask.of_line(line), mesh, barrier)
        print("report", json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
