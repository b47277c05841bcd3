"""One run: a method at a rate in a setting from a seed, all workers simulated."""

import dataclasses
import functools
import itertools
import math
import time
from typing import Any

import jax
import numpy as np

from benchmarks.frontier.grid import Setting
from benchmarks.frontier.methods import DENSE, METHODS, exchanges, make
from benchmarks.frontier.results import Result
from benchmarks.frontier.tasks import task
from examples.common import simulated
from examples.hardware import hardware

EVALUATIONS = 8
ROUND = 25  # steps: they are where DiLoCo and SparseLoCo have just synchronized


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


@functools.lru_cache(maxsize=1)
def program(setting: Setting, method: str) -> simulated.Program:
    """A method's compiled step in a setting, for any rate and seed."""
    return simulated.Program(
        task(setting.task),
        simulated.Method(
            method, lambda schedule, _: make(method, schedule, setting).optimizer
        ),
        workers=setting.workers,
        batch=setting.batch,
        steps=setting.steps,
    )


def execute(run: Run) -> Result:
    """Trains; the losses, what was communicated by then, and the time of a step."""
    began = time.perf_counter()
    setting = run.setting
    compiled = program(setting, run.method)
    due = simulated.evaluation_steps(setting.steps, EVALUATIONS, ROUND)
    found = simulated.train(compiled, run.rate, run.seed, due=due)
    params = jax.eval_shape(compiled.task.init, jax.random.key(0))
    rival = make(run.method, run.rate, setting)
    points: list[dict[str, Any]] = []
    for step, loss in zip(found.steps, found.losses, strict=True):
        sent = exchanges(rival, params, setting.workers, step)
        finite = math.isfinite(loss)
        point = {"step": step, "loss": loss if finite else None, "exchanges": sent}
        points.append(point)
        if not finite:
            break
    return {
        "key": run.key(),
        "points": points,
        "step_seconds": found.step_seconds,
        "run_seconds": time.perf_counter() - began,
        "hardware": hardware(jax.devices()[0]),
    }


def timing_key(setting: Setting, method: str) -> dict[str, Any]:
    """The key of :func:`timing`'s result, which runs of any length share."""
    short = dataclasses.asdict(setting.short())
    return {**short, "method": method, **METHODS[method].settings, "timed": True}


def timing(setting: Setting, method: str, steps: int = 9) -> Result:
    """Seconds that a step takes, LAMB's in turn with it, and what comes before."""
    programs = {name: program(setting, name) for name in (method, DENSE)}
    first = {name: chosen.compile() for name, chosen in programs.items()}
    states = {name: chosen.start(0.0, 0) for name, chosen in programs.items()}
    times: dict[str, list[float]] = {name: [] for name in programs}
    for batch in itertools.islice(programs[method].batches(0), steps):
        for name, chosen in programs.items():
            start = time.perf_counter()
            states[name], _ = jax.block_until_ready(chosen.step(states[name], batch))
            times[name].append(time.perf_counter() - start)
    return {
        "key": timing_key(setting, method),
        "step_seconds": float(np.median(times[method])),
        "dense_seconds": float(np.median(times[DENSE])),
        "first_seconds": first[method],
        "hardware": hardware(jax.devices()[0]),
    }
