"""Two real processes, joined by jax.distributed, end where one process ends."""

import json
import os
import subprocess
import sys

import pytest

from tests.launcher import ROOT, free_port

# Groups lie across the processes: device 0 of each group in the first, 1 in the second.
WORKER = """
import json, sys
import jax, jax.numpy as jnp, numpy as np, optax
import slamb_jax

index, count, port = map(int, sys.argv[1:])
if count > 1:
    jax.distributed.initialize(f"localhost:{port}", count, index)
found = {}

def run_on(mesh, exchange):
    tx = slamb_jax.slamb(0.05, exchange)

    def step(state, batch, key):
        params, opt_state = state
        noisy = batch + 0.1 * jax.random.normal(key, batch.shape)
        grads = jax.grad(lambda p: jnp.mean((noisy @ p) ** 2))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), None

    params = jnp.ones((6, 5))
    state = slamb_jax.replicate((params, tx.init(params)), mesh, exchange)
    run = slamb_jax.per_worker_step(step, mesh, exchange)
    for t in range(4):
        batch = np.random.default_rng(t).normal(size=(16, 6)).astype(np.float32)
        state, _ = run(state, batch, jax.random.key(t))
    return state

exchange = slamb_jax.Exchange.paper("data", sync_every=3)
state = run_on(jax.make_mesh((4,), ("data",)), exchange)
found["workers"] = slamb_jax.consolidate(state[0]).tolist()

mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 2).T, ("data", "device"))
groups = slamb_jax.Exchange.paper("data", local_axis_name="device", sync_every=3)
state = run_on(mesh, groups)
found["groups"] = slamb_jax.consolidate(state[0]).tolist()
slamb_jax.assert_replicas_agree(state[0], rtol=1e-5)

own = slamb_jax.per_worker_step(lambda s, b: (s + b.sum(), None), mesh, groups)
state = slamb_jax.replicate(jnp.zeros(()), mesh, groups)
try:
    own(state, np.arange(4.0, dtype=np.float32))
except ValueError as error:
    found["refused"] = str(error)
print("result", json.dumps([jax.process_count(), found]))
"""


UNLIKE = """
import json, sys
import jax, jax.numpy as jnp, numpy as np, optax
import slamb_jax

index, count, port = map(int, sys.argv[1:])
jax.distributed.initialize(f"localhost:{port}", count, index)
mesh, found = jax.make_mesh((4,), ("data",)), {}
params = jnp.ones((6, 5))

def attempt(name, params, exchange, rate):
    tx = slamb_jax.adamw(rate, exchange)

    def step(state, batch):
        params, opt_state = state
        grads = jax.grad(lambda p: jnp.mean((batch @ p) ** 2))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), None

    try:
        state = slamb_jax.replicate((params, tx.init(params)), mesh, exchange)
        run = slamb_jax.per_worker_step(step, mesh, exchange)
        run(state, np.ones((8, 6), np.float32))
        found[name] = "ran"
    except ValueError as error:
        found[name] = str(error)

Exchange = slamb_jax.Exchange
attempt("values", params + index, Exchange("data"), 0.1)
attempt("exchange", params, Exchange("data", overlap=bool(index)), 0.1)
attempt("program", params, Exchange("data"), 0.1 * (1 + index))
attempt("nothing", params, Exchange("data"), 0.1)
print("result", json.dumps([jax.process_count(), found]))
"""


def results(count, program=WORKER):
    port = free_port()
    flags = f"--xla_force_host_platform_device_count={4 // count}"
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    env["PYTHONPATH"] = str(ROOT)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(i), str(count), str(port)],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
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
        assert found["refused"] == alone["refused"]
        assert "differs between the devices of a worker" in found["refused"]
        for name in ("workers", "groups"):
            for got, want in zip(found[name], alone[name], strict=True):
                assert got == pytest.approx(want, abs=1e-5)


@pytest.mark.long
def test_processes_that_are_not_alike_are_told_before_they_exchange():
    for found in results(2, UNLIKE):
        assert "tree[0] must be the same in all processes" in found["values"]
        assert "exchange must be the same in all processes" in found["exchange"]
        assert "step must be the same program in all" in found["program"]
        assert found["nothing"] == "ran"
