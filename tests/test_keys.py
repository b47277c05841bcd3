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


def numbers_of_keys(tree):
    """How many different values the replicas of each key of a tree have."""
    words = [jax.random.key_data(key).tolist() for key in keys_of(tree)]
    return [len(set(map(tuple, replicas))) for replicas in words]


@pytest.mark.parametrize("case", BEHIND)
def test_a_key_behind_the_mean_is_the_same_on_all_workers(case):
    tx, mesh = BEHIND[case], mesh_of(N)
    state = PARAMS, tx.init(PARAMS)
    run = slamb_jax.per_worker_step(step_on_gradients(tx), mesh, EXCHANGE)
    replicas = slamb_jax.replicate(state, mesh, EXCHANGE)
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
    ((PARAMS, STATE, {"dropout": KEY}), None, [N]),
    ([STATE, (PARAMS, KEY)], None, [N]),
    ({"opt_state": STATE, "rng": KEY}, None, [N]),
    (TREE, None, [1, N]),
    (TREE, {"opt_state": False, "rng": True}, [N, 1]),
    (TREE, {"opt_state": (False, True), "rng": False}, [1, N]),
    ((PARAMS, WRAPPED), None, [1]),
    # It may be the state of a transformation, or of the whole training.
    (MINE, False, [N]),
    (MINE, True, [1]),
    (MINE, Mine(True, True, False), [N]),
    (MINE, lambda tree: Mine(True, True, "params" in tree._fields), [1]),
]
# Before the mean, that of a dense run: no order in a chain is guessed.
SAID += [
    ((PARAMS, tx.init(PARAMS)), said, [n])
    for tx in BEFORE.values()
    for said, n in ((None, 1), (False, N))
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


@pytest.mark.parametrize("unsaid", [MINE, [MINE], {"a": (STATE, MINE)}])
def test_of_a_named_tuple_of_the_users_own_the_user_must_say_it(unsaid):
    with pytest.raises(ValueError, match="equal_keys must be given where a Mine"):
        slamb_jax.simulated_replicas(unsaid, N)


def test_on_workers_begins_with_the_same_keys():
    mesh = mesh_of(N)
    params = slamb_jax.replicate(PARAMS, mesh, EXCHANGE)
    for case in (BEHIND, BEFORE):
        tx = slamb_jax.on_workers(case["in the chain"], mesh, EXCHANGE)
        state = tx.init(params)
        chex.assert_tree_shape_prefix(keys_of(state), (N,))
        assert numbers_of_keys(state) == [1]
