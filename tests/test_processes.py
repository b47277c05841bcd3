"""Two real processes, joined by jax.distributed, end where one process ends."""

import chex
import pytest

from tests.programs import found_by

TRAINING = """
from slamb_jax import Exchange
from tests.optimizers import train_step

start = jnp.ones((6, 5))

def run_on(mesh, exchange, tx, params=start, steps=4):
    def step(state, batch, key):
        noisy = batch + 0.1 * jax.random.normal(key, batch.shape)
        return train_step(tx, lambda p, x: jnp.mean((x @ p) ** 2))(state, noisy)

    state = slamb_jax.replicate((params, tx.init(params)), mesh, exchange)
    run = slamb_jax.per_worker_step(step, mesh, exchange)
    for t in range(steps):
        batch = np.random.default_rng(t).normal(size=(16, 6)).astype(np.float32)
        if t % 2:  # a global array, on a mesh that may have Explicit axes
            spec = jax.sharding.PartitionSpec(mesh.axis_names)
            sharding = jax.sharding.NamedSharding(mesh, spec)
            own = lambda index, known=batch: known[index]
            batch = jax.make_array_from_callback(batch.shape, sharding, own)
        state, _ = run(state, batch, jax.random.key(t))
    return state[0]
"""

# Groups lie across the processes: device 0 of each group in the first, 1 in the second.
WORKER = f"""{TRAINING}
exchange = Exchange.paper("data", sync_every=3)
params = run_on(mesh, exchange, slamb_jax.slamb(0.05, exchange))
found["workers"] = slamb_jax.consolidate(params).tolist()

mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2).T, ("data", "device"))
groups = Exchange.paper("data", local_axis_name="device", sync_every=3)
params = run_on(mesh, groups, slamb_jax.slamb(0.05, groups))
found["groups"] = slamb_jax.consolidate(params).tolist()
slamb_jax.assert_replicas_agree(params, rtol=1e-5)

own = slamb_jax.per_worker_step(lambda s, b: (s + b.sum(), None), mesh, groups)
state = slamb_jax.replicate(jnp.zeros(()), mesh, groups)
try:
    own(state, np.arange(4.0, dtype=np.float32))
except ValueError as error:
    found["refused"] = str(error)
"""

UNLIKE = f"""{TRAINING}
for name, params, exchange, rate in (
    ("values", start + index, Exchange("data"), 0.1),
    ("exchange", start, Exchange("data", route=("owners", "all")[index]), 0.1),
    ("program", start, Exchange("data"), 0.1 * (1 + index)),
    ("nothing", start, Exchange("data"), 0.1),
):
    try:
        run_on(mesh, exchange, slamb_jax.adamw(rate, exchange), params, steps=1)
        found[name] = "ran"
    except ValueError as error:
        found[name] = str(error)
"""


@pytest.mark.long
def test_two_processes_end_where_one_does(tmp_path):
    (alone,) = found_by(1, WORKER, tmp_path)
    for found in found_by(2, WORKER, tmp_path):
        refused = found.pop("refused")
        assert refused == alone["refused"]
        assert "differs between the devices of a worker" in refused
        want = {name: alone[name] for name in found}
        chex.assert_trees_all_close(found, want, rtol=0, atol=1e-5)


@pytest.mark.long
def test_processes_that_are_not_alike_are_told_before_they_exchange(tmp_path):
    for found in found_by(2, UNLIKE, tmp_path):
        assert "tree[0] must be the same in all processes" in found["values"]
        for name in ("exchange", "program"):
            assert "step must be one program in all" in found[name]
            assert "differs with Exchange('data'" in found[name]
        assert found["nothing"] == "ran"
