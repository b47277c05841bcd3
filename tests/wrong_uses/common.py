"""What the wrong uses are made of."""

import functools

import jax
import jax.numpy as jnp

import slamb_jax

NAN, INF = float("nan"), float("inf")

PARAMS = {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}


def of(make, *args, **settings):
    """A call that makes something with these arguments."""
    return functools.partial(make, *args, **settings)


def slamb(**settings):
    return of(slamb_jax.slamb, **({"learning_rate": 0.01} | settings))


def updating(make, grads=PARAMS, params=PARAMS, like=PARAMS):
    """A call that updates once, jitted as in a training loop."""

    def call():
        tx = make() if callable(make) else make
        jax.jit(tx.update)(grads, tx.init(like), params)

    return call


def initial(make, params):
    return lambda: make().init(params)
