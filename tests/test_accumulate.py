"""Gradient accumulation: the numbers of MultiSteps, without its traffic."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slamb_jax
from tests.workers import AXIS, MAPPINGS, over_workers, random_tree, stack, stepper

SHAPES = {"w": (12, 16), "b": (16,)}
N = 4


def slamb():
    return slamb_jax.slamb(0.01, axis_name=AXIS, min_size=10, sync_every=2, b3=0.9)


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_same_numbers_as_multi_steps(mapping):
    every = 3
    ours = slamb_jax.accumulate(slamb(), every)
    theirs = optax.MultiSteps(slamb(), every)
    params = random_tree(SHAPES, 0)
    a, b = stack(params, N), stack(params, N)
    step = stepper(ours, mapping, N)

    def their_step(g, s, p):
        u, s = theirs.update(g, s, p)
        return optax.apply_updates(p, u), s

    state, their_state = stack(ours.init(params), N), stack(theirs.init(params), N)
    # MultiSteps' own cond does not type-check with check_vma.
    checked = mapping if mapping != "shard_map" else "shard_map_unchecked"
    with jax.numpy_dtype_promotion("standard"):
        multi = over_workers(their_step, checked, N)
        for t in range(7):
            g = random_tree(SHAPES, 10 + t, N)
            before = a
            a, state = step(g, state, a)
            b, their_state = multi(g, their_state, b)
            jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=2e-6), a, b)
            moved = bool(jnp.any(a["w"] != before["w"]))
            assert moved == (t % every == every - 1)


def test_nothing_travels_outside_the_conditional():
    params = random_tree(SHAPES, 0)

    def report(tx):
        step = stepper(tx, "shard_map", N)
        args = stack(params, N), stack(tx.init(params), N), stack(params, N)
        return slamb_jax.wire_report(step.lower(*args))

    accumulated = report(slamb_jax.accumulate(slamb(), 4))
    assert accumulated.collectives
    assert all(c.conditional for c in accumulated.collectives)
    assert accumulated.bytes_sent() == 0
    assert report(slamb()).bytes_sent() > 0


def test_every_one_is_the_optimizer_itself():
    params, g = random_tree(SHAPES, 0), random_tree(SHAPES, 1)
    plain = slamb_jax.slamb(0.01)
    tx = slamb_jax.accumulate(plain, 1)
    got, _ = tx.update(g, tx.init(params), params)
    want, _ = plain.update(g, plain.init(params), params)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), got, want)
