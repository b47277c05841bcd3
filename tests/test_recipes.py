"""Settings by name: they train, send the bytes that they say, and can be overridden."""

import jax
import jax.numpy as jnp
import optax
import pytest

import slamb_jax
from slamb_jax import recipes
from tests.compiled import report_of
from tests.optimizers import random_tree
from tests.workers import AXIS

N = 8
BYTES = {"PAPER": 0.110, "FLOAT32": 0.114, "FEW_BYTES": 0.053, "LARGE_BATCH": 0.057}


def made(name):
    """The recipe's exchange, and its optimizer at a given rate."""
    recipe = getattr(recipes, name)
    exchange = recipe.exchange(AXIS)
    return exchange, lambda rate: slamb_jax.slamb(rate, exchange, **recipe.optimizer)


def test_all_are_here():
    assert {name for name in vars(recipes) if name.isupper()} == set(BYTES)


@pytest.mark.parametrize("name", BYTES)
def test_they_train(name):
    _, slamb = made(name)
    tx = slamb(optax.linear_schedule(0.02, 0.0, 200))
    targets = 2.0 + jnp.arange(8.0)[:, None, None] / 8

    def worker(target):
        def step(carry, _):
            params, state = carry
            updates, state = tx.update(params - target, state, params)
            return (params + updates, state), None

        start = jnp.ones((100, 100))
        return jax.lax.scan(step, (start, tx.init(start)), length=201)[0][0]

    params = jax.jit(jax.vmap(worker, axis_name=AXIS))(targets)
    assert abs(params.mean() - targets.mean()) < 0.3


@pytest.mark.parametrize("name", BYTES)
def test_they_send_what_they_say(name):
    exchange, slamb = made(name)
    report = report_of(slamb(0.1), random_tree({"w": (512, 512)}, 0), N)
    at_average = report.bytes_sent(conditional=True)
    sent = report.bytes_sent() + at_average / exchange.sync_every
    dense = 2 * (N - 1) / N * 4 * 512**2
    assert sent / dense == pytest.approx(BYTES[name], abs=1e-3)


def test_settings_can_be_overridden():
    exchange = recipes.FEW_BYTES.exchange("data", sync_every=50)
    assert exchange.sync_every == 50
    assert exchange.payload == "uniform4"
    assert recipes.FEW_BYTES.exchange("data").sync_every == 12
