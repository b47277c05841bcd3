"""Laying replicas out, stepping them, joining them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slamb_jax
from slamb_jax._replicas import _join, everywhere
from tests.workers import AXIS, P, mesh_of

N = 8


def test_replicas_start_alike_and_lie_apart():
    mesh = mesh_of(N)
    tree = {
        "w": jnp.arange(6.0).reshape(2, 3),
        "half": jnp.ones(4, jnp.bfloat16),
        "count": jnp.int32(3),
        "key": jax.random.key(0),
        "number": 2.5,
        "none": None,
    }
    out = slamb_jax.replicate(tree, mesh, AXIS)
    assert out["w"].shape == (N, 2, 3)
    assert out["w"].sharding.is_equivalent_to(
        jax.sharding.NamedSharding(mesh, P(AXIS)), 3
    )
    assert out["half"].dtype == jnp.bfloat16
    assert out["key"].shape == (N,)
    assert jnp.issubdtype(out["key"].dtype, jax.dtypes.prng_key)
    back = slamb_jax.consolidate(out)
    np.testing.assert_array_equal(back["w"], tree["w"])
    assert back["count"] == 3
    assert back["count"].dtype == jnp.int32
    assert jnp.all(jax.random.key_data(back["key"]) == jax.random.key_data(tree["key"]))
    assert len(back["w"].devices()) == 1


@pytest.mark.parametrize("explicit", [True, False])
@pytest.mark.parametrize("check_vma", [True, False])
def test_training_with_keys_on_either_kind_of_mesh(explicit, check_vma):
    kind = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((N,), (AXIS,), axis_types=(kind,))
    tx = slamb_jax.slamb(0.05, axis_name=AXIS, min_size=4, sync_every=5, b3=0.5)
    target = jnp.arange(12.0).reshape(4, 3)

    def step(state, batch, key):
        params, opt_state = state
        noisy = batch["x"] + 0.01 * jax.random.normal(key, batch["x"].shape)
        error = lambda p: jnp.mean((noisy @ p - batch["y"]) ** 2)  # noqa: E731
        loss, grads = jax.value_and_grad(error)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        report = {"loss": loss, "noise": noisy[0, 0] - batch["x"][0, 0]}
        return (optax.apply_updates(params, updates), opt_state), report

    params = jnp.ones((4, 3))
    state = slamb_jax.replicate((params, tx.init(params)), mesh, AXIS)
    run = slamb_jax.per_worker_step(step, mesh, AXIS, check_vma=check_vma)
    rng = np.random.default_rng(0)
    losses = []
    for t in range(60):
        x = rng.normal(size=(16, 4)).astype(np.float32)
        batch = {"x": x, "y": x @ np.asarray(target)}
        old = state
        state, report = run(state, batch, jax.random.key(t))
        losses.append(float(report["loss"].mean()))
        assert report["loss"].shape == (N,)
    assert jax.tree.leaves(old)[0].is_deleted()  # donated
    assert len(np.unique(report["noise"])) == N  # each worker has its own key
    assert losses[-1] < 0.5 * losses[0]
    assert slamb_jax.consolidate(state[0]).shape == (4, 3)


def test_consolidate_is_the_mean_and_exact_where_replicas_agree():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 50)).astype(np.float32)
    got = slamb_jax.consolidate({"batch_stats": {"mean": jnp.asarray(x)}})
    np.testing.assert_allclose(
        got["batch_stats"]["mean"], x.mean(0), rtol=1e-5, atol=1e-6
    )
    same = jnp.asarray(np.repeat(x[:1], 3, 0))  # (a + a + a) / 3 is not always a
    np.testing.assert_array_equal(slamb_jax.consolidate(same), x[0])
    half = slamb_jax.consolidate(same.astype(jnp.bfloat16))
    np.testing.assert_array_equal(half, x[0].astype(jnp.bfloat16))


def test_wrong_meshes_and_shapes_are_named():
    mesh = mesh_of(N)
    with pytest.raises(ValueError, match=r"axis_name='model' is not an axis .*'data'"):
        slamb_jax.replicate(jnp.ones(2), mesh, "model")
    with pytest.raises(ValueError, match="axis_name='model' is not an axis"):
        slamb_jax.per_worker_step(lambda s, b: (s, b), mesh, "model")
    run = slamb_jax.per_worker_step(lambda s, b: (s, b), mesh, AXIS)
    state = slamb_jax.replicate({"w": jnp.ones(2)}, mesh, AXIS)
    with pytest.raises(ValueError, match=r"batch\['x'\] .*multiple of 8.*\(12, 2\)"):
        run(state, {"x": jnp.ones((12, 2))})
    with pytest.raises(ValueError, match=r"state\['w'\] .*8 replicas.*\(2,\)"):
        run({"w": jnp.ones(2)}, {"x": jnp.ones((8, 2))})
    with pytest.raises(ValueError, match=r"tree\['s'\] must have a leading axis"):
        slamb_jax.consolidate({"s": jnp.ones(())})


def test_consolidating_leaves_nothing_in_flight():
    """Programs that exchange, more than 32 of them in flight, deadlock on CPU."""
    mesh = mesh_of(8)
    x = slamb_jax.replicate(jnp.ones((1000, 1000)), mesh, AXIS)
    assert all(everywhere(_join, x + i).is_ready() for i in range(5))
