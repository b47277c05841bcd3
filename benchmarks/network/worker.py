"""One host's process: makes the steps that each line of its input asks for.

It answers each line with a report: the seconds of each step, the bytes sent, and the
loss where that is asked for.
"""

import dataclasses
import functools
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

import slamb_jax
from benchmarks.network import counters
from benchmarks.network.alone import alone
from benchmarks.network.losses import Setting, method_of
from benchmarks.train.tasks import task
from examples.common.simulated import AXIS, DEFAULT, Program

WARM = 3  # steps before those that count
BARRIERS = 9  # to know the latency


@dataclasses.dataclass(frozen=True)
class Job:
    """The settings of a run that every worker needs; passed on as JSON."""

    workers: int
    coordinator: str
    interface: str


@dataclasses.dataclass(frozen=True)
class Ask:
    """The steps to make: of which method, in which setting."""

    setting: Setting
    method: str
    rate: float
    seed: int
    steps: int
    alone: bool = False  # nothing is sent
    due: tuple[int, ...] = ()  # steps after which to evaluate

    @classmethod
    def of_line(cls, line: str) -> "Ask":
        found = json.loads(line)
        return cls(**found | {"setting": Setting(**found["setting"])})


@functools.cache
def program(
    setting: Setting, method: str, mesh: Mesh, is_alone: bool
) -> tuple[Program, float]:
    """A compiled program, and the seconds that took."""
    way = method_of(method, setting)
    if is_alone:  # they come apart, as they must
        warnings.filterwarnings("ignore", "after call .* workers differ")
    made = Program(
        task(setting.task), alone(way) if is_alone else way, mesh=mesh,
        workers=setting.workers, batch=setting.batch, steps=setting.steps,
        schedule=task(setting.task).schedule(setting.steps),
    )  # fmt: skip
    return made, made.compile()


def run(
    ask: Ask, mesh: Mesh, barrier: Callable[[], float], interface: str
) -> dict[str, Any]:
    """Steps that follow one another; the clock stands while the loss is evaluated."""
    made, compile_seconds = program(ask.setting, ask.method, mesh, ask.alone)
    state, warm = made.start(ask.rate, ask.seed), 0 if ask.due else WARM
    seconds: list[float] = []
    losses: list[float] = []
    sent = counters.Counters(0, 0, 0, 0, 0)
    before = sent
    for t, batch in enumerate(made.batches(ask.seed), 1):
        if t == warm + 1 or t - 1 in ask.due:
            barrier()
            before = counters.read(interface)
        began = time.perf_counter()
        state, _ = jax.block_until_ready(made.step(state, batch))
        if t > warm:
            seconds.append(time.perf_counter() - began)
        if t == ask.steps or t in ask.due:
            now = counters.read(interface)
            sent = jax.tree.map(lambda a, b, c: a + b - c, sent, now, before)
        if t in ask.due:
            losses.append(made.evaluate(state))
        if t == ask.steps:
            break
    return {
        "compile_seconds": compile_seconds,
        "seconds": seconds,
        "losses": losses,
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


def report(found: dict[str, Any]) -> None:
    print("report", json.dumps(found), flush=True)


def main(job: Job, index: int) -> None:
    use_own_cores(job.workers, index)
    jax.distributed.initialize(job.coordinator, job.workers, index)
    mesh = jax.make_mesh((job.workers,), (AXIS,))
    barrier = make_barrier(mesh)
    barrier()
    report({})
    for line in sys.stdin:
        report(run(Ask.of_line(line), mesh, barrier, job.interface))


if __name__ == "__main__":
    main(Job(**json.loads(sys.argv[1])), int(sys.argv[2]))
