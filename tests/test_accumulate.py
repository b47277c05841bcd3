"""Gradient accumulation: the numbers of MultiSteps, without its traffic."""

import functools
import itertools

import jax
import numpy as np
import optax
import pytest

import slamb_jax
from tests.optimizers import random_tree
from tests.workers import AXIS, MAPPINGS, stack, stepper, train

SHAPES = {"w": (12, 16), "b": (16,)}
N, EVERY = 4, 3
SLAMB = slamb_jax.slamb(0.01, slamb_jax.Exchange.paper(AXIS, sync_every=2))


@functools.cache
def with_multi_steps():
    """Parameters after each mini-step."""
    tx, params = optax.MultiSteps(SLAMB, EVERY), random_tree(SHAPES, 0)
    grads = [random_tree(SHAPES, 10 + t, N) for t in range(7)]
    with jax.numpy_dtype_promotion("standard"):  # MultiSteps needs it
        return [p for p, _ in train(tx, params, grads, "vmap")]


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_same_numbers_as_multi_steps(mapping):
    tx, start = slamb_jax.accumulate(SLAMB, EVERY), random_tree(SHAPES, 0)
    grads = [random_tree(SHAPES, 10 + t, N) for t in range(7)]
    got = [p for p, _ in train(tx, start, grads, mapping)]
    close = functools.partial(np.testing.assert_allclose, atol=2e-6)
    jax.tree.map(close, got, with_multi_steps())
    moves = [
        (p["w"] != q["w"]).any() for p, q in itertools.pairwise([stack(start, N), *got])
    ]
    assert moves == [t % EVERY == EVERY - 1 for t in range(7)]


def test_nothing_is_communicated_outside_the_conditional():
    params = random_tree(SHAPES, 0)

    def report(tx):
        step = stepper(tx, "shard_map", N)
        args = stack(params, N), stack(tx.init(params), N), stack(params, N)
        return slamb_jax.wire_report(step.lower(*args))

    accumulated = report(slamb_jax.accumulate(SLAMB, EVERY))
    assert accumulated.collectives
    assert all(c.conditional for c in accumulated.collectives)
    assert accumulated.bytes_sent() == 0
    assert report(SLAMB).bytes_sent() > 0
