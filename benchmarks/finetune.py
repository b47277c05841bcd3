"""After training: does a model that was trained with an exchange fine-tune worse?

Run from the root of the repository: ``python -m benchmarks.finetune``. A byte-level
decoder learns Python's source, a network five of the ten digits, with each method; then
dense AdamW goes on with the headers of C, or with the other digits, at the best of six
rates. Where a method ends at a higher loss, dense AdamW with fewer steps stands beside
it, so that models of about equal loss are compared.
"""

import dataclasses
import functools
import statistics
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import optax
import tyro
from rich.console import Console

import slamb_jax
from benchmarks.frontier.grid import Setting
from benchmarks.frontier.methods import ADAMW, make
from benchmarks.frontier.tasks import byte_lm, digits
from benchmarks.frontier.unseen import CONTEXT, EVALUATED
from examples.byte_lm import data, model
from examples.common import simulated
from examples.common.options import check_names
from examples.common.simulated import Task
from examples.common.tables import spread, table
from examples.hardware import hardware

RATES = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032)
DUE = (10, 100)  # steps after which the new loss is taken


def headers() -> Task:
    """The next byte of the headers of Python's C interface."""
    files = sorted(Path(sysconfig.get_path("include")).rglob("*.h"))
    net = model.ByteLM(layers=2, width=64, heads=4, context=CONTEXT)
    return model.task(net, *data.load(files, CONTEXT), EVALUATED)


@dataclasses.dataclass(frozen=True)
class Pair:
    """A task to learn first, a task to learn then, and the methods for the first."""

    first: Callable[[], Task]
    then: Callable[[], Task]
    setting: Setting
    methods: tuple[tuple[str, float, int], ...]  # of the frontier, rate, steps


PAIRS = {
    "text": Pair(
        byte_lm,
        headers,
        Setting("byte_lm", 8, 8, 300),
        (
            ("AdamW, b1 0.8", 0.016, 300),
            ("adamw, b1 0.8, H 1", 0.008, 300),
            ("adamw, largest of 7", 0.0113, 300),
            ("AdamW, b1 0.8", 0.016, 125),
            ("DiLoCo, H 30, outer 0.7 0.5", 0.008, 300),
        ),
    ),
    "digits": Pair(
        functools.partial(digits, range(5)),
        functools.partial(digits, range(5, 10)),
        Setting("digits", 4, 32, 400),
        (
            ("AdamW", 0.0226, 400),
            ("AdamW, v of m", 0.004, 400),
            ("adamw, H 1", 0.004, 400),
        ),
    ),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """The runs to make."""

    pairs: tuple[str, ...] = tuple(PAIRS)
    seeds: int = 3
    steps: int | None = None  # fewer of all, to try it


def learning(task: Task, method: str, setting: Setting) -> simulated.Program:
    """A method of the frontier on a task."""
    return simulated.Program(
        task,
        simulated.Method(method, lambda rate, _: make(method, rate, setting).optimizer),
        workers=setting.workers,
        batch=setting.batch,
        steps=setting.steps,
    )


def trained(program: simulated.Program, rate: float, seed: int) -> optax.Params:
    """The parameters in the end, one copy."""
    state = program.start(rate, seed)
    for batch in program.batches(seed):
        state, _ = jax.block_until_ready(program.step(state, batch))
    return slamb_jax.consolidate(state[0])


def tuned(
    program: simulated.Program, params: Any, rate: float, seed: int
) -> list[float]:
    """The losses of the second task before the first step, and at those of ``DUE``."""
    _, *rest = program.start(rate, seed)
    state = (slamb_jax.simulated_replicas(params, program.workers), *rest)
    losses = [program.evaluate(state)]
    for t, batch in enumerate(program.batches(seed), 1):
        state, _ = jax.block_until_ready(program.step(state, batch))
        if t in DUE or t == program.steps:
            losses.append(program.evaluate(state))
    return losses


def rows(pair: Pair, config: Config) -> Iterator[dict[str, str]]:
    """A row for each method."""
    first, then = pair.first(), pair.then()
    dense = simulated.Method("AdamW", lambda rate, _: ADAMW(rate))
    steps = config.steps or DUE[-1]
    after = simulated.Program(then, dense, workers=1, batch=64, steps=steps)
    for name, rate, length in pair.methods:
        setting = dataclasses.replace(pair.setting, steps=config.steps or length)
        before = learning(first, name, setting)
        own: list[float] = []
        found: dict[float, list[list[float]]] = {again: [] for again in RATES}
        for seed in range(config.seeds):
            params = trained(before, rate, seed)
            own.append(float(jax.jit(first.loss)(params, first.held_out)))
            for again in RATES:
                found[again].append(tuned(after, params, again, seed))
        best = min(RATES, key=lambda r: statistics.fmean(x[-1] for x in found[r]))
        starts, *later = zip(*found[best], strict=True)
        yield {
            "first trained with": f"{name}, {length} steps",
            "its loss": spread(own),
            "new loss": spread(starts),
            **{
                f"after {step} steps": spread(losses)
                for step, losses in zip(DUE, later, strict=False)
            },
            "rate": f"{best:g}",
        }


def main(config: Config) -> None:
    check_names("--pairs", config.pairs, PAIRS)
    console = Console(width=140)
    for name in config.pairs:
        caption = f"{config.seeds} seeds; {hardware(jax.devices()[0])}"
        console.print(table(name, list(rows(PAIRS[name], config)), caption))


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
