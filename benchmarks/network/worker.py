"""One host's process: trains with every optimizer in turn and reports what it took.

Started by ``benchmarks.network``, which writes a line to its standard input for every
round to measure, and reads one line of JSON for it.
"""

import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import slamb_jax
from benchmarks.network.counters import Counters
from benchmarks.network.training import AXIS, CONTEXT, init, optimizers, step_with
from examples.byte_lm import data

DENSE_STEPS = 4  # in a round; SLAMB makes a cycle of H
ALONE = ", alone"  # what the same step is called with nothing sent
BARRIERS = 20  # in a round, to know the latency


@dataclasses.dataclass(frozen=True)
class Job:
    """What every worker needs to know; travels as JSON."""

    workers: int
    compress_ratio: float
    sync_every: int
    seed: int
    coordinator: str
    interface: str


class Program:
    """A training step with one optimizer, and its state."""

    def __init__(
        self, tx: optax.GradientTransformation, job: Job, mesh: Any, *, alone: bool
    ):
        params = init(job.seed)
        self.state = slamb_jax.replicate((params, tx.init(params)), mesh, AXIS)
        self.run = slamb_jax.per_worker_step(step_with(tx, alone=alone), mesh, AXIS)
        self.loss = float("nan")

    def step(self, text: np.ndarray) -> float:
        """One step; the seconds it took here."""
        start = time.perf_counter()
        self.state, losses = jax.block_until_ready(self.run(self.state, text))
        seconds = time.perf_counter() - start
        self.loss = float(losses.addressable_shards[0].data[0])
        return seconds

    def wire(self, workers: int) -> dict[str, Any]:
        """What the wire report of the compiled step says."""
        text = jax.ShapeDtypeStruct((workers, CONTEXT + 1), jnp.int32)
        report = slamb_jax.wire_report(self.run.lower(self.state, text))
        return {
            "table": str(report),
            "every_step": report.bytes_sent(),
            "at_average": report.bytes_sent(conditional=True),
        }


class Barrier:
    """An all-reduce of one number: nobody leaves before everybody came."""

    def __init__(self, mesh: Any):
        self.state = slamb_jax.replicate(jnp.zeros(1), mesh, AXIS)
        self.run = slamb_jax.per_worker_step(
            lambda x, _: (slamb_jax.average_parameters(x, AXIS), ()), mesh, AXIS
        )

    def __call__(self) -> float:
        start = time.perf_counter()
        self.state, _ = jax.block_until_ready(self.run(self.state, ()))
        return time.perf_counter() - start


def block(
    program: Program,
    steps: int,
    barrier: Barrier,
    texts: Iterator[np.ndarray],
    interface: str,
) -> dict[str, Any]:
    """So many steps, each from a barrier, and what was sent meanwhile."""
    barrier()
    before = Counters.read(interface)
    seconds = []
    for _ in range(steps):
        barrier()
        seconds.append(program.step(next(texts)))
    barrier()
    sent = Counters.read(interface) - before
    return {
        "seconds": seconds,
        "loss": program.loss,
        "sent": dataclasses.asdict(sent),
    }


def own_cores(workers: int, index: int) -> None:
    """Keeps this process to its share of the cores, like a host of its own."""
    cores = sorted(os.sched_getaffinity(0))
    first = index * len(cores) // workers
    past = max(first + 1, (index + 1) * len(cores) // workers)
    os.sched_setaffinity(0, cores[first:past])


def main(job: Job, index: int) -> None:
    own_cores(job.workers, index)
    jax.distributed.initialize(job.coordinator, job.workers, index)
    mesh = jax.make_mesh((job.workers,), (AXIS,))
    text, _ = data.load(data.standard_library(), CONTEXT)
    texts = data.batches(text, job.workers, CONTEXT, sys.maxsize, job.seed)
    barrier = Barrier(mesh)
    chains = optimizers(job.compress_ratio, job.sync_every)
    programs = {
        name + ALONE * alone: Program(tx, job, mesh, alone=alone)
        for name, tx in chains.items()
        for alone in (False, True)
    }

    def measure() -> dict[str, Any]:
        blocks = {}
        for name, program in programs.items():
            steps = job.sync_every if name.startswith("SLAMB") else DENSE_STEPS
            blocks[name] = block(program, steps, barrier, texts, job.interface)
        return {"blocks": blocks, "barriers": [barrier() for _ in range(BARRIERS)]}

    measure()  # compiles, and makes every connection
    say({name: program.wire(job.workers) for name, program in programs.items()})
    for _ in sys.stdin:
        say(measure())


def say(report: dict[str, Any]) -> None:
    print("report", json.dumps(report), flush=True)


if __name__ == "__main__":
    main(Job(**json.loads(sys.argv[1])), int(sys.argv[2]))
