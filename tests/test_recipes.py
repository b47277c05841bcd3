"""Settings by name and by budget: they train, and send the bytes that they say."""

import jax
import jax.numpy as jnp
import optax
import pytest

import slamb_jax
from slamb_jax import recipes
from slamb_jax.exchange import budget
from slamb_jax.payloads import StochasticUniform
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


SHAPES = {"w": (300, 320), "b": (320,), "small": (9, 10)}
SHARES = {
    "default": {},
    "period 1": {**budget.settings_of_period(1)},
    "period 4": {**budget.settings_of_period(4), "min_size": 0},
    "bursts": {"compress_ratio": 0, "sync_every": 10, "average_payload": "uniform8"},
    "16 bits": {"payload": "bfloat16", "sync_every": None},
    "mixed": {"average_payload": StochasticUniform(4, mean_bits=8), "sync_every": 3},
}


@pytest.mark.parametrize("name", SHARES)
def test_a_share_is_that_of_the_compiled_program(name):
    exchange = slamb_jax.Exchange(AXIS, **SHARES[name])
    params = random_tree(SHAPES, 0)
    report = report_of(slamb_jax.adamw(0.1, exchange), params, N)
    sent = report.bytes_sent()
    if exchange.sync_every is not None:
        sent += report.bytes_sent(conditional=True) / exchange.sync_every
    dense = 2 * (N - 1) / N * 4 * sum(x.size for x in params.values())
    # Scales are of blocks, which the slices of eight workers cut further.
    assert exchange.share(params) == pytest.approx(sent / dense, rel=0.02)


@pytest.mark.parametrize("share", [1.0, 0.07, 0.06, 0.03, 0.01, 0.005])
def test_a_budget_is_kept_and_used(share):
    params = {"w": jax.ShapeDtypeStruct((2048, 2048), jnp.float32)}
    exchange = slamb_jax.Exchange.for_budget(AXIS, share, params, seed=3)
    assert exchange.seed == 3
    assert exchange.share(params) <= share
    if exchange.sync_every > 1:
        more = budget.settings_of_period(exchange.sync_every // 2)
        assert slamb_jax.Exchange(AXIS, **more).share(params) > share


def test_a_budget_that_is_too_small_says_so():
    params = {"b": jax.ShapeDtypeStruct((2048,), jnp.float32)}
    with pytest.raises(ValueError, match=r"share must be at least 0\.\d+ .*got 0\.01"):
        slamb_jax.Exchange.for_budget(AXIS, 0.01, params)
    for share in (0, 1.5, "5%"):
        with pytest.raises(ValueError, match="share must be"):
            slamb_jax.Exchange.for_budget(AXIS, share, params)
