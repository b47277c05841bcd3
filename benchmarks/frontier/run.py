"""One run: a method at a rate in a setting from a seed, all workers simulated."""

import collections
import dataclasses
import functools
import math
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import slamb_jax
from benchmarks.frontier.grid import Setting
from benchmarks.frontier.methods import AXIS, DENSE, METHODS, last_sends, sends
from benchmarks.frontier.tasks import task
from examples.byte_lm.train import schedule
from examples.hardware import hardware

EVALUATIONS = 8
ROUND = 25  # steps: they are where DiLoCo and SparseLoCo have just synchronized
TOGETHER = 16  # sequences or images whose gradients are computed at once


@dataclasses.dataclass(frozen=True)
class Run:
    """What is run; with the method's settings, the key of its result."""

    setting: Setting
    method: str
    rate: float
    seed: int

    def key(self) -> dict[str, Any]:
        return {
            **dataclasses.asdict(self.setting),
            "method": self.method,
            **METHODS[self.method].settings,
            "rate": self.rate,
            "seed": self.seed,
        }


@dataclasses.dataclass(frozen=True)
class Program:
    """A method's compiled step in a setting, for any rate and seed."""

    setting: Setting
    step: Any
    start: Any  # of a seed and a rate: the state
    evaluate: Any


@functools.lru_cache(maxsize=1)
def program(setting: Setting, method: str) -> Program:
    job, chosen = task(setting.task), METHODS[method]
    shape = schedule(1.0, setting.steps)

    def optimizer(rate: Any) -> optax.GradientTransformation:
        scaled = lambda count: rate * shape(count)  # noqa: E731
        return chosen.make(scaled, setting, **chosen.settings)

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        params, opt_state, rate = state  # the rate in it: one program for a sweep
        both = jax.value_and_grad(job.loss)
        chunk = max(1, TOGETHER // setting.batch)
        loss, grads = slamb_jax.in_chunks(both, chunk)(params, batch)
        updates, opt_state = optimizer(rate).update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state, rate), loss

    def start(seed: int, rate: float) -> Any:
        params = job.init(jax.random.key(seed))
        state = (params, optimizer(rate).init(params), jnp.float32(rate))
        return slamb_jax.simulated_replicas(state, setting.workers)

    run = slamb_jax.simulated_step(step, setting.workers, AXIS)
    loss = jax.jit(lambda params: job.loss(params, job.held_out))
    return Program(setting, run, start, loss)


def timing_key(setting: Setting, method: str) -> dict[str, Any]:
    """The key of :func:`timing`'s result, which runs of any length share."""
    short = dataclasses.asdict(setting.short())
    return {**short, "method": method, **METHODS[method].settings, "timed": True}


def timing(setting: Setting, method: str, steps: int = 9) -> dict[str, Any]:
    """Seconds that a step takes, LAMB's in turn with it, and what comes before."""
    size = setting.workers * setting.batch
    first, *batches = task(setting.task).batches(size, steps + 1, 0)

    def started(name: str) -> tuple[Program, Any]:
        compiled = program(setting, name)
        state, _ = compiled.step(compiled.start(0, 0.0), first)
        return compiled, jax.block_until_ready(state)

    began = time.perf_counter()
    compiled, state = started(method)
    compiled.evaluate(slamb_jax.consolidate(state[0])).block_until_ready()
    before = time.perf_counter() - began
    runs = {method: (compiled, state), DENSE: started(DENSE)}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for batch in batches:
        for name, (compiled, state) in runs.items():
            start = time.perf_counter()
            state, _ = jax.block_until_ready(compiled.step(state, batch))
            times[name].append(time.perf_counter() - start)
            runs[name] = compiled, state
    return {
        "key": timing_key(setting, method),
        "step_seconds": float(np.median(times[method])),
        "dense_seconds": float(np.median(times[DENSE])),
        "first_seconds": before,
        "hardware": hardware(jax.devices()[0]),
    }


def execute(run: Run) -> dict[str, Any]:
    """Trains, and tells the losses, what was sent by then, and the time of a step.

    A point's ``exchanges`` are all collectives up to it, and the average that gives
    one copy of the parameters where replicas differ: (kind, bytes put in, how often).
    """
    began = time.perf_counter()
    setting, method = run.setting, METHODS[run.method]
    compiled = program(setting, run.method)
    state = compiled.start(run.seed, run.rate)
    params = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), state[0]
    )
    size = setting.workers * setting.batch
    due = np.linspace(0, setting.steps / ROUND, EVALUATIONS + 1).round()[1:] * ROUND
    sent: collections.Counter = collections.Counter()
    points, times = [], []
    stream = task(setting.task).batches(size, setting.steps, run.seed)
    for t, batch in enumerate(stream, 1):
        start = time.perf_counter()
        state, _ = jax.block_until_ready(compiled.step(state, batch))
        times.append(time.perf_counter() - start)
        sent.update(sends(method, params, setting, t))
        if t in due:
            loss = float(compiled.evaluate(slamb_jax.consolidate(state[0])))
            total = sent + collections.Counter(last_sends(method, params, setting, t))
            points.append(
                {
                    "step": t,
                    "loss": loss if math.isfinite(loss) else None,
                    "exchanges": [[*send, often] for send, often in total.items()],
                }
            )
            if points[-1]["loss"] is None:
                break  # it will not come back
    return {
        "key": run.key(),
        "points": points,
        "step_seconds": float(np.median(times[1:] or times)),
        "run_seconds": time.perf_counter() - began,
        "hardware": hardware(jax.devices()[0]),
    }
