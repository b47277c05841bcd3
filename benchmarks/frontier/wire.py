"""What the steps of a method send, read off its compiled update."""

import collections
import contextlib
import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from benchmarks.rivals import elements
from examples.common.simulated import AXIS, DEFAULT
from examples.common.traffic import report_of
from slamb_jax import Exchange


@dataclasses.dataclass(frozen=True)
class Made:
    """A method at a rate: an optimizer that exchanges by itself."""

    then: optax.GradientTransformation
    exchange: Exchange = DEFAULT
    """it says when what stands in a conditional is sent, and when replicas are equal"""
    first: optax.GradientTransformation | None = None
    """steps in its place during a warm-up, with the same state"""
    warmup: int = 0

    @property
    def optimizer(self) -> optax.GradientTransformation:
        first, then = self.first, self.then
        if first is None:
            return then

        def update(updates: Any, state: Any, params: Any = None) -> Any:
            count, inner = state
            warm = count < self.warmup
            updates, inner = jax.lax.cond(
                warm, first.update, then.update, updates, inner, params
            )
            return updates, (optax.safe_increment(count), inner)

        return optax.GradientTransformation(
            lambda params: (jnp.int32(0), then.init(params)), update
        )


def use_devices(workers: int) -> None:
    """Makes as many devices as there are workers to count for, unless jax started."""
    with contextlib.suppress(RuntimeError):  # then those that are there have to do
        jax.config.update("jax_num_cpu_devices", workers)


def sends_of(made: Made, params: Any, workers: int) -> Callable[[int], list[list[Any]]]:
    """All collectives of so many steps: [kind, bytes put in, how often].

    With them the average that gives one copy of the parameters where replicas differ.
    """
    found = [(payloads(made.then, params, workers), made.warmup, sys.maxsize)]
    if made.first is not None:
        found.append((payloads(made.first, params, workers), 0, made.warmup))
    averages_at = made.exchange.averages_at

    def until(steps: int) -> list[list[Any]]:
        often: dict[tuple[str, int], int] = collections.Counter()
        for payload, first, last in found:
            here = range(first + 1, min(steps, last) + 1)
            averages = sum(map(bool, map(averages_at, here)))
            for (kind, conditional), nbytes in payload.items():
                often[kind, nbytes] += averages if conditional else len(here)
        if not averages_at(steps):
            often["all-reduce", 4 * elements(params)] += 1
        return [[*send, times] for send, times in often.items() if times]

    return until


def payloads(
    tx: optax.GradientTransformation, params: Any, workers: int
) -> dict[tuple[str, bool], int]:
    """Bytes that a worker puts into collectives, by kind and whether in a branch."""
    devices = np.array(jax.devices("cpu")[:workers])
    if len(devices) < workers:
        raise RuntimeError(f"{workers} workers, and {len(devices)} devices of the CPU")
    report = report_of(tx, DEFAULT, params, Mesh(devices, AXIS))
    found: dict[tuple[str, bool], int] = collections.Counter()
    for x in report.collectives:
        found[x.kind, x.conditional] += x.payload_bytes * (x.times or 0)
    return found
