"""The average of parameters: of local steps, in codes, by an outer optimizer."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slamb_jax
from tests.close import assert_close, assert_same_bits, assert_workers_agree
from tests.optimizers import descend, random_tree, standard_promotion
from tests.workers import AXIS, over_workers, stack, stepper

N = 4
SHAPES = {"w": (12, 16), "b": (16,), "stack": (3, 6, 20), "scale": ()}
NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)


def every(steps, payload=None, **settings):
    exchange = slamb_jax.Exchange(AXIS, payload=payload, sync_every=steps, **settings)
    return slamb_jax.average_parameters_every(exchange)


def steps_of(tx, steps, mapping):
    """Parameters and state of all workers after each of some random updates."""
    params = random_tree(SHAPES, 0)
    state, step = stack(tx.init(params), N), stepper(tx, mapping, N)
    params = stack(params, N)
    for t in range(steps):
        u = random_tree(SHAPES, t + 1, N, scale=0.1)
        moved = jax.tree.map(lambda p, u: np.asarray(p) + np.asarray(u), params, u)
        with standard_promotion():
            params, state = step(u, state, params)
        yield moved, params, state


GRIDS = {"bfloat16": 2.0**-8, "uniform8": 1 / 100, "uniform4": 0.2, None: 2.0**-22}


@pytest.mark.parametrize("payload", GRIDS)
@pytest.mark.parametrize("mapping", ["vmap", "shard_map"])
def test_an_outer_rate_of_one_is_the_average_up_to_the_grid(payload, mapping):
    """The anchor has the same bits on all workers, and changes at its steps alone."""
    tx, before = every(2, payload, outer=optax.sgd(1.0)), random_tree(SHAPES, 0)
    for t, (moved, params, state) in enumerate(steps_of(tx, 4, mapping), 1):
        anchor = jax.tree.map(lambda a: np.asarray(a[0]), state.anchor)
        assert_workers_agree(state.anchor)
        if t % 2:
            assert_same_bits((anchor, params), (before, moved))
            continue
        for name, x in moved.items():
            largest = np.abs(x - np.asarray(before[name])).max()
            room = 2 * GRIDS[payload] * largest + 1e-6
            chex.assert_trees_all_close(anchor[name], x.mean(0), atol=room, rtol=0)
        assert_close(params, stack(anchor, N), units=2)
        before = anchor


def test_a_missing_gradient_moves_nothing():
    tx, params = every(1, "uniform8", outer=NESTEROV), random_tree(SHAPES, 0)
    run = over_workers(tx.update, "vmap", 2)
    with standard_promotion():
        u, state = run(*stack((params | {"w": None}, tx.init(params), params), 2))
    assert u["w"] is None
    np.testing.assert_array_equal(state.anchor["w"][0], params["w"])


@pytest.mark.parametrize(
    ("tx", "mapping"),
    [
        (every(2), "shard_map"),
        (every(1, overlap=True), "shard_map"),
        (every(2, "uniform8", outer=NESTEROV), "shard_map"),
        (every(2, "bfloat16", outer=NESTEROV, overlap=True), "shard_map"),
        (every(2, "uniform4", outer=optax.sgd(1.0)), "vmap"),
    ],
)
def test_local_steps_end_at_the_minimum_of_the_mean(tx, mapping):
    """A state that is made on the workers keeps its types."""
    rate = optax.linear_schedule(0.3, 0.0, 200)
    targets = {name: 1.0 + np.arange(N, dtype="f") for name in SHAPES}
    params = descend(
        optax.chain(optax.sgd(rate), tx),
        lambda p, own, t: jax.tree.map(jnp.subtract, p, own),
        random_tree(SHAPES, 0), targets, 200, mapping,
    )  # fmt: skip
    for x in jax.tree.leaves(params):
        np.testing.assert_allclose(x.mean(0), 2.5, atol=0.02)
