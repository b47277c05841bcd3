"""Optimizers inside one jitted program of all workers, as another's trainer has it."""

import chex
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding

import slamb_jax
from tests.close import assert_close
from tests.optimizers import random_tree, step_on_gradients
from tests.shards import auto, mesh_4x2
from tests.workers import AXIS, P, mesh_of

N = 4
SHAPES = {"w": (24, 16), "b": (16,)}
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
    settings, mesh, params = EXCHANGES[name], mesh_of(N), random_tree(SHAPES, 0)
    tx = optax.chain(optax.clip_by_global_norm(1.0), slamb_jax.adamw(0.1, settings))
    run = slamb_jax.per_worker_step(step_on_gradients(tx), mesh, settings)
    want = slamb_jax.replicate((params, tx.init(params)), mesh, settings)
    mapped = slamb_jax.on_workers(tx, mesh, settings)
    step = plain_step(mapped)
    ours = slamb_jax.replicate(params, mesh, settings)
    got = ours, mapped.init(ours)
    chex.assert_trees_all_equal(got, want)
    there = NamedSharding(mesh, P(AXIS))
    for t in range(4):
        grads = jax.device_put(random_tree(SHAPES, t + 1, N), there)
        if t == 0:
            sent = slamb_jax.wire_report(step.lower(*got, grads))
            assert sent == slamb_jax.wire_report(run.lower(want, grads))
        got = step(*got, grads)
        want, _ = run(want, grads)
    assert step._cache_size() == 1
    assert_close(got, want)


@pytest.mark.parametrize("specs", [None, {"w": P(None, "model"), "b": P("model")}])
def test_init_on_shapes_alone_tells_where_the_state_will_lie(specs):
    settings, mesh = slamb_jax.Exchange(AXIS, param_specs=specs), mesh_4x2()
    tx = slamb_jax.on_workers(slamb_jax.adamw(0.1, settings), mesh, settings)
    params = slamb_jax.replicate(random_tree(SHAPES, 0), mesh, settings)
    state, shapes = tx.init(params), jax.eval_shape(lambda: params)
    for got in (tx.init(shapes), jax.eval_shape(tx.init, params)):
        chex.assert_trees_all_equal_shapes_and_dtypes(got, state)
    wheres = jax.tree.map(lambda x: x.sharding, (tx.init(shapes), state))
    assert wheres[0] == wheres[1]


@auto
def test_a_sharded_model_stays_sharded():
    specs = {"w": P(None, "model"), "b": P("model")}
    settings = slamb_jax.Exchange(AXIS, param_specs=specs)
    mesh, params = mesh_4x2(), random_tree(SHAPES, 0)
    tx = slamb_jax.on_workers(slamb_jax.adamw(0.1, settings), mesh, settings)
    params = slamb_jax.replicate(params, mesh, settings)
    given = params, tx.init(params), params  # gradients that lie as they do
    step = plain_step(tx)
    report = slamb_jax.wire_report(step.lower(*given))
    for c in report.collectives:  # codes, and sums over a leaf's shards
        assert c.dtype == "u8" or c.elements < 9, report
    params, _ = step(*given)
    assert params["w"].sharding.spec == P(AXIS, None, "model")
