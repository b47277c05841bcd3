"""Rows of a table from the workers' reports, beside the advisor's predictions."""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

import jax

import slamb_jax
from benchmarks.network.counters import SHARE, Counters
from benchmarks.network.model import init
from benchmarks.rivals import elements

ADVISED = {
    "LAMB, float32": "dense",
    "LAMB, bfloat16": "dense_bfloat16",
    "SLAMB": "exchanging",
    "SLAMB, overlap": "exchanging",
}  # the optimizers, and their names in an Advice
Round = Sequence[dict[str, Any]]  # one report of each worker


@dataclasses.dataclass(frozen=True)
class Step:
    """One optimizer at one speed of the links: its step, measured and advised."""

    mbit: float | None  # None: not shaped
    optimizer: str
    step_seconds: float  # median over the cycles of the mean step of a cycle
    alone_seconds: float  # the same step with nothing sent
    predicted_seconds: float | None  # None where nothing limits the link


@dataclasses.dataclass(frozen=True)
class Row(Step):
    """With its bytes, a worker's, per step."""

    wire_bytes: float  # the wire report's, averages of parameters included
    data_bytes: float  # the interface's, without headers
    header_share: float
    dropped: int  # packets
    advised_bytes: float
    latency: float  # seconds a message, of a small all-reduce in this run

    @property
    def link_seconds(self) -> float:
        """Seconds of its data on the link if there were no headers."""
        return 8 * self.wire_bytes / (self.mbit * 1e6) if self.mbit else 0.0


def rows(
    mbit: float | None,
    rounds: Sequence[Round],
    wires: dict[str, Any],
    exchange: slamb_jax.Exchange,
) -> list[Row]:
    """The optimizers, measured at one speed."""
    workers = len(rounds[0])
    messages = 2 * (workers - 1)  # one after the other, in a ring
    barriers = [max(step) for one in rounds for step in _by_step(one, "barriers")]
    latency = statistics.median(barriers) / messages
    network = slamb_jax.Network(workers, 1e6 * SHARE * (mbit or 1), latency=latency)
    params = jax.eval_shape(init, jax.random.key(0))
    found = []
    for name, field in ADVISED.items():
        wire, alone = wires[name], step_seconds(rounds, f"{name}, alone")
        reports = [worker["blocks"][name] for one in rounds for worker in one]
        counted = [Counters(**report["sent"]) for report in reports]
        sent = Counters(*map(sum, zip(*counted, strict=True)))
        steps = sum(len(report["seconds"]) for report in reports)
        advice = slamb_jax.advise(
            params,
            network,
            dataclasses.replace(exchange, overlap=name.endswith("overlap")),
            step_seconds=alone,  # the optimizer's own time is in it
        )
        cost = getattr(advice, field)
        predicted = cost.step_seconds
        if name == "LAMB, bfloat16":
            # The advisor's is one 16-bit all-reduce, which XLA does not have on CPU.
            part = 2 * -(-elements(params) // workers)
            sends = [("all-to-all", workers * part), ("all-gather", part)]
            predicted = alone + sum(network.seconds(*send) for send in sends)
        every = exchange.sync_every or 1
        found.append(
            Row(
                mbit=mbit,
                optimizer=name,
                step_seconds=step_seconds(rounds, name),
                alone_seconds=alone,
                wire_bytes=wire["every_step"] + wire["at_average"] / every,
                # All workers share, and count, one loopback interface.
                data_bytes=sent.data_bytes / steps / (1 if mbit else workers),
                header_share=sent.header_share,
                dropped=sent.dropped,
                advised_bytes=cost.bytes_per_step,
                predicted_seconds=predicted if mbit else None,
                latency=latency,
            )
        )
    return found


def step_seconds(rounds: Sequence[Round], name: str) -> float:
    """Median over the rounds of their mean step; a step ends with the last worker."""
    blocks = [[worker["blocks"][name] for worker in one] for one in rounds]
    return statistics.median(
        statistics.mean(map(max, _by_step(block, "seconds"))) for block in blocks
    )


def _by_step(reports: Round, key: str) -> list[tuple[float, ...]]:
    """The workers' seconds side by side, for every step."""
    return list(zip(*(report[key] for report in reports), strict=True))
