"""Workers that are groups of devices: what a group's devices must share.

That a group is a worker, whatever is exchanged, is in the campaign.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slamb_jax
from tests.optimizers import random_tree, train_step
from tests.shards import ALONE, mesh_with
from tests.workers import on_mesh

G, D = 4, 2  # groups, devices of each
OUTER, INNER = "node", "device"
MESH = mesh_with({OUTER: G, INNER: D})
GROUPS = slamb_jax.Exchange(OUTER, local_axis_name=INNER)
BETWEEN = slamb_jax.Exchange(OUTER)
ADAMW = slamb_jax.adamw(0.01, GROUPS, eps=1e-3)
BATCH = random_tree({"x": (24,)}, 1, 8 * G * D)["x"]


def loss(p, batch):
    return jnp.mean((batch @ p["w"] + p["b"][None]) ** 2)


def on_groups(step, state, **settings):
    return on_mesh(step, state, MESH, GROUPS, **settings)


def begun(tx, **more):
    params = random_tree({"w": (24, 48), "b": (48,)}, 0) | more
    return params, tx.init(params)


def test_each_device_has_a_key_and_a_report():
    def step(state, batch, key):
        return state, (batch.sum(), jax.random.uniform(key))

    run, state = on_groups(step, jnp.zeros(()))
    _, reports = run(state, BATCH, jax.random.key(0))
    assert [len(set(x.tolist())) for x in reports] == [G * D] * 2


def test_a_leaf_without_elements_is_no_gradient_that_was_summed():
    """Its type does not vary, whatever is done with it."""
    step = train_step(ADAMW, lambda p, batch: loss(p, batch) + jnp.sum(p["empty"]))
    run, state = on_groups(step, begun(ADAMW, empty=jnp.ones((0, 3))))
    run.lower(state, BATCH)


@ALONE
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("averaged", [True, False])
def test_a_state_that_differs_within_a_group_is_refused(averaged, check_vma):
    def step(state, batch):
        mean = slamb_jax.average_parameters(batch, INNER) if averaged else batch
        return state | {"mean": state["mean"] + mean.mean()}, None

    start = {"empty": jnp.zeros((0, 3)), "mean": jnp.zeros(())}
    run, state = on_groups(step, start, check_vma=check_vma)
    if averaged:  # each group has its own mean
        state, _ = run(state, BATCH)
        shards = state["mean"].addressable_shards
        assert len({np.asarray(x.data).tobytes() for x in shards}) == G
        return
    for _ in range(2):  # the second call is refused too
        with pytest.raises(ValueError, match=r"state\['mean'\] .*'device'.*average it"):
            run(jax.tree.map(jnp.copy, state), BATCH)


def test_what_only_the_groups_agree_on_is_refused():
    for tx, said in (
        (slamb_jax.skip_not_finite(ADAMW, BETWEEN), "'device', over which skip"),
        (slamb_jax.accumulate(ADAMW, 2), r"mean.* differs .*before accum"),
    ):
        run, state = on_groups(train_step(tx, loss), begun(tx))
        with pytest.raises(ValueError, match=said):
            run(state, BATCH)
