"""Random keys of a state: each worker's own, but for those of an optimizer."""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax
import pytest

import slamb_jax
from slamb_jax import jointspar
from tests.optimizers import standard_promotion, step_on_gradients
from tests.workers import AXIS, mesh_of

N = 4
EXCHANGE = slamb_jax.Exchange(AXIS)
OURS = slamb_jax.adamw(0.01, EXCHANGE)
PARAMS = {"w": jnp.zeros((2, 4))}


def noise(seed=0):
    return optax.add_noise(0.01, 0.55, seed)


LINK = slamb_jax.mask_momentum
BEHIND = {
    "in the chain": optax.chain(OURS, noise()),
    "in a chain of its own": optax.chain(OURS, optax.chain(optax.identity(), noise())),
    "after a chain": optax.chain(optax.chain(optax.identity(), OURS), noise()),
    "in a named chain": optax.named_chain(("ours", OURS), ("noise", noise())),
    "in the direction": LINK(EXCHANGE, optax.chain(noise(), optax.scale(-0.01))),
    "in a wrapper": slamb_jax.skip_not_finite(optax.chain(OURS, noise()), EXCHANGE),
    "in accumulation": slamb_jax.accumulate(optax.chain(OURS, noise()), 2),
    "in LAMB": optax.chain(slamb_jax.lamb(0.01, EXCHANGE), noise()),
    "after error feedback": optax.chain(
        slamb_jax.randk_compress_with_error_feedback(EXCHANGE), noise(), optax.sgd(0.1)
    ),
    "in JointSpar": jointspar.jointspar(
        optax.chain(optax.sgd(0.01), noise()), EXCHANGE, {"w": "w"}, 1
    ),
}
BEFORE = {
    "in a named chain": optax.named_chain(("noise", noise()), ("ours", OURS)),
    "in the chain": optax.chain(noise(), OURS),
    "in a wrapper": slamb_jax.accumulate(optax.chain(noise(), OURS), 2),
    "in a compressor": LINK(EXCHANGE, compressor=noise()),
    "without a mean": optax.chain(noise(), optax.sgd(0.1)),
}


class Mine(NamedTuple):
    params: dict[str, jax.Array]
    opt_state: optax.OptState
    key: jax.Array


def keys_of(tree):
    leaves = jax.tree.leaves(tree)
    return [x for x in leaves if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]


def number_of_keys(tree):
    """How many different values the replicas of the only key of a tree have."""
    (key,) = keys_of(tree)
    return len({tuple(words) for words in jax.random.key_data(key).tolist()})


@pytest.mark.parametrize("case", BEHIND)
def test_a_key_behind_the_mean_is_the_same_on_all_workers(case):
    tx, mesh = BEHIND[case], mesh_of(N)
    state = PARAMS, tx.init(PARAMS)
    run = slamb_jax.per_worker_step(step_on_gradients(tx), mesh, EXCHANGE)
    replicas = slamb_jax.replicate(state, mesh, EXCHANGE)
    assert number_of_keys(replicas) == 1
    assert number_of_keys(slamb_jax.simulated_replicas(state, N)) == 1
    for t in range(3):
        grads = {"w": jax.random.normal(jax.random.key(t), (N, 2, 4))}
        with standard_promotion():
            replicas, _ = run(replicas, grads)
    slamb_jax.assert_replicas_agree(replicas[0])
    assert jnp.any(replicas[0]["w"] != 0)


@pytest.mark.parametrize("case", BEFORE)
def test_a_key_before_the_mean_is_each_workers_own_if_the_user_says_so(case):
    """And else that of a dense run, so that no order in a chain is guessed."""
    state, mesh = (PARAMS, BEFORE[case].init(PARAMS)), mesh_of(N)
    for n, said in ((1, {}), (N, {"equal_keys": False})):
        assert number_of_keys(slamb_jax.replicate(state, mesh, EXCHANGE, **said)) == n
        assert number_of_keys(slamb_jax.simulated_replicas(state, N, **said)) == n


def test_a_users_own_key_beside_an_optimizer_is_each_workers_own():
    key, state = jax.random.key(1), OURS.init(PARAMS)
    for tree in (
        (PARAMS, state, key),
        (PARAMS, state, {"dropout": key}),
        [state, (PARAMS, key)],
        {"opt_state": state, "rng": key},
    ):
        assert number_of_keys(slamb_jax.simulated_replicas(tree, N)) == N


@pytest.mark.parametrize(
    ("equal_keys", "n"),
    [
        (False, N),
        (True, 1),
        (Mine(True, True, False), N),
        (lambda tree: Mine(True, True, "params" in tree._fields), 1),
    ],
)
def test_of_a_named_tuple_of_the_users_own_the_user_says_it(equal_keys, n):
    """It may be the state of a transformation, or of the whole training."""
    tree = Mine(PARAMS, OURS.init(PARAMS), jax.random.key(1))
    replicas = slamb_jax.simulated_replicas(tree, N, equal_keys=equal_keys)
    assert number_of_keys(replicas) == n
    for unsaid in (tree, [tree], {"a": (OURS.init(PARAMS), tree)}):
        with pytest.raises(ValueError, match="equal_keys must be given where a Mine"):
            slamb_jax.simulated_replicas(unsaid, N)


def test_a_tree_says_it_for_each_part():
    tree = {"opt_state": BEHIND["in the chain"].init(PARAMS), "rng": jax.random.key(1)}
    for said, own in (
        (None, {"rng"}),
        ({"opt_state": False, "rng": True}, {"opt_state"}),
        ({"opt_state": (False, True), "rng": False}, {"rng"}),
    ):
        replicas = slamb_jax.replicate(tree, mesh_of(N), EXCHANGE, equal_keys=said)
        assert {k for k in tree if number_of_keys(replicas[k]) == N} == own


def test_on_workers_begins_with_the_same_keys():
    mesh = mesh_of(N)
    params = slamb_jax.replicate(PARAMS, mesh, EXCHANGE)
    for case in (BEHIND, BEFORE):
        tx = slamb_jax.on_workers(case["in the chain"], mesh, EXCHANGE)
        state = tx.init(params)
        chex.assert_tree_shape_prefix(keys_of(state), (N,))
        assert number_of_keys(state) == 1
