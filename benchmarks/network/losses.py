"""Loss against steps, which no link changes: the runs, and the steps to a loss.

The workers are simulated, as in ``benchmarks.train``, with the same sweep of rates
and the same seeds. The target is the last loss of dense training. Every method, dense
too, has schedules from half to four times as long, up to the one after the first that
reaches it; the one that takes the fewest steps counts.
"""

import dataclasses
import math
import statistics
from collections.abc import Iterator
from typing import Any

import optax

from benchmarks.train import run as training
from benchmarks.train import trials
from benchmarks.train.grids import METHODS as TRAINED
from benchmarks.train.results import Result, Results, last
from benchmarks.train.run import ROUND
from benchmarks.train.search import best_rate, finished, missing
from benchmarks.train.trials import SEEDS, Run, Setting, Trial
from examples.common.simulated import DEFAULT, Method
from slamb_jax import Exchange

DENSE = "AdamW, bfloat16"
EXCHANGES = (  # the methods that are not dense
    "DiLoCo, H 10, outer 0.7 0.5",
    "DiLoCo, H 30, outer 0.7 0.5",
    "DiLoCo, H 100, outer 0.7 0.5",
    "adamw, H 1",
    "adamw, to all",
    "adamw, largest of 7",
    "adamw, largest of 7, to all",
    "adamw, largest of 31",
    "adamw, outer, H 10, outer 1 0.5",
    "adamw, outer, H 30, outer 1 0.5",
)
METHODS = DENSE, *EXCHANGES
HIDDEN = f"{DENSE}, hidden"  # a bound: the exchange hides all compute, or is hidden
SELDOM = "DiLoCo, H 100, outer 0.7 0.5"  # whose steps in between are AdamW's alone
TRAINED_AS = {HIDDEN: DENSE}  # losses of others
TO_THE_END = DENSE, "adamw, H 1", "adamw, to all", "adamw, outer, H 10, outer 1 0.5"
LENGTHS = 1 / 2, 3 / 4, 1, 3 / 2, 2, 3, 4  # of the dense run
Curve = list[tuple[int, float]]  # steps, and the loss after them


def exchange_of(method: str) -> Exchange:
    """The exchange to advise on."""
    return TRAINED[method].exchange if method in EXCHANGES else DEFAULT


def trained(method: str) -> trials.Method:
    """Itself, or what has its losses."""
    return TRAINED[TRAINED_AS.get(method, method)]


def method_of(name: str, setting: Setting) -> Method:
    """A method of benchmarks.train, or in another exchange."""

    def make(rate: Any, exchange: Exchange) -> optax.GradientTransformation:
        method = dataclasses.replace(trained(name), exchange=exchange)
        return training.optimizer(method, rate, setting.steps)

    return Method(name, make, exchange_of(name))


def middle_rate(method: str, setting: Setting) -> float:
    """A rate at which the method trains, to time its steps."""
    return setting.middle(trained(method).rate)


def absent(setting: Setting, results: Results) -> Iterator[Run]:
    """The runs that are missing."""
    for method in METHODS:
        yield from missing(Trial(setting, method), results)
    for method in METHODS:
        for runs in lengths(setting, method, results):
            yield from (run for run in runs if results.get(run.key()) is None)


def target(setting: Setting, results: Results) -> float:
    """The mean over seeds of the last loss of dense training."""
    runs = finished(Trial(setting, DENSE), results)
    return statistics.fmean(map(last, runs))


def lengths(setting: Setting, method: str, results: Results) -> Iterator[list[Run]]:
    """The runs at each length, up to the one after the first that reaches the target.

    All seeds of a length are run where the first of them reaches it.
    """
    rate, loss = best_rate(Trial(setting, method), results), target(setting, results)
    assert rate is not None
    reached = False
    for length in LENGTHS:
        steps = round(length * setting.steps / ROUND) * ROUND
        longer = dataclasses.replace(setting, steps=steps)
        runs = [Run(longer, method, rate, seed) for seed in SEEDS]
        was_reached, one = reached, runs[:1]
        yield one
        if reaches(one, loss, results):
            yield runs
            reached = reaches(runs, loss, results)
        if was_reached:
            return


def reaches(runs: list[Run], loss: float, results: Results) -> bool:
    found = [results.get(run.key()) for run in runs]
    return steps_to(curve([x for x in found if x is not None]), loss) is not None


def best(setting: Setting, method: str, results: Results) -> list[Result]:
    """The runs that take the fewest steps to the target, or else the longest."""
    loss = target(setting, results)

    def steps(runs: list[Result]) -> float:
        return steps_to(curve(runs), loss) or math.inf

    tried = [
        [found for run in runs if (found := results.get(run.key())) is not None]
        for runs in lengths(setting, method, results)
    ]
    complete = [runs for runs in tried if len(runs) == len(SEEDS)]
    fewest = min(complete, key=steps, default=tried[-1])
    return fewest if steps(fewest) < math.inf else tried[-1]


def curve(runs: list[Result]) -> Curve:
    """The mean over the runs, up to where one diverges."""
    found: Curve = []
    for points in zip(*(run["points"] for run in runs), strict=False):
        losses = [point["loss"] for point in points]
        if None in losses:
            break
        found.append((points[0]["step"], statistics.fmean(losses)))
    return found


def steps_to(found: Curve, loss: float) -> float | None:
    """Steps until the loss, on straight lines between evaluations; None if never."""
    last: tuple[int, float] | None = None
    for step, here in found:
        if here <= loss:
            if last is None:
                return step
            return step - (step - last[0]) * (loss - here) / (last[1] - here)
        last = step, here
    return None


def steps_of(setting: Setting, method: str, results: Results) -> float | None:
    """Steps of a method to the target; None if it is not reached."""
    found = curve(best(setting, TRAINED_AS.get(method, method), results))
    return steps_to(found, target(setting, results))
