"""SLAMB beside dense LAMB: which link makes the gap, and whether length closes it.

Run from the root of the repository: ``python -m benchmarks.slamb_gap``. Each variant
has a rate of its own, found on seed 0 by steps of the root of two; then three seeds. k
is 0.1, as in the paper. Runs that are in the results are not made again. A run of 300
steps takes a core a minute.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import tyro
from rich.console import Console

import slamb_jax
from benchmarks.frontier.results import Results, last_loss
from benchmarks.frontier.tasks import schedule, task
from examples.common.optimizers import dense
from examples.common.options import check_names
from examples.common.simulated import AXIS, Method, Program, evaluation_steps, train
from examples.common.tables import table
from examples.hardware import hardware
from slamb_jax import directions

WORKERS, BATCH, MIDDLE = 8, 8, 0.02
LAMB = "LAMB, dense"
RESULTS = Path("benchmarks", "slamb_gap.jsonl")
MOMENTUM = {"b1": 0.9, "b2": 0.999}


@dataclasses.dataclass(frozen=True)
class Variant:
    """The chain of SLAMB, with some of it switched off."""

    b3: float = 0.99
    every: int | None = 50
    share: float = 0.1
    payload: str | None = None
    two_ratios: bool = True
    rescale: bool = True
    own_gradient: bool = True
    """v of the worker's own gradient; else of the momentum that it steps by."""

    def exchange(self) -> slamb_jax.Exchange:
        selection = slamb_jax.selections.Strided(self.share, min_size=1000)
        settings = {"sync_every": self.every, "payload": self.payload}
        return slamb_jax.Exchange.paper(AXIS, selection=selection, **settings)

    def chain(self, rate: Any) -> optax.GradientTransformation:
        exchange = self.exchange()
        direction: Any = directions.adam(1e-6, eps_before_correction=True)
        b2: float | None = MOMENTUM["b2"]
        if not self.own_gradient:
            direction = optax.scale_by_rms(b2, eps=1e-6, bias_correction=True)
            b2 = None
        links = [
            slamb_jax.mask_momentum(exchange, direction, MOMENTUM["b1"], b2),
            slamb_jax.layerwise_trust_ratio(
                exchange, b3=self.b3 if self.two_ratios else 1.0
            ),
        ]
        if self.rescale:
            links.append(slamb_jax.elementwise_rescale(exchange, b3=self.b3))
        links.append(optax.scale_by_learning_rate(rate))
        return optax.chain(*links, slamb_jax.average_parameters_every(exchange))


VARIANTS: dict[str, Variant | None] = {
    LAMB: None,
    "SLAMB": Variant(),
    "SLAMB, b3 0.93": Variant(b3=0.93),
    "SLAMB, b3 0.999": Variant(b3=0.999),
    "SLAMB, H 100": Variant(every=100),
    "SLAMB, H 10": Variant(every=10),
    "SLAMB, H 1": Variant(every=1),
    "SLAMB, all sent": Variant(share=1.0),
    "SLAMB, all sent, H 1": Variant(share=1.0, every=1),
    "SLAMB, one ratio": Variant(two_ratios=False),
    "SLAMB, no rescaling": Variant(rescale=False),
    "SLAMB, no freshness": Variant(two_ratios=False, rescale=False),
    "SLAMB, v of the momentum": Variant(own_gradient=False),
    "SLAMB, 8 bits": Variant(payload="uniform8"),
    "SLAMB, 4 bits": Variant(payload="uniform4"),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """The runs to make."""

    only: tuple[str, ...] = tuple(VARIANTS)
    task: str = "byte_lm"
    """byte_lm_apart has files of their own for each worker"""
    steps: int = 300
    seeds: tuple[int, ...] = (0, 1, 2)
    out: Path = RESULTS.parent
    """where slamb_gap.jsonl is, or will be: elsewhere all is run anew"""


@functools.lru_cache(maxsize=1)
def program(name: str, of_task: str, steps: int) -> Program:
    """The compiled step of a variant, for any rate and seed."""
    variant = VARIANTS[name]

    def make(rate: Any, _: Any) -> optax.GradientTransformation:
        return dense(optax.lamb(rate), AXIS) if variant is None else variant.chain(rate)

    return Program(
        task(of_task), Method(name, make), workers=WORKERS, batch=BATCH, steps=steps,
        schedule=schedule(of_task, steps),
    )  # fmt: skip


def loss(name: str, power: int, seed: int, config: Config, results: Results) -> float:
    """The evaluation loss in the end, of a run that is made if it is not there."""
    rate = float(f"{MIDDLE * 2 ** (power / 2):.3g}")
    key = {
        "variant": name, "task": config.task, "steps": config.steps, "rate": rate,
        "seed": seed,
    }  # fmt: skip
    if (known := results.get(key)) is not None:
        return last_loss(known)
    compiled = program(name, config.task, config.steps)
    due = evaluation_steps(config.steps, 4)
    found = train(compiled, rate, seed, due=due)
    end = float(found.losses[-1])
    results.add({"key": key, "points": [{"loss": end if np.isfinite(end) else None}]})
    Console().print(f"{end:.3f}  {key}", highlight=False)
    return end


def tuned(name: str, config: Config, results: Results) -> int:
    """The power of the root of two, times the middle, that ends lowest on one seed."""
    power = -1
    while True:
        beside = power, power - 1, power + 1
        best = min(
            beside, key=lambda x: loss(name, x, config.seeds[0], config, results)
        )
        if best == power:
            return power
        power = best


def main(config: Config) -> None:
    check_names("--only", config.only, tuple(VARIANTS))
    results, rows, first = Results(config.out / RESULTS.name), [], None
    for name in config.only:
        power = tuned(name, config, results)
        losses = [loss(name, power, seed, config, results) for seed in config.seeds]
        mean = float(np.mean(losses))
        first = mean if first is None else first
        spread = f" ± {np.std(losses, ddof=1):.3f}" if len(losses) > 1 else ""
        rows.append(
            {
                "": name,
                "rate": f"{MIDDLE * 2 ** (power / 2):.3g}",
                "loss": f"{mean:.3f}{spread}",
                "above the first, %": f"{100 * (mean / first - 1):+.1f}",
            }
        )
    caption = (
        f"{config.task}, {WORKERS} workers x {BATCH}, {config.steps} steps, seeds "
        f"{', '.join(map(str, config.seeds))}; {hardware(jax.devices()[0])}"
    )
    Console(width=100).print(table("SLAMB beside LAMB", rows, caption))


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
