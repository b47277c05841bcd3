"""What the wrong uses are made of."""

import functools
import re

import jax.numpy as jnp

import slamb_jax
from tests.optimizers import OF_EXCHANGE, any_lamb

NAN, INF = float("nan"), float("inf")

PARAMS = {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}


def of(make, *args, **settings):
    """A call that makes something with these arguments."""
    return functools.partial(make, *args, **settings)


def bad(make, name, *values, wanted=""):
    """Rows, one for each value of an argument; the error must name both."""
    return [
        (of(make, **{name: value}), f"{name} .*{wanted}.*{re.escape(repr(value))}")
        for value in values
    ]


def make_slamb(**settings):
    rate = settings.pop("learning_rate", 0.01)
    ours = {name: settings.pop(name) for name in OF_EXCHANGE & set(settings)}
    return any_lamb(rate, slamb_jax.Exchange(**ours), **settings)


def slamb(**settings):
    """A call that makes the optimizer, and its exchange, with these settings."""
    return of(make_slamb, **settings)
