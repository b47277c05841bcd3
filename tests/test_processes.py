"""Two real processes, joined by jax.distributed, end where one process ends."""

import json
import os
import subprocess
import sys

import chex
import pytest

from tests.launcher import ROOT, free_port

TRAINING = """
import json, sys
import jax, jax.numpy as jnp, numpy as np, optax
import slamb_jax
from slamb_jax import Exchange

index, count, port = map(int, sys.argv[1:])
if count > 1:
    jax.distributed.initialize(f"localhost:{port}", count, index)
found, mesh, start = {}, jax.make_mesh((4,), ("data",)), jnp.ones((6, 5))

def run_on(mesh, exchange, tx, params=start, steps=4):
    def step(state, batch, key):
        params, opt_state = state
        noisy = batch + 0.1 * jax.random.normal(key, batch.shape)
        grads = jax.grad(lambda p: jnp.mean((noisy @ p) ** 2))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), None

    state = slamb_jax.replicate((params, tx.init(params)), mesh, exchange)
    run = slamb_jax.per_worker_step(step, mesh, exchange)
    for t in range(steps):
        batch = np.random.default_rng(t).normal(size=(16, 6)).astype(np.float32)
        state, _ = run(state, batch, jax.random.key(t))
    return state[0]
"""
RESULT = """
print("result", json.dumps([jax.process_count(), found]))
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
{RESULT}"""

UNLIKE = f"""{TRAINING}
for name, params, exchange, rate in (
    ("values", start + index, Exchange("data"), 0.1),
    ("exchange", start, Exchange("data", overlap=bool(index)), 0.1),
    ("program", start, Exchange("data"), 0.1 * (1 + index)),
    ("nothing", start, Exchange("data"), 0.1),
):
    try:
        run_on(mesh, exchange, slamb_jax.adamw(rate, exchange), params, steps=1)
        found[name] = "ran"
    except ValueError as error:
        found[name] = str(error)
{RESULT}"""


def results(count, program=WORKER):
    port = free_port()
    flags = f"--xla_force_host_platform_device_count={4 // count}"
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(i), str(count), str(port)],
            env=env | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for i in range(count)
    ]  # fmt: skip
    try:
        for process in processes:
            out, err = process.communicate(timeout=240)
            assert process.returncode == 0, err
            line = next(x for x in out.splitlines() if x.startswith("result "))
            seen, found = json.loads(line.removeprefix("result "))
            assert seen == count
            yield found
    finally:
        for process in processes:
            process.kill()


@pytest.mark.long
def test_two_processes_end_where_one_does():
    (alone,) = results(1)
    for found in results(2):
        refused = found.pop("refused")
        assert refused == alone["refused"]
        assert "differs between the devices of a worker" in refused
        want = {name: alone[name] for name in found}
        chex.assert_trees_all_close(found, want, rtol=0, atol=1e-5)


@pytest.mark.long
def test_processes_that_are_not_alike_are_told_before_they_exchange():
    for found in results(2, UNLIKE):
        assert "tree[0] must be the same in all processes" in found["values"]
        assert "exchange must be the same in all processes" in found["exchange"]
        assert "step must be the same program in all" in found["program"]
        assert found["nothing"] == "ran"
