"""One axis of workers or two, scans, and one program of all workers.

That every mapping gives the same numbers is in the campaign.
"""

import chex
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType, NamedSharding

import slamb_jax
from tests.close import assert_close
from tests.optimizers import random_tree, slamb, step_on_gradients
from tests.shards import mesh_4x2, mesh_with
from tests.workers import AXIS, P, mesh_of, on_mesh, train

SHAPES = {"w": (12, 16), "b": (16,), "odd": (7, 11), "empty": (0, 3), "scale": ()}
SLAMB = slamb(b3=0.9)


@pytest.mark.parametrize("mapping", ["shard_map", "shard_map_unchecked"])
def test_two_axes_are_one_group_of_workers(mapping):
    params, axes = random_tree(SHAPES, 0), ("node", "device")
    grads = [random_tree(SHAPES, 1 + t, 4) for t in range(4)]
    got = train(slamb(axis_name=axes, b3=0.9), params, grads, mapping, axes)
    assert_close(got, train(SLAMB, params, grads, "vmap"))


MEAN, FINE = (slamb_jax.Exchange(AXIS, payload=x) for x in ("ternary", "uniform8"))
DILOCO = slamb_jax.Exchange(AXIS, sync_every=2, outer=optax.sgd(0.7, 0.9))
KINDS = {
    "published": SLAMB,
    "lamb": slamb_jax.lamb(0.1, MEAN, mu_dtype="bfloat16"),
    "lion": slamb_jax.lion(0.1, FINE),
    "sgd": slamb_jax.sgd(0.1, DILOCO, momentum=0.9),
    "muon": slamb_jax.muon(0.1, FINE),
    "accumulate": slamb_jax.accumulate(slamb_jax.adamw(0.1, MEAN), 2),
    "finite": slamb_jax.skip_not_finite(slamb_jax.adamw(0.1, FINE), FINE),
    "finite, published": slamb_jax.skip_not_finite(SLAMB, MEAN),
}


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("check_vma", [True, False])
def test_a_worker_scans_its_steps_on_a_mesh_of_explicit_axes(name, check_vma):
    """The types of its state stay."""
    tx, mesh = KINDS[name], mesh_with({AXIS: 4}, AxisType.Explicit)

    def worker(params):
        own = jax.tree.map(lambda x: jnp.squeeze(x, 0), params)
        step = lambda state, _: (tx.update(own, state, own)[1], None)  # noqa: E731
        state, _ = jax.lax.scan(step, tx.init(own), length=2)
        return jax.tree.map(lambda x: jnp.expand_dims(x, 0), state)

    with jax.set_mesh(mesh):
        split = {"in_specs": P(AXIS), "out_specs": P(AXIS), "check_vma": check_vma}
        there = NamedSharding(mesh, P(AXIS))
        params = jax.device_put(random_tree(SHAPES, 0, 4), there)
        jax.eval_shape(jax.shard_map(worker, mesh=mesh, **split), params)


PAIR = {"w": (24, 16), "b": (16,)}
EXCHANGES = {
    "default": slamb_jax.Exchange(AXIS),
    "outer": slamb_jax.Exchange(AXIS, sync_every=3, outer=optax.sgd(0.7)),
}


def plain_step(tx):
    """What a trainer does: no axis of workers is bound in it."""

    @jax.jit
    def step(params, opt_state, grads):
        updates, opt_state = tx.update(grads, opt_state, params, value=jnp.ones(()))
        return optax.apply_updates(params, updates), opt_state

    return step


@pytest.mark.parametrize("name", EXCHANGES)
def test_the_bits_and_bytes_of_per_worker_step(name):
    settings, mesh, params = EXCHANGES[name], mesh_of(4), random_tree(PAIR, 0)
    tx = optax.chain(optax.clip_by_global_norm(1.0), slamb_jax.adamw(0.1, settings))
    start = params, tx.init(params)
    run, want = on_mesh(step_on_gradients(tx), start, mesh, settings)
    mapped = slamb_jax.on_workers(tx, mesh, settings)
    step = plain_step(mapped)
    ours = slamb_jax.replicate(params, mesh, settings)
    got = ours, mapped.init(ours)
    chex.assert_trees_all_equal(got, want)
    there = NamedSharding(mesh, P(AXIS))
    for t in range(4):
        grads = jax.device_put(random_tree(PAIR, t + 1, 4), there)
        if t == 0:
            sent = slamb_jax.wire_report(step.lower(*got, grads))
            assert sent == slamb_jax.wire_report(run.lower(want, grads))
        got = step(*got, grads)
        want, _ = run(want, grads)
    assert step._cache_size() == 1
    assert_close(got, want)


@pytest.mark.parametrize("specs", [None, {"w": P(None, "model"), "b": P("model")}])
def test_the_state_lies_where_init_on_shapes_tells_and_a_model_stays_sharded(specs):
    settings, mesh = slamb_jax.Exchange(AXIS, param_specs=specs), mesh_4x2()
    tx = slamb_jax.on_workers(slamb_jax.adamw(0.1, settings), mesh, settings)
    params = slamb_jax.replicate(random_tree(PAIR, 0), mesh, settings)
    state, shapes = tx.init(params), jax.eval_shape(lambda: params)
    for got in (tx.init(shapes), jax.eval_shape(tx.init, params)):
        chex.assert_trees_all_equal_shapes_and_dtypes(got, state)
    wheres = jax.tree.map(lambda x: x.sharding, (tx.init(shapes), state))
    assert wheres[0] == wheres[1]
    if specs is None:
        return
    given = params, state, params  # gradients that lie as they do
    step = plain_step(tx)
    report = slamb_jax.wire_report(step.lower(*given))
    for c in report.collectives:  # codes, and sums over a leaf's shards
        assert c.dtype == "u8" or c.elements < 9, report
    params, _ = step(*given)
    assert params["w"].sharding.spec == P(AXIS, None, "model")
