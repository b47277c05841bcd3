"""Seconds and bytes of a step of each method on each link, and what is advised."""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

import jax

import slamb_jax
from benchmarks.network import losses
from benchmarks.network.counters import SHARE, Counters
from benchmarks.network.learner import BUCKETS, WARM, Ask
from benchmarks.network.losses import DENSE, EXCHANGES, exchange_of
from benchmarks.train.grids import METHODS
from benchmarks.train.results import Result, Results
from benchmarks.train.tasks import task
from benchmarks.train.trials import Setting
from examples.common.simulated import evaluation_steps
from examples.hardware import hardware

STEPS = 40  # that are measured, at least, and two exchanges
EVALUATIONS = 8
TIMED = DENSE, BUCKETS, *EXCHANGES
HIDDEN = f"{DENSE}, hidden"  # a bound: the exchange hides all compute, or is hidden


@dataclasses.dataclass(frozen=True)
class Link:
    """Every host's link, in each direction."""

    mbit: float
    round_trip: float  # ms, from one host to another and back

    def __str__(self) -> str:
        return f"{self.mbit:g} Mbit/s, {self.round_trip:g} ms"


@dataclasses.dataclass(frozen=True)
class Pace:
    """The steps of a method on a link."""

    every: int  # H, the steps from one exchange to the next
    local: float  # seconds of a step that exchanges nothing
    exchange: float  # seconds of a step that exchanges
    sent: float  # bytes that each worker sends in an exchange, without headers
    message: float  # seconds, of a small all-reduce

    def exchanges(self, steps: float) -> float:
        return steps if self.every == 1 else steps // self.every

    def seconds(self, steps: float) -> float:
        exchanges = self.exchanges(steps)
        return (steps - exchanges) * self.local + exchanges * self.exchange

    @property
    def step(self) -> float:
        """Seconds of a step, the mean from one exchange to the next."""
        return self.seconds(self.every) / self.every


def key(kind: str, setting: Setting, method: str, link: Link | None) -> dict[str, Any]:
    """Of a result: steps on a link, or alone without one, or a training on a link."""
    at = dataclasses.asdict(link) if link else {"mbit": None, "round_trip": None}
    return {"kind": kind, **dataclasses.asdict(setting), "method": method, **at}


def ask_steps(setting: Setting, method: str, link: Link | None) -> Ask:
    """Steps to know their pace; without a link nothing is sent."""
    every = exchange_of(method).sync_every or 1
    rate = setting.middle(METHODS[DENSE if method == BUCKETS else method].rate)
    steps = max(WARM + STEPS, 2 * every)
    longer = dataclasses.replace(setting, steps=max(setting.steps, steps))
    return Ask(longer, method, rate, seed=0, steps=steps, alone=link is None)


def ask_training(setting: Setting, method: str, rate: float) -> Ask:
    """A whole training, with evaluations."""
    due = tuple(evaluation_steps(setting.steps, EVALUATIONS))
    return Ask(setting, method, rate, seed=0, steps=setting.steps, due=due)


def result(key: dict[str, Any], ask: Ask, reports: Sequence[dict[str, Any]]) -> Result:
    """A line of the results. Workers wait for each other: seconds are their mean."""
    sent = [Counters(**report["sent"]) for report in reports]
    seconds = zip(*(report["seconds"] for report in reports), strict=True)
    return {
        "key": key,
        "seconds": [round(statistics.fmean(step), 5) for step in seconds],
        "points": list(zip(ask.due, reports[0]["losses"], strict=True)),
        "sent": statistics.fmean(x.data_bytes for x in sent),
        "dropped": sum(x.dropped for x in sent),
        "message": max(report["barrier"] for report in reports)
        / (2 * (len(reports) - 1)),
        "compile_seconds": max(report["compile_seconds"] for report in reports),
        "hardware": hardware(jax.devices()[0]),
    }


def pace(
    setting: Setting, method: str, link: Link | None, results: Results
) -> Pace | None:
    """The pace that was measured; None if it was not."""
    if method == HIDDEN:
        both = [pace(setting, DENSE, x, results) for x in (None, link)]
        if None in both:
            return None
        alone, whole = (x for x in both if x)
        longer = max(alone.step, whole.step - alone.step)
        return dataclasses.replace(whole, exchange=longer)
    found = results.get(key("steps", setting, method, link))
    if found is None:
        return None
    every = exchange_of(method).sync_every or 1
    steps = dict(enumerate(found["seconds"], WARM + 1))
    exchanging = [x for t, x in steps.items() if t % every == 0]
    local = [x for t, x in steps.items() if t % every]
    return Pace(
        every,
        statistics.median(local) if local else 0.0,
        statistics.median(exchanging),
        found["sent"] / len(exchanging),
        found["message"],
    )


def advised(
    setting: Setting, method: str, link: Link, results: Results
) -> tuple[float, float]:
    """Seconds of a dense step in bfloat16 and of this method's, by the advisor.

    It is given the seconds of both with nothing sent, and twice the latency of a small
    message: for a large one Gloo asks the receiver first.
    """
    dense, own = (pace(setting, x, None, results) for x in (DENSE, method))
    here = pace(setting, method, link, results)
    assert dense is not None
    assert own is not None
    assert here is not None
    both = min(dense.step, own.step)
    rate = 1e6 * SHARE * link.mbit
    advice = slamb_jax.advise(
        jax.eval_shape(task(setting.task).init, jax.random.key(0)),
        slamb_jax.Network(setting.workers, rate, latency=2 * here.message),
        exchange_of(method),
        step_seconds=both,
        update_seconds=(dense.step - both, own.step - both),
    )
    return advice.dense_bfloat16.step_seconds, advice.exchanging.step_seconds


def seconds_of(
    setting: Setting, method: str, link: Link, results: Results
) -> float | None:
    """Seconds of a method to the target on a link; None if that is not known."""
    steps = losses.steps_of(setting, method, results)
    found = pace(setting, method, link, results)
    return found.seconds(steps) if found and steps else None
