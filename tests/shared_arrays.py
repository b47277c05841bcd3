"""States that hold an array twice, to which jaxlib may answer with a crash.

A program of its own, run by ``test_replicas.py``; it says what was stepped.
"""

import jax
import jax.numpy as jnp
import numpy as np

import slamb_jax
from tests.close import assert_same_bits
from tests.shards import mesh_4x2
from tests.workers import P, mesh_of, on_mesh

N = 4
BATCH, KEY = {"x": np.arange(8.0, dtype=np.float32)}, jax.random.key(1)
START = {"p": jnp.ones((8, 3)), "ema": jnp.ones((8, 3)), "rng": KEY}


def step(state, batch, key):
    """Reads all there is; p and its average go opposite ways."""
    own = sum(map(jnp.mean, jax.tree.leaves(batch))) + jax.random.uniform(key)
    mean = slamb_jax.average_parameters(own, axis_name="data")
    new = {"p": state["p"] + mean, "ema": state["ema"] - mean}
    return state | new, own


def same(x):
    return x


def new_array(x):
    """Another object, of the same memory."""
    return jax.device_put(x, x.sharding, may_alias=True)


KINDS = [  # an array of the state, where it is again, and as what
    *(("p", "ema", again) for again in (same, new_array, np.asarray)),
    *(("p", "teacher", again) for again in (same, new_array)),
    *(("rng", "words", again) for again in (same, jax.random.key_data)),
]


def check(name, run, start, kinds=KINDS):
    for array, place, again in kinds:
        state = jax.tree.map(jnp.copy, start)
        for _ in range(2):  # a state of the user's, and one that a step returned
            shared, batch = {place: again(state[array])}, BATCH
            if place == "teacher":
                batch = batch | shared
            else:
                state = state | shared
            alone = jax.tree.map(jnp.copy, (state, batch))
            state, report = run(state, batch, KEY)
            assert_same_bits((state, report), run(*alone, KEY))
            assert_same_bits(batch, alone[1])  # neither is donated
        print(f"{name}: {array} in {place}, {again.__name__}", flush=True)


def main():
    exchange, mesh = slamb_jax.Exchange("data"), mesh_of(N)
    sharded = slamb_jax.Exchange("data", param_specs=P("model"))
    check("on a mesh", *on_mesh(step, START, mesh, exchange))
    check("sharded", *on_mesh(step, START, mesh_4x2(), sharded))
    simulated = slamb_jax.simulated_step(step, N, exchange)
    check("simulated", simulated, slamb_jax.simulated_replicas(START, N))
    with jax.set_mesh(mesh):
        check("under set_mesh", *on_mesh(step, START, mesh, exchange), KINDS[:1])


if __name__ == "__main__":
    main()
