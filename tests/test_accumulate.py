"""Gradient accumulation: the numbers of MultiSteps, without its traffic."""

import functools
import itertools

import chex
import jax
import optax
import pytest

import slamb_jax
from tests.optimizers import random_tree
from tests.workers import AXIS, MAPPINGS, mesh_of, stack, stepper, train

SHAPES = {"w": (12, 16), "b": (16,)}
N, EVERY = 4, 3
SLAMB = slamb_jax.slamb(0.01, slamb_jax.Exchange.paper(AXIS, sync_every=2))
ACCUMULATED, START = slamb_jax.accumulate(SLAMB, EVERY), random_tree(SHAPES, 0)


def after_each(tx, mapping):
    """Parameters after each mini-step."""
    grads = [random_tree(SHAPES, 10 + t, N) for t in range(7)]
    return [params for params, _ in train(tx, START, grads, mapping)]


@functools.cache
def with_multi_steps():
    with jax.numpy_dtype_promotion("standard"):  # MultiSteps needs it
        return after_each(optax.MultiSteps(SLAMB, EVERY), "vmap")


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_same_numbers_as_multi_steps(mapping):
    got = after_each(ACCUMULATED, mapping)
    chex.assert_trees_all_close(got, with_multi_steps(), rtol=1e-7, atol=2e-6)
    pairs = itertools.pairwise([stack(START, N), *got])
    moves = [(p["w"] != q["w"]).any() for p, q in pairs]
    assert moves == [t % EVERY == EVERY - 1 for t in range(7)]


def multi_steps(tx):
    return optax.MultiSteps(tx, EVERY).gradient_transformation()


WRAPPED = {
    "around": (multi_steps(SLAMB), True),
    "in a chain": (optax.chain(optax.clip(1.0), multi_steps(SLAMB)), True),
    "ours": (ACCUMULATED, False),
    "without an exchange": (multi_steps(optax.adam(0.1)), False),
}


@pytest.mark.parametrize(("tx", "warns"), WRAPPED.values(), ids=WRAPPED)
def test_multi_steps_around_an_exchange_is_told(tx, warns):
    """Once, by what sees the state first; warnings are errors in the tests."""
    mesh, exchange = mesh_of(N), slamb_jax.Exchange(AXIS)
    one, of_all = tx.init(START), stack(START, N)
    ways = [
        lambda: slamb_jax.replicate((START, one), mesh, exchange),
        lambda: slamb_jax.on_workers(tx, mesh, exchange).init(of_all),
    ]
    for way in ways:
        if not warns:
            way()
            continue
        with pytest.warns(UserWarning, match="MultiSteps .*jax.accumulate") as caught:
            way()
        assert [x.filename for x in caught] == [__file__]


def test_nothing_is_communicated_outside_the_conditional():
    def report(tx):
        args = stack((START, tx.init(START), START), N)
        return slamb_jax.wire_report(stepper(tx, "shard_map", N).lower(*args))

    accumulated = report(ACCUMULATED)
    assert accumulated.collectives
    assert all(c.conditional for c in accumulated.collectives)
    assert accumulated.bytes_sent() == 0
    assert report(SLAMB).bytes_sent() > 0
