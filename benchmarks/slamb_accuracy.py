"""Accuracy of SGD, LAMB and SLAMB on images, as in the paper's table of CIFAR-10.

Run from the root of the repository: ``python -m benchmarks.slamb_accuracy``. The images
are scikit-learn's digits, which every machine has, in five folds: a run's seed says
which fold is tested on. Each optimizer's rate is the one whose loss is lowest on a
fifth of the first run's training images. Runs that are in the results are not made
again. Half an hour on two cores.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from rich.console import Console
from sklearn.datasets import load_digits
from sklearn.model_selection import StratifiedKFold

import slamb_jax
from benchmarks.frontier.kinds import adamw
from benchmarks.frontier.methods import ADAMW
from benchmarks.frontier.results import Results, lowest, rate_of
from benchmarks.frontier.tasks import DigitNet, digits
from benchmarks.slamb_gap import BATCH, CHAINS, LAMB, WORKERS, Chain
from examples.common.optimizers import dense
from examples.common.options import check_names
from examples.common.simulated import AXIS, Method, Program, State, Task, train
from examples.common.tables import spread, table
from examples.hardware import hardware
from slamb_jax import Exchange

FOLDS, STEPS = 5, 600
RESULTS = Path("benchmarks", "slamb_accuracy.jsonl")
Images = dict[str, np.ndarray]
NET = DigitNet()


COMPARED: dict[str, tuple[float, Chain]] = {  # and the middle of the rates
    "SGD, momentum 0.9": (0.1, lambda rate: dense(optax.sgd(rate, 0.9), AXIS)),
    "AdamW": (0.004, lambda rate: dense(ADAMW(rate), AXIS)),
    **{name: (0.02, CHAINS[name]) for name in (LAMB, "SLAMB", "SLAMB, H 10")},
    **{f"SLAMB, {n} bits": (0.02, CHAINS[f"SLAMB, {n} bits"]) for n in (8, 4)},
    "a tenth, agreeing": (0.02, CHAINS["a tenth, agreeing"]),
    "LAMB with the exchange": (0.02, CHAINS["ternary, agreeing"]),
    "AdamW with the exchange": (0.004, lambda rate: adamw(rate, Exchange(AXIS))),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """The runs to make."""

    only: tuple[str, ...] = tuple(COMPARED)
    steps: int = STEPS
    folds: int = FOLDS
    """how many of the five are tested on"""
    out: Path = RESULTS.parent
    """where slamb_accuracy.jsonl is, or will be: elsewhere all is run anew"""


class Classifier(Program):
    """Evaluates how many per cent of the held-out images are told wrong."""

    def evaluate(self, state: State) -> float:
        images = self.task.held_out
        params = slamb_jax.consolidate(state[0])
        told = jnp.argmax(_logits(params, images["images"]), -1)
        return float(100 * jnp.mean(told != images["labels"]))


@jax.jit
def _logits(params: Any, images: Any) -> Any:
    return NET.apply({"params": params}, images)


@functools.cache
def folds() -> list[tuple[Images, Images]]:
    """What is trained on and what is tested on, five times; and once for the rates."""
    raw = load_digits()
    images = (raw.images[..., None] / 16).astype(np.float32)
    every = {"images": images, "labels": raw.target.astype(np.int32)}

    def split(x: Images) -> Iterator[tuple[Images, Images]]:
        of = StratifiedKFold(FOLDS, shuffle=True, random_state=0)
        for rows in of.split(x["images"], x["labels"]):
            train, held_out = ({k: v[row] for k, v in x.items()} for row in rows)
            yield train, held_out

    found = list(split(every))
    return [*found, next(split(found[0][0]))]


def task(fold: int) -> Task:
    """The frontier's task on the images of a fold."""
    images, held_out = folds()[fold]

    def batches(size: int, steps: int, seed: int) -> Iterator[Images]:
        rng = np.random.default_rng(seed)
        for _ in range(steps):
            rows = rng.choice(len(images["labels"]), size)
            yield {name: x[rows] for name, x in images.items()}

    return dataclasses.replace(digits(), batches=batches, held_out=held_out)


@functools.lru_cache(maxsize=2)
def program(name: str, fold: int, steps: int) -> Program:
    """A method's compiled step on a fold: all but those of the rates tell errors."""
    kind: Callable[..., Program] = Program if fold == FOLDS else Classifier
    method = Method(name, lambda rate, _: COMPARED[name][1](rate))
    return kind(task(fold), method, workers=WORKERS, batch=BATCH, steps=steps)


def end_of(
    name: str, steps: int, results: Results, fold: int, power: int
) -> float:  # the errors in per cent, or the loss
    rate = rate_of(COMPARED[name][0], power)
    key = {"optimizer": name, "steps": steps, "rate": rate, "fold": fold}

    def run() -> float:
        return train(program(name, fold, steps), rate, fold, due=[steps]).losses[-1]

    return results.once(key, run)


def main(config: Config) -> None:
    check_names("--only", config.only, tuple(COMPARED))
    results, rows = Results(config.out / RESULTS.name), []
    for name in config.only:
        end = functools.partial(end_of, name, config.steps, results)
        power = lowest(functools.partial(end, FOLDS), 0)
        right = [100 - end(fold, power) for fold in range(config.folds)]
        rows.append(
            {
                "": name,
                "rate": f"{rate_of(COMPARED[name][0], power):g}",
                "accuracy, %": spread(right, 2),
            }
        )
    caption = (
        f"digits, {config.folds} folds, {WORKERS} workers x {BATCH} images, "
        f"{config.steps} steps; {hardware(jax.devices()[0])}"
    )
    Console(width=100).print(table("Accuracy", rows, caption))


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
