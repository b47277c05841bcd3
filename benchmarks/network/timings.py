"""Seconds and bytes of a step of each method on each link, and what is advised."""

import dataclasses
import functools
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import jax
import optax
from rich.console import Console

import slamb_jax
from benchmarks.network.counters import SHARE, Counters
from benchmarks.network.losses import (
    DENSE,
    EXCHANGES,
    HIDDEN,
    SELDOM,
    Result,
    Results,
    Setting,
    exchange_of,
    method_of,
    middle_rate,
    steps_of,
)
from benchmarks.network.namespaces import missing, network
from benchmarks.network.processes import worker_command, workers
from benchmarks.network.worker import WARM, Ask
from benchmarks.train.tasks import task
from examples.common.processes import local_mesh
from examples.common.traffic import traffic_of
from examples.hardware import hardware

STEPS = 40  # that are measured, at least, and two exchanges
TIMED = DENSE, *EXCHANGES
START, PATIENCE = 300, 3600  # seconds for a start, and for a run


@dataclasses.dataclass(frozen=True)
class Link:
    """Every host's link, in each direction."""

    mbit: float
    round_trip: float  # ms, from one host to another and back; 0: nothing is delayed

    def __str__(self) -> str:
        if self == FREE:
            return "no limit"
        return f"{self.mbit:g} Mbit/s, {self.round_trip:g} ms"


FREE = Link(100_000, 0)  # on which a step takes what the hosts themselves take for it


@dataclasses.dataclass(frozen=True)
class Pace:
    """The steps of a method on a link."""

    every: int  # H, the steps from one exchange to the next
    local: float  # seconds of a step that exchanges nothing, or less
    exchange: float  # seconds of a step that exchanges
    sent: float  # bytes that each worker sends in H steps, without headers
    reported: float  # the same by the wire report
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


Wanted = tuple[dict[str, Any], Ask, Link]


def key(kind: str, setting: Setting, method: str, link: Link) -> dict[str, Any]:
    """Of a result: steps, or a training, on a link."""
    at = dataclasses.asdict(setting) | {"method": method} | dataclasses.asdict(link)
    return {"kind": kind, **at}


def ask_steps(setting: Setting, method: str) -> Ask:
    """Steps to know their pace."""
    every, rate = exchange_of(method).sync_every or 1, middle_rate(method, setting)
    steps = max(STEPS, 2 * every)  # whole cycles, of each H that is tried
    longer = dataclasses.replace(setting, steps=max(setting.steps, WARM + steps))
    return Ask(longer, method, rate, seed=0, steps=steps)


def ask_training(setting: Setting, method: str, rate: float) -> Ask:
    """A whole training, and its loss in the end."""
    return Ask(setting, method, rate, seed=0, steps=setting.steps, is_training=True)


def on_links(
    hosts: int,
    wanted: Callable[[], Iterator[Wanted]],
    results: Results,
    console: Console,
) -> None:
    """Has processes make the steps that are wanted, on hosts that exist as long."""
    if next(wanted(), None) is None:
        return
    if lacking := missing():
        raise SystemExit(f"Links need Linux, root and iproute2; missing: {lacking}.")
    with ExitStack() as stack:
        net = stack.enter_context(network(hosts))
        at = f"{net.address(0)}:4711", hosts
        commands = [net.command(i) + worker_command(*at, i) for i in range(hosts)]
        running = stack.enter_context(workers(commands))
        running.reports(START)
        for key, ask, link in wanted():
            what = f"{key['kind']}: {link}, {ask.method}"
            console.print(f"{what}, {ask.steps} steps", highlight=False)
            net.shape(link.mbit, link.round_trip / 1e3)
            reports = running.measure(PATIENCE, json.dumps(dataclasses.asdict(ask)))
            found = result(key, ask, reports)
            found["reported"] = reported(ask.setting, ask.method)
            results.add(found)
            console.print(f"{what}: {statistics.fmean(found['seconds']):.3f} s a step")


@functools.cache
def reported(setting: Setting, method: str) -> float:
    """Bytes of H steps by the wire report of the compiled update."""
    way, exchange = method_of(method, setting), exchange_of(method)
    make = functools.partial(way.make, optax.constant_schedule(1.0))
    params = jax.eval_shape(task(setting.task).init, jax.random.key(0))
    traffic = traffic_of(make, exchange, params, local_mesh(setting.workers))
    return traffic.until(exchange.sync_every or 1)


def result(key: dict[str, Any], ask: Ask, reports: Sequence[dict[str, Any]]) -> Result:
    """A line of the results. Workers wait for each other: seconds are their mean."""
    sent = [Counters(**report["sent"]) for report in reports]
    seconds = zip(*(report["seconds"] for report in reports), strict=True)
    messages = 2 * (len(reports) - 1)  # one after the other, in a ring
    return {
        "key": key,
        "seconds": [round(statistics.fmean(step), 5) for step in seconds],
        "points": [[ask.steps, reports[0]["loss"]]] if ask.is_training else [],
        "sent": statistics.fmean(x.data_bytes for x in sent),
        "message": max(report["barrier"] for report in reports) / messages,
        "compile_seconds": max(report["compile_seconds"] for report in reports),
        "hardware": hardware(jax.devices()[0]),
    }


def pace(setting: Setting, method: str, link: Link, results: Results) -> Pace | None:
    """The pace that was measured; None if it was not."""
    if method == HIDDEN:
        seldom = pace(setting, SELDOM, FREE, results)
        whole = pace(setting, DENSE, link, results)
        if seldom is None or whole is None:
            return None
        longer = max(seldom.local, whole.step - seldom.local)
        return dataclasses.replace(whole, exchange=longer)
    found = results.get(key("steps", setting, method, link))
    if found is None:
        return None
    exchange = exchange_of(method)
    every = exchange.sync_every or 1
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for t, took in enumerate(found["seconds"], WARM + 1):
        seconds[every == 1 or exchange.averages_at(t)].append(took)
    return Pace(
        every,
        statistics.median(seconds[False] or [0.0]),
        statistics.median(seconds[True]),
        found["sent"] / len(seconds[True]),
        found["reported"],
        found["message"],
    )


def advice(
    setting: Setting, method: str, link: Link, results: Results
) -> slamb_jax.advisor.Advice:
    """What the advisor says of this method beside dense AdamW.

    It is given the seconds of both on links that take none, and twice the latency of a
    small message: for a large one Gloo asks the receiver first.
    """
    other, own = (pace(setting, x, FREE, results) for x in (DENSE, method))
    here = pace(setting, method, link, results)
    assert other is not None
    assert own is not None
    assert here is not None
    both = min(other.step, own.step)
    rate = 1e6 * SHARE * link.mbit
    return slamb_jax.advise(
        jax.eval_shape(task(setting.task).init, jax.random.key(0)),
        slamb_jax.Network(setting.workers, rate, latency=2 * here.message),
        exchange_of(method),
        step_seconds=both,
        update_seconds=(other.step - both, own.step - both),
    )


def seconds_of(
    setting: Setting, method: str, link: Link, results: Results
) -> float | None:
    """Seconds of a method to the target on a link; None if that is not known."""
    steps = steps_of(setting, method, results)
    found = pace(setting, method, link, results)
    return found.seconds(steps) if found and steps else None
