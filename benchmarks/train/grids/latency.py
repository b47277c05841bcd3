"""Exchanges that wait less for messages, and what they cost in loss.

A step late an exchange can run behind the next step's compute. By way of all, each
worker sends its codes to all others: one message in place of two, of n / 2 times the
bytes, and the mean is not rounded again. ``benchmarks.network.time_to_loss`` has the
seconds.
"""

from typing import Any

from benchmarks.train.grids.frontier import APART, NOISY
from benchmarks.train.methods import ADAM, LARGEST, adamw
from benchmarks.train.trials import Grid, Method, Trial
from examples.common.simulated import AXIS
from slamb_jax import Exchange


def exchanging(rate: float, **how: Any) -> Method:
    return Method(rate, lambda x, y: adamw(x, y, **ADAM), Exchange(AXIS, **how))


METHODS = {
    "adamw, overlap": exchanging(0.008, overlap=True),
    "adamw, to all": exchanging(0.008, route="all"),
    "adamw, largest of 7, to all": exchanging(
        LARGEST[7], payload="largest_of_7", route="all"
    ),
}
GRIDS = {
    "latency": Grid(
        "Fewer messages",
        tuple(
            Trial(setting, name)
            for setting in (NOISY, APART)
            for name in ("adamw, H 1", *METHODS)
        ),
        dense="adamw, H 1",
    )
}
