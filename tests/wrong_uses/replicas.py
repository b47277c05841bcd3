"""Wrong replicas, steps, simulations and watchdogs."""

import jax
import jax.numpy as jnp

import slamb_jax
from tests.workers import AXIS, mesh_of
from tests.wrong_uses.common import NAN, PARAMS, of

STATE = {"w": jnp.ones((4, 3)), "t": jnp.arange(4)}


def step(state, batch):
    return state, batch


def on_groups(step, state=None, devices=4):
    """One step on two groups of two devices."""
    mesh = jax.sharding.Mesh(mesh_of(4).devices.reshape(2, 2), (AXIS, "device"))
    state = {"w": jnp.ones(3)} if state is None else state
    slamb_jax.per_worker_step(step, mesh, AXIS, local_axis_name="device")(
        slamb_jax.replicate(state, mesh, AXIS), jnp.ones((devices, 3))
    )


def summed_in_the_group():
    tx = slamb_jax.average_gradients("device")
    mesh = jax.sharding.Mesh(mesh_of(4).devices.reshape(2, 2), (AXIS, "device"))
    spec = jax.sharding.PartitionSpec

    def step(p, x):
        grads = jax.grad(lambda p: jnp.sum((x @ p["w"]) ** 2))(p)
        return tx.update(grads, tx.init(p), p)[0]

    split = jax.shard_map(
        step, mesh=mesh, in_specs=(spec(), spec((AXIS, "device"))), out_specs=spec()
    )
    jax.jit(split)({"w": PARAMS["w"]}, jnp.ones((4, 2)))


REPLICAS = [
    (lambda: slamb_jax.replicate(PARAMS, mesh_of(2), "model"), "axis_name='model'"),
    (lambda: slamb_jax.replicate(PARAMS, "mesh", AXIS), "mesh .*'mesh'"),
    (lambda: slamb_jax.replicate({"w": "a"}, mesh_of(2), AXIS), r"tree\['w'\].*'a'"),
    (lambda: slamb_jax.per_worker_step(step, mesh_of(2), "x"), "axis_name='x'"),
    (lambda: slamb_jax.per_worker_step("step", mesh_of(2), AXIS), "step .*'step'"),
    (
        lambda: slamb_jax.per_worker_step(step, mesh_of(2), AXIS)(STATE, jnp.ones(2)),
        r"state\['t'\] .*2 replicas.*\(4,\)",
    ),
    (
        lambda: slamb_jax.per_worker_step(step, mesh_of(4), AXIS)(STATE, jnp.ones(6)),
        r"batch .*multiple of 4.*\(6,\)",
    ),
    (
        lambda: slamb_jax.per_worker_step(step, mesh_of(4), AXIS)(STATE, jnp.ones(())),
        r"batch .*multiple of 4.*\(\)",
    ),
    (
        lambda: slamb_jax.per_worker_step(step, mesh_of(2), AXIS, local_axis_name="x"),
        "local_axis_name='x' is not an axis",
    ),
    (
        lambda: slamb_jax.per_worker_step(step, mesh_of(2), AXIS, local_axis_name=AXIS),
        "local_axis_name .*'data' and 'data'",
    ),
    (lambda: on_groups(step, devices=6), r"batch .*multiple of 4.*\(6, 3\)"),
    (
        lambda: on_groups(lambda state, batch: ({"w": batch.mean(0)}, 0.0)),
        r"state\['w'\] .*may differ .*local_axis_name='device'",
    ),
    (summed_in_the_group, r"updates\['w'\] .*'device'.*sums"),
    (of(slamb_jax.consolidate, {"s": jnp.ones(())}), r"tree\['s'\] .*\(\)"),
    (of(slamb_jax.consolidate, {"s": jnp.ones((0, 2))}), r"tree\['s'\] .*\(0, 2\)"),
    (of(slamb_jax.simulated_replicas, PARAMS, 0), "workers .*0"),
    (of(slamb_jax.simulated_replicas, PARAMS, 2.0), "workers .*2.0"),
    (of(slamb_jax.simulated_step, step, -1, AXIS), "workers .*-1"),
    (
        lambda: slamb_jax.simulated_step(step, 3, AXIS)(STATE, jnp.ones(3)),
        r"state\['t'\] .*3 replicas.*\(4,\)",
    ),
    (of(slamb_jax.in_chunks, abs, 0), "size .*0"),
    (of(slamb_jax.assert_replicas_agree, STATE, -1.0), "rtol .*-1.0"),
    (of(slamb_jax.assert_replicas_agree, STATE, NAN), "rtol .*nan"),
    (of(slamb_jax.assert_replicas_agree, {"s": jnp.ones(())}), r"tree\['s'\] .*\(\)"),
    (of(slamb_jax.resize, STATE, 2), r"state\['t'\] .*same on all .*\[0, 1"),
    (of(slamb_jax.resize, {"w": jnp.ones((4, 2))}, 0), "workers .*0"),
    (of(slamb_jax.resize, {"w": jnp.ones((4, 2))}, 2.5), "workers .*2.5"),
    (of(slamb_jax.simulated_step, 3, 2, AXIS), "step .*3"),
    (of(slamb_jax.in_chunks, "abs", 2), "fun .*'abs'"),
    (of(slamb_jax.check_finite, STATE), "state .*skip_not_finite"),
    (of(slamb_jax.check_finite, STATE, -1), "max_consecutive_errors .*-1"),
    (of(slamb_jax.check_finite, STATE, 2.5), "max_consecutive_errors .*2.5"),
    (of(slamb_jax.Watchdog, 0), "timeout .*0"),
    (of(slamb_jax.Watchdog, NAN), "timeout .*nan"),
    (of(slamb_jax.Watchdog, "10s"), "timeout .*'10s'"),
    (of(slamb_jax.Watchdog, 10, step_timeout=-1), "step_timeout .*-1"),
    (lambda: slamb_jax.Watchdog(10).beat(1.5), "step .*1.5"),
]
