"""Settings by budget, and the paper's: they send the bytes that they say, and train."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest

import slamb_jax
from slamb_jax._ex.budget import FORMATS
from slamb_jax.payloads import StochasticUniform
from tests.compiled import report_of
from tests.optimizers import plain, random_tree
from tests.workers import AXIS

N = 8
EXCHANGES = {
    "default": slamb_jax.Exchange(AXIS),
    "paper": slamb_jax.Exchange.paper(AXIS),
}


@pytest.mark.parametrize("make", [slamb_jax.slamb, slamb_jax.adamw])
@pytest.mark.parametrize("name", EXCHANGES)
def test_they_train(name, make):
    tx = make(optax.linear_schedule(0.04, 0.0, 200), EXCHANGES[name])
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


@pytest.mark.parametrize(("name", "share"), [("default", 0.0516), ("paper", 0.11)])
def test_they_send_what_they_say(name, share):
    params = {"w": jax.ShapeDtypeStruct((4096, 4096), jnp.float32)}
    assert EXCHANGES[name].share(params) == pytest.approx(share, abs=5e-4)


def test_settings_override_those_of_the_paper():
    exchange = slamb_jax.Exchange.paper(AXIS, sync_every=50)
    assert (exchange.sync_every, exchange.compress_ratio) == (50, 0.1)
    assert not exchange.in_turn


@pytest.mark.parametrize("every", [1, 3, None])
@pytest.mark.parametrize("outer", [None, optax.sgd(1.0)])
@pytest.mark.parametrize("rolling", [None, False])
def test_the_steps_that_average(every, outer, rolling):
    if every is None and outer is not None:
        return
    exchange = slamb_jax.Exchange(sync_every=every, outer=outer, rolling=rolling)
    due = [bool(exchange.averages_at(t)) for t in range(1, 8)]
    if every is None:
        assert not any(due)
    elif exchange.in_turn:
        assert all(due)
    elif outer is None:
        assert due == [(t - 1) % every == 0 for t in range(1, 8)]
    else:
        assert due == [t % every == 0 for t in range(1, 8)]


@pytest.mark.parametrize(
    ("settings", "momentum", "anchor", "in_turn"),
    [
        ({}, False, False, False),
        ({"overlap": True}, False, True, False),
        ({"sync_every": 2}, False, True, True),
        ({"sync_every": 2, "outer": optax.sgd(1.0)}, False, True, False),
        ({"average_payload": None}, False, False, False),
        ({"sync_every": None, "compress_ratio": 0.1}, True, False, False),
        ({"selection": slamb_jax.selections.Strided(0.1)}, True, False, False),
    ],
)
def test_what_follows_from_the_settings(settings, momentum, anchor, in_turn):
    exchange = slamb_jax.Exchange(AXIS, **settings)
    assert exchange.exchanges_momentum == momentum
    assert exchange.keeps_anchor == anchor
    assert exchange.in_turn == in_turn


SHAPES = {"w": (900, 1280), "b": (320,), "small": (9, 10)}
SHARES = {
    "paper": {},
    "period 1": {"sync_every": 1},
    "period 4": {"sync_every": 4, "min_size": 0},
    "period 1, few": {"average_payload": "largest_of_31"},
    "bursts": {"compress_ratio": 0, "sync_every": 10, "average_payload": "uniform8"},
    "16 bits": {"payload": "bfloat16", "sync_every": None},
    "4 bits": {"average_payload": StochasticUniform(4), "sync_every": 3},
}


@pytest.mark.parametrize("name", SHARES)
def test_a_share_is_that_of_the_compiled_program(name):
    make = slamb_jax.Exchange if name.startswith("period") else plain
    exchange = make(AXIS, **SHARES[name])
    params = random_tree(SHAPES, 0)
    report = report_of(slamb_jax.adamw(0.1, exchange), params, N)
    sent = report.bytes_sent()
    if exchange.sync_every is not None:
        sent += report.bytes_sent(conditional=True) / exchange.sync_every
    dense = 2 * (N - 1) / N * 4 * sum(x.size for x in params.values())
    # A worker's slice is of whole blocks.
    assert exchange.share(params) == pytest.approx(sent / dense, rel=0.02)


@pytest.mark.parametrize("share", [1.0, 0.07, 0.06, 0.03, 0.01, 0.005])
def test_a_budget_is_kept_and_used(share):
    params = {"w": jax.ShapeDtypeStruct((2048, 2048), jnp.float32)}
    exchange = slamb_jax.Exchange.for_budget(AXIS, share, params, seed=3)
    assert exchange.seed == 3
    assert exchange.share(params) <= share
    place = FORMATS.index(exchange.average_payload)
    if place > 0:
        more = dataclasses.replace(exchange, average_payload=FORMATS[place - 1])
        assert more.share(params) > share


def test_a_budget_that_is_too_small_says_so():
    params = {"b": jax.ShapeDtypeStruct((2048,), jnp.float32)}
    with pytest.raises(ValueError, match=r"share must be at least 0\.\d+ .*got 0\.001"):
        slamb_jax.Exchange.for_budget(AXIS, 0.001, params)
    for share in (0, 1.5, "5%"):
        with pytest.raises(ValueError, match="share must be"):
            slamb_jax.Exchange.for_budget(AXIS, share, params)
