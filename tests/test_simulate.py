"""Simulated workers do what workers on a mesh do."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slamb_jax
from tests.workers import AXIS, mesh_of, random_tree

N = 8
SHAPES = {"in": (6, 40), "b": (40,), "out": (40, 3), "scale": ()}


def trainer(tx, chunk=None):
    """A step of one worker, the step count of whose optimizer is its state's."""

    def step(state, batch):
        params, opt_state = state

        def loss(params):  # closes over the worker's own batch
            h = jnp.tanh(batch["x"] @ params["in"] + params["b"][None])
            return jnp.mean((params["scale"] * (h @ params["out"]) - batch["y"]) ** 2)

        both = jax.value_and_grad(loss)
        value, grads = (slamb_jax.in_chunks(both, chunk) if chunk else both)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    return step


def batches(n, steps=5):
    rng = np.random.default_rng(0)
    for _ in range(steps):
        x = rng.normal(size=(4 * n, 6)).astype(np.float32)
        yield {"x": x, "y": np.sin(x[:, :3])}


def small_slamb(**settings):
    return slamb_jax.slamb(
        0.02, axis_name=AXIS, min_size=50, sync_every=3, b3=0.8, **settings
    )


def simulate(tx, n, chunk=None):
    params = random_tree(SHAPES, 0)
    state = slamb_jax.simulated_replicas((params, tx.init(params)), n)
    run = slamb_jax.simulated_step(trainer(tx, chunk), n, AXIS)
    for batch in batches(n):
        state, losses = run(state, batch)
    return state, losses


def assert_close(got, want, tolerance):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(
            a.astype(np.float32), b.astype(np.float32), rtol=tolerance, atol=tolerance
        ),
        got,
        want,
    )


@pytest.mark.parametrize(
    ("settings", "chunk"),
    [({}, None), ({"form": "product"}, 3), ({"mu_dtype": jnp.bfloat16}, None)],
)
def test_five_steps_equal_those_on_a_mesh(settings, chunk):
    tx = small_slamb(**settings)
    params = random_tree(SHAPES, 0)
    mesh = mesh_of(N)
    state = slamb_jax.replicate((params, tx.init(params)), mesh, AXIS)
    run = slamb_jax.per_worker_step(trainer(tx, chunk), mesh, AXIS)
    for batch in batches(N):
        state, losses = run(state, batch)
    got = simulate(tx, N, chunk)
    # A last bit of a 16-bit momentum may fall either way.
    assert_close(got, (state, losses), 2e-3 if "mu_dtype" in settings else 2e-6)


def test_chunks_change_nothing_for_many_workers():
    tx = small_slamb()
    chunked = simulate(tx, 128, chunk=50)  # 128 is no multiple of 50
    assert_close(chunked, simulate(tx, 128), 2e-6)


def test_chunks_need_less_memory():
    def temporary(chunk):
        n = 64
        tx = small_slamb()
        params = random_tree(SHAPES, 0)
        state = slamb_jax.simulated_replicas((params, tx.init(params)), n)
        rows = np.zeros((n * 500, 6), np.float32)
        run = slamb_jax.simulated_step(trainer(tx, chunk), n, AXIS)
        lowered = run.lower(state, {"x": rows, "y": rows[:, :3]})
        return lowered.compile().memory_analysis().temp_size_in_bytes

    assert temporary(4) < 0.5 * temporary(None)


def lowered(state, tx):
    (batch,) = batches(N, 1)
    run = slamb_jax.simulated_step(trainer(tx), N, AXIS)
    return run, run.lower(state, batch).compile().as_text()


def test_the_average_is_computed_only_when_due():
    """Its predicate is a count; a count that is batched would make it a select."""
    params = random_tree(SHAPES, 0)

    def conditionals(sync_every):
        tx = slamb_jax.slamb(0.02, axis_name=AXIS, sync_every=sync_every)
        state = slamb_jax.simulated_replicas((params, tx.init(params)), N)
        return lowered(state, tx)[1].count(" conditional(")

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
    run = slamb_jax.simulated_step(step, 3, AXIS)
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

    x, key = jnp.zeros(2 * N), jax.random.key(3)
    mesh = mesh_of(N)
    state = {"w": jnp.ones(2), "key": jax.random.key(0), "n": 2.5}
    want = slamb_jax.per_worker_step(step, mesh, AXIS)(
        slamb_jax.replicate(state, mesh, AXIS), x, key
    )
    got = slamb_jax.simulated_step(step, N, AXIS)(
        slamb_jax.simulated_replicas(state, N), x, key
    )
    assert got[1].shape == (N, 2)
    np.testing.assert_array_equal(got[1], want[1])
    assert jax.tree.map(jnp.shape, got) == jax.tree.map(jnp.shape, want)
    assert got[0]["n"].dtype == want[0]["n"].dtype


def test_what_is_wrong_is_named():
    with pytest.raises(ValueError, match=r"workers must be .* at least 1, got 0"):
        slamb_jax.simulated_step(lambda s, b: (s, b), 0, AXIS)
    with pytest.raises(ValueError, match=r"workers must be an integer.*got 2\.5"):
        slamb_jax.simulated_replicas(jnp.ones(2), 2.5)
    with pytest.raises(ValueError, match=r"size must be .* at least 1, got 0"):
        slamb_jax.in_chunks(jnp.sin, 0)
    run = slamb_jax.simulated_step(lambda s, b: (s, b), 4, AXIS)
    state = slamb_jax.simulated_replicas({"w": jnp.ones(2)}, 4)
    with pytest.raises(ValueError, match=r"batch\['x'\] .*multiple of 4.*\(6, 2\)"):
        run(state, {"x": jnp.ones((6, 2))})
    with pytest.raises(ValueError, match=r"state\['w'\] .*4 replicas.*\(2,\)"):
        run({"w": jnp.ones(2)}, {"x": jnp.ones((8, 2))})
    run = slamb_jax.simulated_step(lambda s, b: ({"v": s["w"]}, b), 4, AXIS)
    with pytest.raises(ValueError, match="step must return a state of the structure"):
        run(state, {"x": jnp.ones((8, 2))})
    run = slamb_jax.simulated_step(trainer(small_slamb()), 4, "other")
    params = random_tree(SHAPES, 0)
    state = slamb_jax.simulated_replicas((params, small_slamb().init(params)), 4)
    with pytest.raises(ValueError, match="axis_name='data' is not bound here"):
        run(state, next(batches(4)))
