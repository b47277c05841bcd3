"""SLAMB in float32, 8 and 4 bits beside dense LAMB: bytes and loss on the main job.

Run from the root of the repository: ``python -m benchmarks.few_bits``. Each format has
its own b3 and rate, found on seed 0: the rate at the first b3, then either neighbour of
b3 at the rates around, as long as one is better. Then three seeds. Runs that are in
the results are not made again. An hour and a half on two cores.
"""

import dataclasses
import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import optax
import tyro
from rich.console import Console

import slamb_jax
from benchmarks.frontier.results import Results, last_loss, lowest, rate_of
from benchmarks.frontier.tasks import byte_lm, schedule
from examples.common import processes
from examples.common.optimizers import dense
from examples.common.options import check_names
from examples.common.simulated import AXIS, Method, Program, evaluation_steps, train
from examples.common.tables import spread, table
from examples.common.traffic import traffic_of
from examples.hardware import hardware

WORKERS, BATCH, STEPS, SEEDS = 8, 8, 300, (0, 1, 2)
LAMB = "LAMB, dense"
FORMATS = {"float32": None, "8 bits": "uniform8", "4 bits": "uniform4"}
B3S = (0.9, 0.93, 0.97, 0.99, 0.997, 0.999)
RESULTS = Path("benchmarks", "few_bits.jsonl")
MIDDLE = 0.02  # of the rates, in powers of the root of two
Point = tuple[float, int]  # b3, and the power of the rate


@dataclasses.dataclass(frozen=True)
class Config:
    """The runs to make."""

    only: tuple[str, ...] = (LAMB, *FORMATS)
    out: Path = RESULTS.parent
    """where few_bits.jsonl is, or will be: elsewhere all is run anew"""
    steps: int = STEPS
    seeds: tuple[int, ...] = SEEDS


def exchange_of(name: str) -> slamb_jax.Exchange:
    """The paper's exchange in a format, with a ``min_size`` for a small model."""
    selection = slamb_jax.selections.Strided(0.1, min_size=1000)
    return slamb_jax.Exchange.paper(AXIS, selection=selection, payload=FORMATS[name])


@functools.lru_cache(maxsize=1)
def program(name: str, b3: float, steps: int) -> Program:
    """The compiled step of a format, for any rate and seed."""
    if name == LAMB:
        method = Method(name, lambda rate, _: dense(optax.lamb(rate), AXIS))
    else:
        method = Method(
            name,
            lambda rate, exchange: slamb_jax.slamb(rate, exchange, b3=b3),
            exchange_of(name),
        )
    of_rate = schedule("byte_lm", steps)
    return Program(
        byte_lm(), method, workers=WORKERS, batch=BATCH, steps=steps, schedule=of_rate
    )


def loss(name: str, point: Point, seed: int, config: Config, results: Results) -> float:
    """The evaluation loss in the end, of a run that is made if it is not there."""
    b3, rate = point[0], rate_of(MIDDLE, point[1])
    key = {"format": name, "b3": b3, "rate": rate, "seed": seed, "steps": config.steps}

    def run() -> float:
        due = evaluation_steps(config.steps, 4)
        compiled = program(name, b3, config.steps)
        return train(compiled, rate, seed, due=due, show=True).losses[-1]

    return results.once(key, run)


def tuned(name: str, config: Config, results: Results) -> Point:
    """The b3 and the rate that end lowest on the first seed."""

    def at(point: Point) -> float:
        return loss(name, point, config.seeds[0], config, results)

    def best_of(points: Iterable[Point]) -> Point:
        return min(points, key=at)

    def walk(point: Point) -> Point:  # along the rates
        b3, power = point
        return b3, lowest(lambda x: at((b3, x)), power)

    point = walk((0.99, -1))
    while name != LAMB:
        i = B3S.index(point[0])
        beside = [b3 for b3 in B3S[max(i - 1, 0) : i + 2] if b3 != point[0]]
        best = best_of([point, *((b3, point[1]) for b3 in beside)])
        if best == point:
            break
        point = walk(best)
    return point


def recorded(name: str, results: Results) -> list[float]:
    """The losses of all seeds at the tuned point; none if they are not all there."""
    found: dict[tuple[float, float], list[float]] = {}
    for result in results:
        key = result["key"]
        if key["format"] == name and key["steps"] == STEPS:
            found.setdefault((key["b3"], key["rate"]), []).append(last_loss(result))
    return next((x for x in found.values() if len(x) == len(SEEDS)), [])


def sent(name: str, steps: int) -> float:
    """Bytes that each worker sends in these steps, read off compiled programs."""
    params = jax.eval_shape(byte_lm().init, jax.random.key(0))
    mesh = processes.local_mesh(WORKERS)
    if name == LAMB:
        between = slamb_jax.Exchange(AXIS, payload=None)
        make: Any = lambda _: dense(optax.lamb(1.0), AXIS)  # noqa: E731
    else:
        between = exchange_of(name)
        make = functools.partial(slamb_jax.slamb, 1.0)
    return traffic_of(make, between, params, mesh).until(steps)


def main(config: Config) -> None:
    check_names("--only", config.only, (LAMB, *FORMATS))
    results, console = Results(config.out / RESULTS.name), Console(width=110)
    rows = []
    for name in config.only:
        point = tuned(name, config, results)
        losses = [loss(name, point, seed, config, results) for seed in config.seeds]
        all_bytes, of_dense = sent(name, config.steps), sent(LAMB, config.steps)
        rows.append(
            {
                "": name if name == LAMB else f"SLAMB, {name}",
                "b3": "-" if name == LAMB else f"{point[0]:g}",
                "rate": f"{rate_of(MIDDLE, point[1]):g}",
                "loss": spread(losses),
                "KiB a step": f"{all_bytes / config.steps / 1024:.1f}",
                "of float32": f"{all_bytes / of_dense:.3f}",
            }
        )
    caption = (
        f"{WORKERS} workers x {BATCH} sequences of 64 bytes, {config.steps} steps, "
        f"seeds {', '.join(map(str, config.seeds))}; {hardware(jax.devices()[0])}"
    )
    console.print(table("SLAMB in few bits", rows, caption))


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
