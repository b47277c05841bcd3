"""What it costs in loss to exchange a step late, behind the next step's compute.

``benchmarks.network.time_to_loss`` says what it saves in seconds.
"""

from benchmarks.train.grids.frontier import APART, NOISY
from benchmarks.train.methods import ADAM, adamw
from benchmarks.train.trials import Grid, Method, Trial
from examples.common.simulated import AXIS
from slamb_jax import Exchange

LATE = "adamw, overlap"
METHODS = {
    LATE: Method(
        0.008,
        lambda rate, exchange: adamw(rate, exchange, **ADAM),
        Exchange(AXIS, overlap=True),
    )
}
GRIDS = {
    "overlap": Grid(
        "A step late",
        tuple(
            Trial(setting, name)
            for setting in (NOISY, APART)
            for name in ("adamw, H 1", LATE)
        ),
        dense="adamw, H 1",
    )
}
