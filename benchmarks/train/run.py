"""One run: a method at a rate in a setting from a seed, all workers simulated."""

import contextlib
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
import numpy as np
import optax
from jax.sharding import Mesh
from rich.console import Console

import slamb_jax
from benchmarks.rivals import elements
from benchmarks.train.grids import METHODS
from benchmarks.train.results import Result, Results, last
from benchmarks.train.tasks import Task, task
from benchmarks.train.trials import Method, Run, Setting
from examples.common import simulated
from examples.common.simulated import AXIS, State
from examples.common.traffic import traffic_of
from examples.hardware import hardware

EVALUATIONS = 8
ROUND = 25  # steps: they are where SparseLoCo has just synchronized
LOOKED_AT = 100  # the step after which momenta are compared


class Program(simulated.Program):
    """A program whose evaluations keep what else is measured."""

    task: Task

    def evaluate(self, state: State) -> float:
        found: dict[str, float] = {}
        if self.task.accuracy is not None:
            params = slamb_jax.consolidate(state[0])
            found["accuracy"] = float(jax.jit(self.task.accuracy)(params))
            with contextlib.suppress(ValueError):  # of another library's momentum
                each = slamb_jax.momentum_agreement(state[1])
                found["agreement"] = float(np.median(list(each.values())))
        self.measured.append(found)
        return super().evaluate(state)

    def compile(self) -> float:
        self.measured: list[dict[str, float]] = []
        seconds = super().compile()
        self.measured.clear()
        return seconds


def optimizer(method: Method, rate: Any, steps: int) -> Any:
    """The method's chain; during its warm-up the other one, with the same state."""
    then = method.make(rate, method.exchange)
    if method.first is None:
        return then
    first, warmup = method.first(rate, method.exchange), round(method.warmup * steps)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        count, inner = state
        updates, inner = jax.lax.cond(
            count < warmup, first.update, then.update, updates, inner, params
        )
        return updates, (optax.safe_increment(count), inner)

    def init(params: Any) -> Any:
        return jax.numpy.int32(0), then.init(params)

    return optax.GradientTransformation(init, update)


def use_devices(workers: int) -> None:
    """Makes as many devices as there are workers to count for, unless jax started."""
    with contextlib.suppress(RuntimeError):  # then those that are there have to do
        jax.config.update("jax_num_cpu_devices", workers)


@functools.lru_cache(maxsize=1)
def program(setting: Setting, name: str, seed: int | None = None) -> Program:
    """A method's compiled step in a setting, for any rate and, if None, any seed."""
    chosen, method = task(setting.task), METHODS[name]
    if chosen.of_seed is not None and seed is not None:
        chosen = chosen.of_seed(seed)
    return Program(
        chosen,
        simulated.Method(
            name,
            lambda rate, _: optimizer(method, rate, setting.steps),
            method.exchange,
        ),
        workers=setting.workers,
        batch=setting.batch,
        steps=setting.steps,
        schedule=chosen.schedule(setting.steps),
    )


@functools.lru_cache(maxsize=1)
def bytes_sent(setting: Setting, name: str) -> Callable[[int], float]:
    """Bytes that each worker has sent in so many steps, read off compiled updates.

    With them the average that gives one copy of the parameters where replicas differ.
    """
    method, workers = METHODS[name], setting.workers
    params = jax.eval_shape(task(setting.task).init, jax.random.key(0))
    devices = np.array(jax.devices("cpu")[:workers])
    if len(devices) < workers:
        raise RuntimeError(f"{workers} workers, and {len(devices)} devices of the CPU")
    then, first = (
        traffic_of(
            functools.partial(make, optax.constant_schedule(1.0)),
            method.exchange, params, Mesh(devices, AXIS),
        )
        for make in (method.make, method.first or method.make)
    )  # fmt: skip
    whole = 2 * (workers - 1) / workers * 4 * elements(params)
    warmup = round(method.warmup * setting.steps)

    def until(step: int) -> float:
        warm = min(step, warmup)
        sent = first.until(warm) + then.until(step) - then.until(warm)
        return sent + (0 if method.exchange.averages_at(step) else whole)

    return until


def execute(run: Run, unfinished: Path, until: float = math.inf) -> Result:
    """Trains; the losses, the bytes up to then, and the time of a step.

    A run that was stopped, at ``until`` or else, goes on from its last checkpoint below
    ``unfinished``.
    """
    began = time.perf_counter()
    setting = run.setting
    of_seed = task(setting.task).of_seed
    compiled = program(setting, run.method, run.seed if of_seed else None)
    due = simulated.evaluation_steps(setting.steps, EVALUATIONS, ROUND)
    if compiled.task.accuracy is not None:
        due = sorted({*due, min(LOOKED_AT, setting.steps)})
    if compiled.compiled:
        compiled.measured.clear()
    text = json.dumps(run.key(), sort_keys=True)
    resume = unfinished / hashlib.sha256(text.encode()).hexdigest()[:16]
    found = simulated.train(
        compiled, run.rate, run.seed, due=due, show=True, resume=resume, until=until
    )
    shutil.rmtree(resume)
    sent = bytes_sent(setting, run.method)
    points: list[dict[str, Any]] = []
    for step, loss in zip(found.steps, found.losses, strict=True):
        kept = loss if math.isfinite(loss) else None
        points.append({"step": step, "loss": kept, "bytes": sent(step)})
        if kept is None:
            break
    # Of evaluations before it was stopped only the loss is known.
    for point, measured in zip(points[::-1], compiled.measured[::-1], strict=False):
        point.update(measured)
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
        f"{last(result):.3f}  {run}  {result['run_seconds']:.1f} s", highlight=False
    )
