"""One host's process: trains with the method that a line of its input asks for.

Started by ``benchmarks.network.time_to_loss``. It answers each line with a report: the
seconds of each step, the bytes sent, and the loss where that is asked for.
"""

import dataclasses
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from benchmarks import rivals
from benchmarks.network import counters
from benchmarks.network.losses import DENSE, exchange_of
from benchmarks.network.model import alone
from benchmarks.network.worker import make_barrier, report, use_own_cores
from benchmarks.train import run as training
from benchmarks.train.grids import METHODS
from benchmarks.train.methods import ADAM, ADAMW
from benchmarks.train.tasks import task
from benchmarks.train.trials import Setting
from examples.common.simulated import AXIS, DEFAULT, Method, Program

WARM = 3  # steps before those that count
BARRIERS = 9  # to know the latency
BUCKETS = f"{DENSE}, 4 buckets"


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


def optimizer(method: str, rate: Any, setting: Setting) -> optax.GradientTransformation:
    """The method of benchmarks.train, or dense with its gradients in buckets."""
    if method == BUCKETS:
        return rivals.dense_bfloat16(ADAMW(rate, **ADAM), AXIS, buckets=4)
    return training.optimizer(METHODS[method], rate, setting.steps)


@functools.cache
def program(
    setting: Setting, method: str, mesh: Mesh, is_alone: bool
) -> tuple[Program, float]:
    """A compiled program, and the seconds that took."""
    way = Method(
        method,
        lambda rate, _: optimizer(method, rate, setting),
        exchange_of(method),
    )
    made = Program(
        task(setting.task), alone(way) if is_alone else way, workers=setting.workers,
        batch=setting.batch, steps=setting.steps, mesh=mesh,
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


def main(job: Job, index: int) -> None:
    use_own_cores(job.workers, index)
    jax.distributed.initialize(job.coordinator, job.workers, index)
    mesh = jax.make_mesh((job.workers,), (AXIS,))
    barrier = make_barrier(mesh, DEFAULT)
    barrier()
    report({})
    for line in sys.stdin:
        report(run(Ask.of_line(line), mesh, barrier, job.interface))


if __name__ == "__main__":
    main(Job(**json.loads(sys.argv[1])), int(sys.argv[2]))
