"""Gradient accumulation: the numbers of MultiSteps, without its traffic."""

import functools
import itertools

import chex
import jax
import optax
import pytest

import slamb_jax
from tests.optimizers import random_tree
from tests.workers import AXIS, MAPPINGS, stack, stepper, train

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


def test_nothing_is_communicated_outside_the_conditional():
    def report(tx):
        args = stack((START, tx.init(START), START), N)
        return slamb_jax.wire_report(stepper(tx, "shard_map", N).lower(*args))

    accumulated = report(ACCUMULATED)
    assert accumulated.collectives
    assert all(c.conditional for c in accumulated.collectives)
    assert accumulated.bytes_sent() == 0
    assert report(SLAMB).bytes_sent() > 0
