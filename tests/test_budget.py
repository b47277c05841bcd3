"""Settings by budget, and the paper's: they send the bytes that they say."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest

import slamb_jax
from slamb_jax.advisor.advice import RECORDED
from slamb_jax.exchange.selections import Strided
from tests.workers import AXIS

PART = {"selection": Strided(0.1), "payload": None}
DUE = [  # at the steps 1 to 7
    ({}, [1, 2, 3, 4, 5, 6, 7]),
    ({"sync_every": 3, "payload": None}, [1, 4, 7]),
    ({"sync_every": 3, "outer": optax.sgd(1.0)}, [3, 6]),
    ({"sync_every": 1, "outer": optax.sgd(1.0)}, [1, 2, 3, 4, 5, 6, 7]),
    ({"sync_every": 3} | PART, [1, 4, 7]),
    ({"sync_every": None} | PART, []),
]


@pytest.mark.parametrize(("settings", "due"), DUE)
def test_the_steps_that_average(settings, due):
    exchange = slamb_jax.Exchange(AXIS, **settings)
    assert [t for t in range(1, 8) if exchange.averages_at(t)] == due
    assert exchange.averages_momentum == (settings == {})


@pytest.mark.parametrize("share", [1.0, 0.07, 0.06, 0.03, 0.01, 0.005])
def test_a_budget_is_kept_and_used(share):
    params = {"w": jax.ShapeDtypeStruct((2048, 2048), jnp.float32)}
    asked = slamb_jax.Exchange(AXIS, overlap=True)
    network, seconds = slamb_jax.Network(8, 1e9), {"step_seconds": 1.0}
    advice = slamb_jax.advise(params, network, asked, budget=share, **seconds)
    exchange, payloads = advice.exchange, [*RECORDED]
    assert exchange.overlap
    assert advice.share == exchange.share(params) <= share
    assert advice == slamb_jax.advise(params, network, exchange, **seconds)
    place = payloads.index(exchange.payload)
    if place > 0:
        more = dataclasses.replace(exchange, payload=payloads[place - 1])
        assert more.share(params) > share


@pytest.mark.parametrize("size", [10_000, 100_000, 10_000_000])
def test_few_bits_spends_no_more_than_the_paper(size):
    params = [jax.ShapeDtypeStruct((size // 100, 100), jnp.float32)]
    share = slamb_jax.Exchange.few_bits("data").share(params)
    assert 0.1 < share < slamb_jax.Exchange.paper("data").share(params) + 0.02
