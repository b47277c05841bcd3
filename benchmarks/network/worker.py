"""One host's process: trains with every optimizer in turn and reports times and bytes.

Started by ``benchmarks.network``, which writes a line to its standard input for every
round to measure, and reads one line of JSON for it.
"""

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

import slamb_jax
from benchmarks.network import counters
from benchmarks.network.model import CONTEXT, TASK, alone, methods
from examples.common.simulated import AXIS, Method, Program

RATE = 0.01  # of all optimizers
DENSE_STEPS = 4  # in a round; SLAMB makes a cycle of H
BARRIERS = 20  # in a round, to know the latency


@dataclasses.dataclass(frozen=True)
class Job:
    """The settings of a run that every worker needs; passed on as JSON."""

    workers: int
    exchange: dict[str, Any]  # of Exchange.to_json
    seed: int
    coordinator: str
    interface: str


class Contestant:
    """A compiled step with one optimizer, and its state."""

    def __init__(self, method: Method, mesh: Mesh, seed: int) -> None:
        self.program = Program(
            TASK, method, workers=mesh.size, batch=1, steps=sys.maxsize,
            schedule=optax.constant_schedule(1.0), mesh=mesh,
        )  # fmt: skip
        self.state = self.program.start(RATE, seed)
        self.steps = DENSE_STEPS
        if method.name.startswith("SLAMB"):
            self.steps = method.exchange.sync_every or DENSE_STEPS

    def wire(self) -> dict[str, Any]:
        """The wire report of the compiled step."""
        text = jax.ShapeDtypeStruct((self.program.size, CONTEXT + 1), jnp.int32)
        report = slamb_jax.wire_report(self.program.step.lower(self.state, text))
        return {
            "table": str(report),
            "every_step": report.bytes_sent(),
            "at_average": report.bytes_sent(conditional=True),
        }

    def measure(
        self, barrier: Callable[[], float], texts: Iterator[Any], interface: str
    ) -> dict[str, Any]:
        """A cycle of steps, each from a barrier, and the bytes sent meanwhile."""
        barrier()
        before = counters.read(interface)
        seconds = []
        for _ in range(self.steps):
            barrier()
            text, start = next(texts), time.perf_counter()
            self.state, _ = jax.block_until_ready(self.program.step(self.state, text))
            seconds.append(time.perf_counter() - start)
        barrier()
        sent = jax.tree.map(int.__sub__, counters.read(interface), before)
        return {"seconds": seconds, "sent": sent._asdict()}


def make_barrier(mesh: Mesh, exchange: slamb_jax.Exchange) -> Callable[[], float]:
    """An all-reduce of one number: no worker leaves before all have come."""
    run = slamb_jax.per_worker_step(
        lambda x, _: (slamb_jax.average_parameters(x, AXIS), ()), mesh, exchange
    )
    state = slamb_jax.replicate(jnp.zeros(1), mesh, exchange)

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


def main(job: Job, index: int) -> None:
    use_own_cores(job.workers, index)
    jax.distributed.initialize(job.coordinator, job.workers, index)
    exchange = slamb_jax.Exchange.from_json(job.exchange)
    mesh = jax.make_mesh((job.workers,), (AXIS,))
    barrier = make_barrier(mesh, exchange)
    contestants = {
        method.name: Contestant(method, mesh, job.seed)
        for each in methods(exchange).values()
        for method in (each, alone(each))
    }
    texts = TASK.batches(job.workers, sys.maxsize, job.seed)

    def measure() -> dict[str, Any]:
        blocks = {
            name: contestant.measure(barrier, texts, job.interface)
            for name, contestant in contestants.items()
        }
        return {"blocks": blocks, "barriers": [barrier() for _ in range(BARRIERS)]}

    measure()  # compiles, and makes every connection
    report({name: contestant.wire() for name, contestant in contestants.items()})
    for _ in sys.stdin:
        report(measure())


def report(found: dict[str, Any]) -> None:
    print("report", json.dumps(found), flush=True)


if __name__ == "__main__":
    main(Job(**json.loads(sys.argv[1])), int(sys.argv[2]))
