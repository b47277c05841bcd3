"""Exchanges that wait less for messages, and what they cost in loss.

A step late an exchange can run behind the next step's compute; dense AdamW on gradients
of the last step, the grid ``latency``, says what that costs by itself. By way of all,
each worker sends its codes to all others: one message in place of two, of n / 2 times
the bytes, and the mean is not rounded again. ``benchmarks.network.time_to_loss`` trains
with both, and has the seconds.
"""

import dataclasses
from typing import Any

import optax

from benchmarks.train import methods
from benchmarks.train.methods import ADAM, ADAMW, dense
from benchmarks.train.trials import Grid, Method, Setting, Trial


def exchanging(name: str, **settings: Any) -> Method:
    """The method of that name, with these settings of its exchange."""
    method = methods.METHODS[name]
    exchange = dataclasses.replace(method.exchange, **settings)
    return dataclasses.replace(method, exchange=exchange)


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
    "adamw, overlap": exchanging("adamw, H 1", overlap=True),
    "adamw, to all": exchanging("adamw, H 1", route="all"),
    "adamw, largest of 7, to all": exchanging("adamw, largest of 7", route="all"),
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
