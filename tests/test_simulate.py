"""Simulated workers do what workers on a mesh do."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slamb_jax
from tests.close import assert_near
from tests.optimizers import random_tree
from tests.workers import AXIS, mesh_of

N = 8
SHAPES = {"in": (6, 40), "b": (40,), "out": (40, 3), "scale": ()}
PAPER = slamb_jax.Exchange.paper(AXIS, sync_every=3)


def loss_of(params, batch):
    h = jnp.tanh(batch["x"] @ params["in"] + params["b"][None])
    return jnp.mean((params["scale"] * (h @ params["out"]) - batch["y"]) ** 2)


def trainer(tx, chunk=None):
    """A step whose gradient closes over the worker's own batch."""

    def step(state, batch):
        params, opt_state = state
        both = jax.value_and_grad(lambda p: loss_of(p, batch))
        both = slamb_jax.in_chunks(both, chunk) if chunk else both
        value, grads = both(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    return step


def batches(n, steps=5):
    rng = np.random.default_rng(0)
    for _ in range(steps):
        x = rng.normal(size=(4 * n, 6)).astype(np.float32)
        yield {"x": x, "y": np.sin(x[:, :3])}


def begun(tx, n):
    params = random_tree(SHAPES, 0)
    return slamb_jax.simulated_replicas((params, tx.init(params)), n)


def simulate(tx, n, chunk=None):
    state = begun(tx, n)
    run = slamb_jax.simulated_step(trainer(tx, chunk), n, PAPER)
    for batch in batches(n):
        state, losses = run(state, batch)
    return state, losses


LONG = pytest.param("bfloat16", 3, 2e-3, marks=pytest.mark.long)


# A last bit of a 16-bit momentum may be rounded either way.
@pytest.mark.parametrize(("mu_dtype", "chunk", "near"), [(None, None, 2e-6), LONG])
def test_five_steps_equal_those_on_a_mesh(mu_dtype, chunk, near):
    tx, mesh = slamb_jax.slamb(0.02, PAPER, mu_dtype=mu_dtype), mesh_of(N)
    params = random_tree(SHAPES, 0)
    state = slamb_jax.replicate((params, tx.init(params)), mesh, PAPER)
    run = slamb_jax.per_worker_step(trainer(tx, chunk), mesh, PAPER)
    for batch in batches(N):
        state, losses = run(state, batch)
    assert_near(simulate(tx, N, chunk), (state, losses), near)


def test_chunks_need_less_memory():
    n, tx = 64, optax.sgd(0.1)
    rows = np.zeros((n * 500, 6), np.float32)

    def temporary(chunk):
        run = slamb_jax.simulated_step(trainer(tx, chunk), n, PAPER)
        lowered = run.lower(begun(tx, n), {"x": rows, "y": rows[:, :3]})
        return lowered.compile().memory_analysis().temp_size_in_bytes

    assert temporary(4) < 0.5 * temporary(None)


def test_the_average_is_computed_only_when_due():
    """Its predicate is a count; if that were batched it would be a select."""

    def conditionals(sync_every):
        between = slamb_jax.Exchange.paper(AXIS, sync_every=sync_every)
        tx = slamb_jax.slamb(0.02, between)
        run = slamb_jax.simulated_step(trainer(tx), N, between)
        (batch,) = batches(N, 1)
        return run.lower(begun(tx, N), batch).as_text().count("stablehlo.case")

    assert conditionals(3) == conditionals(None) + 1


def test_counts_may_start_apart_or_come_apart():
    def step(state, batch):
        index = jax.lax.axis_index(AXIS)
        last = jnp.where(batch[0] > 0, index, state["last"])
        new = {"steps": state["steps"] + 1, "last": last, "own": state["own"] + 2}
        return new, jax.lax.cond(
            state["steps"] > 1, lambda: batch[0], lambda: -batch[0]
        )

    state = {
        "steps": jnp.zeros(3, jnp.int32),
        "last": jnp.full(3, -1),
        "own": jnp.arange(3),
    }
    run = slamb_jax.simulated_step(step, 3, PAPER)
    for _ in range(3):
        state, report = run(state, jnp.array([1.0, 0.0, 2.0]))
    np.testing.assert_array_equal(state["steps"], [3, 3, 3])
    np.testing.assert_array_equal(state["last"], [0, -1, 2])
    np.testing.assert_array_equal(state["own"], [6, 7, 8])
    np.testing.assert_array_equal(report, [1, 0, 2])
    # A state that is not what the last call returned is looked at again.
    state, report = run(state | {"steps": jnp.array([0, 5, 0])}, report)
    np.testing.assert_array_equal(state["steps"], [1, 6, 1])
    np.testing.assert_array_equal(report, [-1, 0, -2])


def test_each_worker_has_the_key_it_would_have_on_a_mesh():
    def step(state, batch, key):
        return state, jax.random.normal(key, batch.shape)

    x, key, mesh = jnp.zeros(2 * N), jax.random.key(3), mesh_of(N)
    state = {"w": jnp.ones(2), "key": jax.random.key(0), "n": 2.5}
    want = slamb_jax.per_worker_step(step, mesh, PAPER)(
        slamb_jax.replicate(state, mesh, PAPER), x, key
    )
    got = slamb_jax.simulated_step(step, N, PAPER)(
        slamb_jax.simulated_replicas(state, N), x, key
    )
    assert got[1].shape == (N, 2)
    np.testing.assert_array_equal(got[1], want[1])
    assert jax.tree.map(jnp.shape, got) == jax.tree.map(jnp.shape, want)
    assert got[0]["n"].dtype == want[0]["n"].dtype


def test_a_scalar_beside_the_batch_goes_to_all_workers():
    def step(state, batch):
        return state, {"x": batch["rate"] * batch["x"].mean(), "step": batch["step"]}

    mesh, one = mesh_of(N), jnp.zeros(())
    batch = {"x": jnp.arange(2.0 * N), "rate": jnp.float32(0.5), "step": 7}
    real = slamb_jax.per_worker_step(step, mesh, PAPER)
    simulated = slamb_jax.simulated_step(step, N, PAPER)
    for _, report in (
        real(slamb_jax.replicate(one, mesh, PAPER), batch),
        simulated(slamb_jax.simulated_replicas(one, N), batch),
    ):
        assert report["x"].tolist() == [0.25 + i for i in range(N)]
        assert report["step"].tolist() == [7] * N
