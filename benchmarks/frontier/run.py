"""One run: a method at a rate in a setting from a seed, all workers simulated."""

import dataclasses
import functools
import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import optax
from rich.console import Console

from benchmarks.frontier.grid import Setting
from benchmarks.frontier.methods import METHODS, make
from benchmarks.frontier.results import Result, Results, last_loss
from benchmarks.frontier.tasks import schedule, task
from benchmarks.frontier.wire import sends_of
from examples.common import simulated
from examples.hardware import hardware

EVALUATIONS = 8
ROUND = 25  # steps: they are where SparseLoCo has just synchronized


@dataclasses.dataclass(frozen=True)
class Run:
    """A run; with the key of its method, the key of its result."""

    setting: Setting
    method: str
    rate: float
    seed: int

    def __str__(self) -> str:
        return f"{self.setting}  {self.method}  rate {self.rate:g}  seed {self.seed}"

    def key(self) -> dict[str, Any]:
        return {
            **dataclasses.asdict(self.setting),
            "method": self.method,
            **METHODS[self.method].key,
            "rate": self.rate,
            "seed": self.seed,
        }


@functools.lru_cache(maxsize=1)
def program(setting: Setting, method: str) -> simulated.Program:
    """A method's compiled step in a setting, for any rate and seed."""
    return simulated.Program(
        task(setting.task),
        simulated.Method(method, lambda rate, _: make(method, rate, setting).optimizer),
        workers=setting.workers,
        batch=setting.batch,
        steps=setting.steps,
        schedule=schedule(setting.task, setting.steps),
    )


@functools.lru_cache(maxsize=1)
def sends(setting: Setting, method: str) -> Callable[[int], list[list[Any]]]:
    """What the method sends in so many steps, at any rate."""
    params = jax.eval_shape(task(setting.task).init, jax.random.key(0))
    made = make(method, optax.constant_schedule(1.0), setting)
    return sends_of(made, params, setting.workers)


def execute(run: Run, unfinished: Path, until: float = math.inf) -> Result:
    """Trains; the losses, the collectives up to then, and the time of a step.

    A run that was stopped, at ``until`` or else, goes on from its last checkpoint below
    ``unfinished``.
    """
    began = time.perf_counter()
    setting = run.setting
    compiled = program(setting, run.method)
    due = simulated.evaluation_steps(setting.steps, EVALUATIONS, ROUND)
    text = json.dumps(run.key(), sort_keys=True)
    resume = unfinished / hashlib.sha256(text.encode()).hexdigest()[:16]
    found = simulated.train(
        compiled, run.rate, run.seed, due=due, show=True, resume=resume, until=until
    )
    shutil.rmtree(resume)
    sent = sends(setting, run.method)
    points: list[dict[str, Any]] = []
    for step, loss in zip(found.steps, found.losses, strict=True):
        finite = math.isfinite(loss)
        kept = loss if finite else None
        points.append({"step": step, "loss": kept, "exchanges": sent(step)})
        if not finite:
            break
    return {
        "key": run.key(),
        "points": points,
        "step_seconds": found.step_seconds,
        "run_seconds": time.perf_counter() - began,
        "hardware": hardware(jax.devices()[0]),
    }


def record(
    run: Run, results: Results, console: Console, until: float = math.inf
) -> None:
    """Trains with a bar below the run's name, adds the result, and prints a line."""
    console.print(str(run), highlight=False)
    result = execute(run, results.path.parent / "unfinished", until)
    results.add(result)
    console.print(
        f"{last_loss(result):.3f}  {run}  {result['run_seconds']:.1f} s",
        highlight=False,
    )
