"""Parameters sharded over a second mesh axis: copies, and what is refused.

That their numbers are those of unsharded ones is in the campaign.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding

import slamb_jax
from slamb_jax.selections import Strided
from tests.close import assert_close
from tests.optimizers import random_tree, step_on_gradients
from tests.shards import OLD, N, auto, mesh_4x2
from tests.workers import AXIS, P

ALONE = pytest.mark.filterwarnings("ignore:step changes most of the state")

SPECS = {"up": P(None, "model"), "bias": P("model"), "scale": None, "not": P()}
SHAPES = {"up": (12, 48), "bias": (48,), "scale": (12,), "not": (12, 10)}
EXCHANGE = slamb_jax.Exchange(
    AXIS, payload=None, selection=Strided(0.25, 60), param_specs=SPECS
)
SLAMB = slamb_jax.slamb(0.1, EXCHANGE, weight_decay=0.1)


def trained(tx, steps=5, limit=np.inf, check_vma=True):
    step, params, mesh = step_on_gradients(tx), random_tree(SHAPES, 0), mesh_4x2()
    state = slamb_jax.replicate((params, tx.init(params)), mesh, EXCHANGE)
    run = slamb_jax.per_worker_step(step, mesh, EXCHANGE, check_vma=check_vma)
    for t in range(steps):
        grads = random_tree(SHAPES, 1 + t, N)
        state, _ = run(state, jax.tree.map(lambda g: jnp.clip(g, -limit, limit), grads))
    return state


@auto
@pytest.mark.long
def test_other_transformations_on_shards():
    """``on_shards`` hands any transformation the shards, as a chain of links."""
    both = slamb_jax.on_shards(optax.chain(optax.clip(0.5), SLAMB), EXCHANGE)
    got = trained(both)[0]
    assert_close(got, trained(SLAMB, limit=0.5)[0], units=256)
    there = NamedSharding(got["up"].sharding.mesh, P(AXIS, None, "model"))
    assert got["up"].sharding.is_equivalent_to(there, 3)


@ALONE
@auto
@pytest.mark.parametrize("wrong", [True, False])
def test_copies_that_come_to_differ_are_refused(wrong):
    """A norm of one shard, with types not tracked, moves unsharded leaves apart."""
    clip = slamb_jax.on_shards(optax.clip_by_global_norm(1.0), EXCHANGE)
    tx = optax.chain(clip if wrong else optax.identity(), optax.sgd(0.1))
    run = functools.partial(trained, tx, 1, check_vma=False)
    if wrong:
        with pytest.raises(ValueError, match=r"\['not'\] .* differs .*'model'"):
            run()
    else:
        run()


@auto
def test_a_state_that_is_unlike_the_parameters_is_refused():
    tx = optax.stateless(lambda g, _: g)._replace(init=lambda params: jnp.ones(3))
    with pytest.raises(ValueError, match=r"state.* must be a scalar .* shape \(3,\)"):
        trained(slamb_jax.on_shards(tx, EXCHANGE))


def test_sharded_arrays_are_not_gathered_to_be_replicated():
    mesh, spec = mesh_4x2(), P(None, "model")
    big = jax.device_put(jnp.arange(32.0).reshape(4, 8), NamedSharding(mesh, spec))
    exchange = slamb_jax.Exchange(AXIS, param_specs={"w": spec})
    out = slamb_jax.replicate({"w": big}, mesh, exchange)["w"]
    assert out.addressable_shards[0].data.shape == (1, 4, 4)
    np.testing.assert_array_equal(out, np.broadcast_to(big, (N, 4, 8)))


@pytest.mark.skipif(not OLD, reason="only jax 0.7 cannot")
def test_an_old_jax_says_so():
    with pytest.raises(NotImplementedError, match=r"newer than 0\.7, got 0\.7"):
        trained(SLAMB)
