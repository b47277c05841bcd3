"""Two real processes, joined by jax.distributed, end where one process ends."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

WORKER = """
import json, sys
import jax, jax.numpy as jnp, numpy as np, optax
import slamb_jax

index, count, port = map(int, sys.argv[1:])
if count > 1:
    jax.distributed.initialize(f"localhost:{port}", count, index)
mesh = jax.make_mesh((4,), ("data",))
tx = slamb_jax.slamb(0.05, axis_name="data", min_size=4, sync_every=3)

def step(state, batch, key):
    params, opt_state = state
    noisy = batch + 0.1 * jax.random.normal(key, batch.shape)
    grads = jax.grad(lambda p: jnp.mean((noisy @ p) ** 2))(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), None

params = jnp.ones((6, 5))
state = slamb_jax.replicate((params, tx.init(params)), mesh, "data")
run = slamb_jax.per_worker_step(step, mesh, "data")
rng = np.random.default_rng(0)
for t in range(5):
    batch = rng.normal(size=(16, 6)).astype(np.float32)
    state, _ = run(state, batch, jax.random.key(t))
params = slamb_jax.consolidate(state[0])
print("result", json.dumps([jax.process_count(), params.tolist()]))
"""


def free_port():
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def results(count):
    port = free_port()
    flags = f"--xla_force_host_platform_device_count={4 // count}"
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    env["PYTHONPATH"] = str(Path(__file__).parents[1])
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(i), str(count), str(port)],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for i in range(count)
    ]  # fmt: skip
    try:
        for process in processes:
            out, err = process.communicate(timeout=120)
            assert process.returncode == 0, err
            line = next(x for x in out.splitlines() if x.startswith("result "))
            processes_seen, params = json.loads(line.removeprefix("result "))
            assert processes_seen == count
            yield params
    finally:
        for process in processes:
            process.kill()


def test_two_processes_end_where_one_does():
    (alone,) = results(1)
    for params in results(2):
        for got, want in zip(params, alone, strict=True):
            assert got == pytest.approx(want, abs=1e-5)
