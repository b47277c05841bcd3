"""Simulated workers: what the campaign, which compares their steps, does not draw."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import slamb_jax
from tests.close import assert_same_bits
from tests.optimizers import random_tree, train_step
from tests.workers import AXIS, mesh_of, on_mesh

N = 8
PAPER = slamb_jax.Exchange.paper(AXIS, sync_every=3)
START = random_tree({"in": (6, 40), "b": (40,), "out": (40, 3)}, 0)
ONE_BY_ONE = jax.custom_batching.sequential_vmap


def both_ways(step, state, exchange=PAPER):
    """The step and its state of N workers: simulated, and on a mesh."""
    simulated = slamb_jax.simulated_step(step, N, exchange)
    yield simulated, slamb_jax.simulated_replicas(state, N)
    yield on_mesh(step, state, mesh_of(N), exchange)


def loss_of(params, batch):
    h = jnp.tanh(batch @ params["in"] + params["b"][None])
    return jnp.mean((h @ params["out"]) ** 2)


def batch_of(t, rows=4 * N):
    return random_tree({"x": (6,)}, t, rows)["x"]


def test_gradients_one_by_one_are_those_on_a_mesh():
    tx, ends = slamb_jax.slamb(0.02, PAPER), []
    step = train_step(tx, loss_of, ONE_BY_ONE)
    for run, state in both_ways(step, (START, tx.init(START))):
        for t in range(5):
            state, losses = run(state, batch_of(t))
        ends.append((state, losses))
    chex.assert_trees_all_close(*ends, rtol=2e-6, atol=2e-6)


def test_gradients_one_by_one_need_less_memory():
    n, tx = 64, optax.sgd(0.1)

    def temporary(*within):
        run = slamb_jax.simulated_step(train_step(tx, loss_of, *within), n, PAPER)
        state = slamb_jax.simulated_replicas((START, tx.init(START)), n)
        lowered = run.lower(state, batch_of(0, 500 * n))
        return lowered.compile().memory_analysis().temp_size_in_bytes

    assert temporary(ONE_BY_ONE) < 0.5 * temporary()


def test_the_average_is_computed_only_when_due():
    """Its predicate is a count; if that were batched it would be a select."""

    def conditionals(sync_every):
        between = slamb_jax.Exchange.paper(AXIS, sync_every=sync_every)
        tx = slamb_jax.slamb(0.02, between)
        state = START, tx.init(START)
        run, state = next(both_ways(train_step(tx, loss_of), state, between))
        return run.lower(state, batch_of(0)).as_text().count("stablehlo.case")

    assert conditionals(3) == conditionals(1) + 1


def test_counts_may_start_apart_or_come_apart():
    def step(state, batch):
        index, steps = jax.lax.axis_index(AXIS), state["steps"]
        last = jnp.where(batch[0] > 0, index, state["last"])
        new = {"steps": steps + 1, "last": last, "own": state["own"] + 2}
        return new, jax.lax.cond(steps > 1, lambda: batch[0], lambda: -batch[0])

    steps, last = jnp.zeros(3, jnp.int32), jnp.full(3, -1)
    state = {"steps": steps, "last": last, "own": jnp.arange(3)}
    run = slamb_jax.simulated_step(step, 3, PAPER)
    for _ in range(3):
        state, report = run(state, jnp.array([1.0, 0.0, 2.0]))
    got = jax.tree.map(lambda x: x.tolist(), state | {"report": report})
    want = {"steps": [3, 3, 3], "last": [0, -1, 2], "own": [6, 7, 8]}
    assert got == want | {"report": [1, 0, 2]}
    # A state that is not what the last call returned is looked at again.
    state, report = run(state | {"steps": jnp.array([0, 5, 0])}, report)
    assert state["steps"].tolist() == [1, 6, 1]
    assert report.tolist() == [-1, 0, -2]


@pytest.mark.usefixtures("standard_promotion")
def test_each_worker_draws_by_the_keys_it_would_have_on_a_mesh():
    """By the step's, one of the state and that of nnx; words are no key, and equal."""
    graph, modules = nnx.split(nnx.Dropout(0.5, rngs=nnx.Rngs(3)))

    def step(state, batch, key):
        layer = nnx.merge(graph, state["modules"])
        own, equal = state["key"], jax.random.wrap_key_data(state["words"])
        masks = [jax.random.bernoulli(k, 0.5, (64,)) for k in (key, own, equal)]
        new = {"key": jax.random.split(own)[0], "modules": nnx.state(layer)}
        return state | new, jnp.stack([layer(batch) == 0, *masks])

    words, ends = jax.random.key_data(jax.random.key(1)), []
    state = {"key": jax.random.key(0), "modules": modules, "words": words, "n": 2.5}
    for run, replicas in both_ways(step, state):
        for t in range(2):
            replicas, masks = run(replicas, jnp.ones(64 * N), jax.random.key(t))
            distinct = [len(np.unique(masks[:, i], axis=0)) for i in range(4)]
            assert distinct == [N, N, N, 1]
        ends.append((replicas, masks))
    assert_same_bits(*ends)


def test_a_scalar_beside_the_batch_goes_to_all_workers():
    def step(state, batch):
        return state, {"x": batch["rate"] * batch["x"].mean(), "step": batch["step"]}

    batch = {"x": jnp.arange(2.0 * N), "rate": jnp.float32(0.5), "step": 7}
    for run, state in both_ways(step, jnp.zeros(())):
        _, report = run(state, batch)
        assert report["x"].tolist() == [0.25 + i for i in range(N)]
        assert report["step"].tolist() == [7] * N
