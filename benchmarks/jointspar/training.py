"""Trains each method with real workers, one a device, at rates of a small sweep."""

import dataclasses
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import slamb_jax
from benchmarks.frontier.results import Results
from benchmarks.frontier.tasks import Task, byte_lm, digits
from benchmarks.jointspar.methods import METHODS, SYNC_EVERY, Method, layer_sizes
from examples.byte_lm.train import AXIS, schedule

POWERS = (-1, 0, 1)  # of two, times the middle of a method's rates
EVALUATIONS = 8
TASKS = {"digits": (digits, 16), "byte_lm": (functools.partial(byte_lm, 4), 2)}


@dataclasses.dataclass(frozen=True)
class Run:
    """What one run gave."""

    task: str
    method: str
    rate: float
    seed: int
    steps: list[int]
    losses: list[float]  # evaluation loss after those steps
    sent: list[float]  # bytes sent by each worker until then
    seconds: list[float]  # in steps until then, without evaluations
    active: float  # the mean share of layers


class Trainer:
    """A method's compiled step on a task, for any rate and seed."""

    def __init__(self, name: str, method: Method, mesh: Any, steps: int):
        make, self.batch = TASKS[name]
        self.name, self.method, self.mesh, self.length = name, method, mesh, steps
        self.task: Task = make()
        shapes = jax.eval_shape(self.task.init, jax.random.key(0))
        self.sizes = layer_sizes(self.task, shapes)
        shape = schedule(1.0, steps)

        def optimizer(rate: Any) -> optax.GradientTransformation:
            scaled = lambda count: rate * shape(count)  # noqa: E731
            return method.make(scaled, self.task, len(self.sizes) - 1, steps)

        def step(state: Any, batch: Any) -> Any:
            params, opt_state, rate = state  # the rate in it: one program for a sweep
            active = slamb_jax.active_layers(opt_state) if method.share else None
            loss = self.task.loss
            grads = jax.grad(lambda params: loss(params, batch, active))(params)
            updates, opt_state = optimizer(rate).update(grads, opt_state, params)
            return (optax.apply_updates(params, updates), opt_state, rate), active

        self.optimizer = optimizer
        self.step = slamb_jax.per_worker_step(step, mesh, AXIS)
        self.evaluate = jax.jit(lambda p: self.task.loss(p, self.task.held_out))

    def start(self, seed: int, rate: float) -> Any:
        params = self.task.init(jax.random.key(seed))
        state = params, self.optimizer(rate).init(params), jnp.float32(rate)
        return slamb_jax.replicate(state, self.mesh, AXIS)

    def bytes_of(self, report: slamb_jax.WireReport, t: int, active: Any) -> float:
        """What a worker sends at step t = 1, 2, ..., of what the program may send."""
        if self.method.share:
            # In branches stand the layers, in proportion to their elements.
            anyone = {k: bool(np.any(x)) for k, x in active.items()}
            all_layers = sum(n for k, n in self.sizes.items() if k is not None)
            often = sum(self.sizes[k] for k in anyone if anyone[k]) / all_layers
        else:
            often = float(t % SYNC_EVERY == 1)
        return report.bytes_sent() + often * report.bytes_sent(conditional=True)

    def run(self, rate: float, seed: int) -> Run:
        state = self.start(seed, rate)
        size = self.batch * self.mesh.size
        due = np.linspace(0, self.length, EVALUATIONS + 1).round()[1:]
        points: list[tuple[int, float, float, float]] = []
        sent = seconds = 0.0
        share: list[float] = []
        for t, batch in enumerate(self.task.batches(size, self.length, seed), 1):
            if t == 1 and not hasattr(self, "report"):
                self.report = slamb_jax.wire_report(self.step.lower(state, batch))
                jax.block_until_ready(self.step(self.start(seed, rate), batch))
            began = time.perf_counter()
            state, active = jax.block_until_ready(self.step(state, batch))
            seconds += time.perf_counter() - began
            sent += self.bytes_of(self.report, t, active)
            share.append(float(np.mean([*active.values()])) if active else 1.0)
            if t in due:
                loss = float(self.evaluate(slamb_jax.consolidate(state[0])))
                points.append((t, loss, sent, seconds))
        steps, losses, by_bytes, by_time = (list(x) for x in zip(*points, strict=True))
        return Run(
            self.name, self.method.name, rate, seed, steps, losses, by_bytes, by_time,
            float(np.mean(share)),
        )  # fmt: skip


def train_all(
    name: str,
    mesh: Any,
    steps: int,
    seeds: tuple[int, ...],
    results: Results,
    report: Any,
) -> list[list[Run]]:
    """Of each method, the runs of all seeds at the rate that was best for the first."""
    return [
        _train(method, name, mesh, steps, seeds, results, report) for method in METHODS
    ]


def _train(
    method: Method,
    name: str,
    mesh: Any,
    steps: int,
    seeds: tuple[int, ...],
    results: Results,
    report: Any,
) -> list[Run]:
    trainer = functools.cache(lambda: Trainer(name, method, mesh, steps))
    job = {"task": name, "method": method.name, "workers": mesh.size, "steps": steps}

    def run(rate: float, seed: int) -> Run:
        key = job | {"rate": rate, "seed": seed}
        if (done := results.get(key)) is None:
            done = {"key": key, **dataclasses.asdict(trainer().run(rate, seed))}
            results.add(done)
            loss = done["losses"][-1]
            report(f"{loss:.3f}  {name}  {method.name}  rate {rate:g}  seed {seed}")
        return Run(**{k: x for k, x in done.items() if k != "key"})

    sweep = [run(method.rate * 2.0**power, seeds[0]) for power in POWERS]
    losses = [r.losses[-1] if np.isfinite(r.losses[-1]) else np.inf for r in sweep]
    best = sweep[int(np.argmin(losses))]
    return [best, *(run(best.rate, seed) for seed in seeds[1:])]
