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
    RING,
    TRAINED_AS,
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
from benchmarks.network.worker import WARM, Ask, Job
from benchmarks.train.tasks import task
from examples.common.processes import local_mesh
from examples.common.traffic import traffic_of
from examples.hardware import hardware

STEPS = 40  # that are measured, at least, and two exchanges
TIMED = DENSE, RING, *EXCHANGES
START, PATIENCE = 300, 3600  # seconds for a start, and for a run


@dataclasses.dataclass(frozen=True)
class Link:
    """Every host's link, in each direction."""

    mbit: float
    round_trip: float  # ms, from one host to another and back; 0: nothing is delayed

    def __str__(self) -> str:
        late = f", {self.round_trip:g} ms" if self.round_trip else ""
        return f"{self.mbit:g} Mbit/s{late}"


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


Wanted = tuple[dict[str, Any], Ask, Link | None]


def key(kind: str, setting: Setting, method: str, link: Link | None) -> dict[str, Any]:
    """Of a result: steps on a link, or alone without one, or a training on a link."""
    at = dataclasses.asdict(link) if link else {"mbit": None, "round_trip": None}
    return {"kind": kind, **dataclasses.asdict(setting), "method": method, **at}


def ask_steps(setting: Setting, method: str, link: Link | None) -> Ask:
    """Steps to know their pace; without a link nothing is sent."""
    every, rate = exchange_of(method).sync_every or 1, middle_rate(method, setting)
    steps = WARM + max(STEPS, 2 * every)  # whole cycles, of each H that is tried
    longer = dataclasses.replace(setting, steps=max(setting.steps, steps))
    return Ask(longer, method, rate, seed=0, steps=steps, alone=link is None)


def ask_training(setting: Setting, method: str, rate: float) -> Ask:
    """A whole training, and its loss in the end."""
    steps = setting.steps
    return Ask(setting, method, rate, seed=0, steps=steps, due=(steps,))


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
        job = dataclasses.asdict(Job(hosts, f"{net.address(0)}:4711", "eth0"))
        commands = [net.command(i) + worker_command(job, i) for i in range(hosts)]
        running = stack.enter_context(workers(commands))
        running.reports(START)
        for key, ask, link in wanted():
            what = f"{key['kind']}: {link or 'nothing sent'}, {ask.method}"
            console.print(f"{what}, {ask.steps} steps", highlight=False)
            if link is not None:
                net.shape(link.mbit, link.round_trip / 1e3)
            reports = running.measure(PATIENCE, json.dumps(dataclasses.asdict(ask)))
            found = result(key, ask, reports)
            if not ask.alone:
                found["reported"] = reported(ask.setting, ask.method)
            results.add(found)
            step = statistics.fmean(found["seconds"])
            compiled = f"compiled in {found['compile_seconds']:.0f} s"
            console.print(f"{what}: {step:.3f} s a step; {compiled}", highlight=False)


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
        "points": list(zip(ask.due, reports[0]["losses"], strict=True)),
        "sent": statistics.fmean(x.data_bytes for x in sent),
        "header_share": statistics.fmean(x.header_share for x in sent),
        "dropped": sum(x.dropped for x in sent),
        "message": max(report["barrier"] for report in reports) / messages,
        "compile_seconds": max(report["compile_seconds"] for report in reports),
        "hardware": hardware(jax.devices()[0]),
    }


def pace(
    setting: Setting, method: str, link: Link | None, results: Results
) -> Pace | None:
    """The pace that was measured; None if it was not."""
    if method == HIDDEN:
        alone, whole = (pace(setting, DENSE, x, results) for x in (None, link))
        if alone is None or whole is None:
            return None
        longer = max(alone.step, whole.step - alone.step)
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
        found.get("reported", 0.0),
        found["message"],
    )


def advice(
    setting: Setting, method: str, link: Link, results: Results
) -> slamb_jax.advisor.Advice:
    """What the advisor says of this method beside dense AdamW.

    It is given the seconds of both with nothing sent, and twice the latency of a small
    message: for a large one Gloo asks the receiver first.
    """
    same = TRAINED_AS.get(method, method)  # but for what is sent
    other, own = (pace(setting, x, None, results) for x in (DENSE, same))
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
