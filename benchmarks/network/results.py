"""What the workers' reports come to, beside what the advisor predicts."""

import dataclasses
import functools
import operator
import statistics
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

import slamb_jax
from benchmarks.network.counters import SHARE, Counters
from benchmarks.network.training import init
from benchmarks.network.worker import ALONE
from benchmarks.rivals.exchange import elements, mean_sends

ADVISED = {
    "LAMB, float32": "lamb",
    "LAMB, bfloat16": "lamb_bfloat16",
    "SLAMB": "slamb",
    "SLAMB, overlap": "slamb",
}  # the optimizers, and what an Advice calls them
Round = Sequence[dict[str, Any]]  # one report of each worker


@dataclasses.dataclass(frozen=True)
class Row:
    """One optimizer at one speed of the links. Bytes are a worker's, per step."""

    mbit: float | None  # None: not shaped
    optimizer: str
    step_seconds: float  # median over the cycles of the mean step of a cycle
    alone_seconds: float  # the same step with nothing sent
    wire_bytes: float  # the wire report's, averages of parameters included
    data_bytes: float  # the interface's, without headers
    header_share: float
    dropped: int  # packets
    loss: float  # nats per byte, at the end
    advised_bytes: float
    predicted_seconds: float | None  # None where nothing limits the link
    latency: float  # seconds a message, of a small all-reduce in this run

    @property
    def link_seconds(self) -> float:
        """What its data would take on the link if there were no headers."""
        return 8 * self.wire_bytes / (self.mbit * 1e6) if self.mbit else 0.0


def rows(
    mbit: float | None,
    rounds: Sequence[Round],
    wires: dict[str, Any],
    *,
    compress_ratio: float,
    sync_every: int,
) -> list[Row]:
    """The optimizers that send, measured at one speed."""
    workers = len(rounds[0])
    seen_by = 1 if mbit else workers  # all share one loopback interface
    messages = 2 * (workers - 1)  # one behind the other, in a ring
    latency = statistics.median(map(max, _by_step(rounds, "barriers"))) / messages
    network = slamb_jax.Network(workers, 1e6 * SHARE * (mbit or 1), latency=latency)
    params = jax.eval_shape(lambda: init(0))
    found = []
    for name, field in ADVISED.items():
        wire, alone = wires[name], step_seconds(rounds, name + ALONE)
        sent, steps = counted(rounds, name)
        advice = slamb_jax.advise(
            params,
            network,
            step_seconds=alone,  # the optimizer's own time is in it
            optimizer_seconds=(0.0, 0.0),
            compress_ratio=compress_ratio,
            sync_every=sync_every,
            overlap=name.endswith("overlap"),
        )
        cost = getattr(advice, field)
        predicted = cost.step_seconds
        if name == "LAMB, bfloat16":
            # The advisor's is one 16-bit all-reduce, which XLA does not have on CPU.
            sends = mean_sends(elements(params), workers, jnp.bfloat16)
            predicted = alone + sum(network.seconds(*send) for send in sends)
        found.append(
            Row(
                mbit=mbit,
                optimizer=name,
                step_seconds=step_seconds(rounds, name),
                alone_seconds=alone,
                wire_bytes=wire["every_step"] + wire["at_average"] / sync_every,
                data_bytes=sent.data_bytes / steps / workers / seen_by,
                header_share=sent.header_share,
                dropped=sent.dropped,
                loss=statistics.mean(w["blocks"][name]["loss"] for w in rounds[-1]),
                advised_bytes=cost.bytes_per_step,
                predicted_seconds=predicted if mbit else None,
                latency=latency,
            )
        )
    return found


def step_seconds(rounds: Sequence[Round], name: str) -> float:
    """Median over the rounds of their mean step; a step ends with the last worker."""
    means = [
        statistics.mean(map(max, zip(*seconds, strict=True)))
        for seconds in (
            [worker["blocks"][name]["seconds"] for worker in one] for one in rounds
        )
    ]
    return statistics.median(means)


def counted(rounds: Sequence[Round], name: str) -> tuple[Counters, int]:
    """What all workers sent in all rounds, and in how many steps."""
    blocks = [worker["blocks"][name] for one in rounds for worker in one]
    sent = functools.reduce(operator.add, (Counters(**b["sent"]) for b in blocks))
    return sent, sum(len(one[0]["blocks"][name]["seconds"]) for one in rounds)


def _by_step(rounds: Sequence[Round], key: str) -> list[tuple[float, ...]]:
    """The workers' seconds side by side, for every step of every round."""
    return [
        step
        for one in rounds
        for step in zip(*(worker[key] for worker in one), strict=True)
    ]
