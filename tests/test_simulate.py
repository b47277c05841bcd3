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
from tests.workers import AXIS, mesh_of

N = 8
SHAPES = {"in": (6, 40), "b": (40,), "out": (40, 3), "scale": ()}
PAPER = slamb_jax.Exchange.paper(AXIS, sync_every=3)


def both_ways(step, state, exchange=PAPER):
    """The step and its state of N workers: simulated, and on a mesh."""
    mesh = mesh_of(N)
    simulated = slamb_jax.simulated_step(step, N, exchange)
    yield simulated, slamb_jax.simulated_replicas(state, N)
    real = slamb_jax.per_worker_step(step, mesh, exchange)
    yield real, slamb_jax.replicate(state, mesh, exchange)


def loss_of(params, batch):
    h = jnp.tanh(batch["x"] @ params["in"] + params["b"][None])
    return jnp.mean((params["scale"] * (h @ params["out"]) - batch["y"]) ** 2)


def trainer(tx):
    return train_step(tx, loss_of)


def one_by_one(tx):
    """The step whose gradients are computed one worker after the other."""
    return train_step(tx, loss_of, jax.custom_batching.sequential_vmap)


def batches(steps=5):
    rng = np.random.default_rng(0)
    for _ in range(steps):
        x = rng.normal(size=(4 * N, 6)).astype(np.float32)
        yield {"x": x, "y": np.sin(x[:, :3])}


def begun(tx):
    params = random_tree(SHAPES, 0)
    return params, tx.init(params)


def test_gradients_one_by_one_are_those_on_a_mesh():
    tx, ends = slamb_jax.slamb(0.02, PAPER), []
    for run, state in both_ways(one_by_one(tx), begun(tx)):
        for batch in batches():
            state, losses = run(state, batch)
        ends.append((state, losses))
    chex.assert_trees_all_close(*ends, rtol=2e-6, atol=2e-6)


def test_gradients_one_by_one_need_less_memory():
    n, tx = 64, optax.sgd(0.1)
    rows = np.zeros((n * 500, 6), np.float32)

    def temporary(step):
        run = slamb_jax.simulated_step(step(tx), n, PAPER)
        state = slamb_jax.simulated_replicas(begun(tx), n)
        lowered = run.lower(state, {"x": rows, "y": rows[:, :3]})
        return lowered.compile().memory_analysis().temp_size_in_bytes

    assert temporary(one_by_one) < 0.5 * temporary(trainer)


def test_the_average_is_computed_only_when_due():
    """Its predicate is a count; if that were batched it would be a select."""

    def conditionals(sync_every):
        between = slamb_jax.Exchange.paper(AXIS, sync_every=sync_every)
        tx = slamb_jax.slamb(0.02, between)
        run, state = next(both_ways(trainer(tx), begun(tx), between))
        return run.lower(state, next(batches())).as_text().count("stablehlo.case")

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
