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
from tests.workers import AXIS, mesh_of, on_mesh

N = 4
EXCHANGE = slamb_jax.Exchange(AXIS)
OURS = slamb_jax.adamw(0.01, EXCHANGE)
PARAMS = {"w": jnp.zeros((2, 4))}


NOISE = optax.add_noise(0.01, 0.55, 0)
BEHIND = {
    "in the chain": optax.chain(OURS, NOISE),
    "in a named chain": optax.named_chain(("ours", OURS), ("noise", NOISE)),
    "in the direction": slamb_jax.mask_momentum(EXCHANGE, NOISE),
    "in a wrapper": slamb_jax.skip_not_finite(optax.chain(OURS, NOISE), EXCHANGE),
    "in JointSpar": jointspar.jointspar(
        optax.chain(optax.sgd(0.01), NOISE), EXCHANGE, {"w": "w"}, 1
    ),
}
# Before the mean, too, as in a dense run: no order in a chain is guessed.
BEFORE = optax.chain(NOISE, OURS)


class Mine(NamedTuple):
    params: dict[str, jax.Array]
    opt_state: optax.OptState
    key: jax.Array


def keys_of(tree):
    leaves = jax.tree.leaves(tree)
    return [x for x in leaves if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]


def numbers_of_keys(tree):
    """How many different values the replicas of each key of a tree have."""
    words = [jax.random.key_data(key).tolist() for key in keys_of(tree)]
    return [len(set(map(tuple, replicas))) for replicas in words]


@pytest.mark.parametrize("case", BEHIND)
def test_a_key_behind_the_mean_is_the_same_on_all_workers(case):
    tx = BEHIND[case]
    state = PARAMS, tx.init(PARAMS)
    run, replicas = on_mesh(step_on_gradients(tx), state, mesh_of(N), EXCHANGE)
    assert numbers_of_keys(replicas) == [1]
    assert numbers_of_keys(slamb_jax.simulated_replicas(state, N)) == [1]
    for t in range(3):
        grads = {"w": jax.random.normal(jax.random.key(t), (N, 2, 4))}
        with standard_promotion():
            replicas, _ = run(replicas, grads)
    slamb_jax.assert_replicas_agree(replicas[0])
    assert jnp.any(replicas[0]["w"] != 0)


STATE, KEY = OURS.init(PARAMS), jax.random.key(1)
MINE = Mine(PARAMS, STATE, KEY)
# Of an optimizer of the user's own, whose state is a key alone.
WRAPPED = slamb_jax.skip_not_finite(OURS, EXCHANGE).init(PARAMS)._replace(inner=KEY)
TREE = {"opt_state": BEHIND["in the chain"].init(PARAMS), "rng": KEY}
SAID = [  # a state, equal_keys, and how many values each of its keys has
    ((PARAMS, STATE, KEY), None, [N]),
    ([STATE, {"dropout": KEY}], None, [N]),
    (TREE, None, [1, N]),
    (TREE, {"opt_state": False, "rng": True}, [N, 1]),
    (TREE, {"opt_state": (False, True), "rng": False}, [1, N]),
    ((PARAMS, WRAPPED), None, [1]),
    # It may be the state of a transformation, or of the whole training.
    (MINE, False, [N]),
    (MINE, True, [1]),
    (MINE, Mine(True, True, False), [N]),
    (MINE, lambda tree: Mine(True, True, "params" in tree._fields), [1]),
    ((PARAMS, BEFORE.init(PARAMS)), None, [1]),
    ((PARAMS, BEFORE.init(PARAMS)), False, [N]),
]


@pytest.mark.parametrize(("tree", "equal_keys", "numbers"), SAID)
def test_another_key_is_each_workers_own_where_it_is_beside_or_the_user_says_so(
    tree, equal_keys, numbers
):
    mesh = mesh_of(N)
    for replicas in (
        slamb_jax.replicate(tree, mesh, EXCHANGE, equal_keys=equal_keys),
        slamb_jax.simulated_replicas(tree, N, equal_keys=equal_keys),
    ):
        assert numbers_of_keys(replicas) == numbers


def test_of_a_named_tuple_of_the_users_own_the_user_must_say_it():
    with pytest.raises(ValueError, match="equal_keys must be given where a Mine"):
        slamb_jax.simulated_replicas({"a": (STATE, MINE)}, N)


def test_on_workers_begins_with_the_same_keys():
    mesh = mesh_of(N)
    params = slamb_jax.replicate(PARAMS, mesh, EXCHANGE)
    for tx in (BEHIND["in the chain"], BEFORE):
        state = slamb_jax.on_workers(tx, mesh, EXCHANGE).init(params)
        chex.assert_tree_shape_prefix(keys_of(state), (N,))
        assert numbers_of_keys(state) == [1]
