"""What the wrong uses are made of."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

import slamb_jax

NAN, INF = float("nan"), float("inf")

PARAMS = {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}

_OF_EXCHANGE = {field.name for field in dataclasses.fields(slamb_jax.Exchange)}


def of(make, *args, **settings):
    """A call that makes something with these arguments."""
    return functools.partial(make, *args, **settings)


def slamb(**settings):
    """A call that makes the optimizer, and its exchange, with these settings."""
    settings = {"learning_rate": 0.01} | settings
    ours = {name: settings.pop(name) for name in _OF_EXCHANGE & set(settings)}
    return lambda: slamb_jax.slamb(exchange=slamb_jax.Exchange(**ours), **settings)


def with_exchange(make, *args, exchange=None, **settings):
    """A call that makes a link, of an exchange with these settings."""
    return lambda: make(slamb_jax.Exchange(**(exchange or {})), *args, **settings)


def updating(make, grads=PARAMS, params=PARAMS, like=PARAMS):
    """A call that traces an update, as in a training loop."""

    def call():
        tx = make() if callable(make) else make
        jax.eval_shape(tx.update, grads, tx.init(like), params)

    return call


def initial(make, params):
    return lambda: make().init(params)
