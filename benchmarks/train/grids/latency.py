"""Exchanges that wait less for messages, and what they cost in loss.

A step late an exchange can run behind the next step's compute; dense AdamW on gradients
of the last step, the grid ``latency``, says what that costs by itself. By way of all,
each worker sends its codes to all others: one message in place of two, of n / 2 times
the bytes, and the mean is not rounded again. ``benchmarks.network.time_to_loss`` trains
with both, and has the seconds.
"""

from typing import Any

import optax

from benchmarks.train.methods import ADAM, ADAMW, LARGEST, adamw, dense
from benchmarks.train.trials import Grid, Method, Setting, Trial
from examples.common.simulated import AXIS
from slamb_jax import Exchange


def exchanging(rate: float, **how: Any) -> Method:
    return Method(rate, lambda x, y: adamw(x, y, **ADAM), Exchange(AXIS, **how))


def late_adamw(rate: Any, **how: Any) -> optax.GradientTransformation:
    """Of the gradients of the last step."""
    tx = ADAMW(rate, **how)

    def update(grads: Any, state: Any, params: Any = None) -> Any:
        last, inner = state
        updates, inner = tx.update(last, inner, params)
        return updates, (grads, inner)

    return optax.GradientTransformation(
        lambda params: (optax.tree.zeros_like(params), tx.init(params)), update
    )


FAR = Setting("byte_lm_427k", 4, 4, 300)  # that of benchmarks.network.time_to_loss
METHODS = {
    "AdamW, a step late": dense(late_adamw, 0.016, **ADAM),
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
            Trial(FAR, name, (0.00141, 0.002), (0,))
            for name in ("AdamW, a step late", "adamw, overlap")
        ),
        dense="AdamW, a step late",
    )
}
