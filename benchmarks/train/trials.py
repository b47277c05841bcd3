"""What is run: a trial is a row of a grid, and a run one training of it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import optax

from examples.common.simulated import DEFAULT
from slamb_jax import Exchange

SEEDS = (0, 1, 2)
# The middle of a method's rates is for a small model: larger ones want lower rates, and
# post-norm encoders, which learn nothing above some rate.
LOWER = {
    "byte_lm_23k": 0.5,
    "byte_lm_52k": 0.7,
    "byte_lm_427k": 2,
    "byte_lm_1600k": 4,
    "byte_lm_3m": 8,
    "masked": 8,
    "digits_folds": 2**-0.5,
}


def rate_of(middle: float, power: int) -> float:
    """The rate at a power of the root of two times the middle, to three digits."""
    return float(f"{middle * 2 ** (power / 2):.3g}")


@dataclasses.dataclass(frozen=True)
class Setting:
    """A task and its size."""

    task: str
    workers: int
    batch: int  # sequences or images, per worker and step
    steps: int

    def middle(self, rate: float) -> float:
        """The middle of the search here, for a method whose middle is ``rate``."""
        return rate / LOWER.get(self.task, 1)

    def __str__(self) -> str:
        return f"{self.task}-{self.workers}x{self.batch}-{self.steps}"


@dataclasses.dataclass(frozen=True)
class Method:
    """A chain that exchanges by itself: ``make(rate, exchange)`` makes it."""

    rate: float  # the middle of the search
    make: Callable[[Any, Exchange], optax.GradientTransformation]
    exchange: Exchange = DEFAULT
    """it says when what stands in a conditional is sent, and when replicas are equal"""
    first: Callable[[Any, Exchange], optax.GradientTransformation] | None = None
    """makes what steps in its place during a warm-up, with the same state"""
    warmup: float = 0.0  # the share of the steps


@dataclasses.dataclass(frozen=True)
class Trial:
    """A method in a setting, its rates, its seeds, and what is measured."""

    setting: Setting
    method: str
    rates: tuple[float, ...] = ()
    """all of them are run, with all seeds; none: the best is searched"""
    seeds: tuple[int, ...] = SEEDS
    tuned_on: tuple[int, ...] = SEEDS[:1]
    """the rate is the one that ends lowest on the mean of these"""
    tested_on: tuple[int, ...] = ()
    """seeds that no rate was chosen on"""
    measures: tuple[str, ...] = ("loss",)
    """of loss, accuracy and agreement; bytes are always measured"""

    def __str__(self) -> str:
        return f"{self.setting} {self.method}"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Methods beside dense ones, seed by seed; of several the best counts."""

    name: str
    ours: tuple[str, ...]
    dense: tuple[str, ...]
    settings: tuple[Setting, ...]
    seeds: tuple[int, ...] = SEEDS


@dataclasses.dataclass(frozen=True)
class Grid:
    """Trials that are run and shown together."""

    title: str
    trials: tuple[Trial, ...]
    dense: str = "AdamW"
    """the method that losses and bytes are beside"""
    comparisons: tuple[Comparison, ...] = ()

    @property
    def settings(self) -> tuple[Setting, ...]:
        return tuple(dict.fromkeys(trial.setting for trial in self.trials))


@dataclasses.dataclass(frozen=True)
class Run:
    """One training of a trial: a line of the results, found again by its key."""

    setting: Setting
    method: str
    rate: float
    seed: int

    def __str__(self) -> str:
        return f"{self.setting}  {self.method}  rate {self.rate:g}  seed {self.seed}"

    def key(self) -> dict[str, Any]:
        own = {"method": self.method, "rate": self.rate, "seed": self.seed}
        return dataclasses.asdict(self.setting) | own
