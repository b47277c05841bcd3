"""Wrong replicas, steps, simulations and watchdogs."""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

import slamb_jax
from tests.workers import AXIS, P, exchange, mesh_of
from tests.wrong_uses.common import NAN, PARAMS, of

STATE = {"w": jnp.ones((4, 3)), "t": jnp.arange(4)}
DATA, GROUPS = exchange(), exchange(local_axis_name="device")
SPECS = {"w": P(None, "device"), "b": P()}


def step(state, batch):
    return state, batch


def mesh_2x2():
    return Mesh(mesh_of(4).devices.reshape(2, 2), (AXIS, "device"))


def replicating(tree=PARAMS, exchange=DATA, n=2):
    return lambda: slamb_jax.replicate(tree, mesh_of(n), exchange)


def stepping(batch, exchange=DATA, n=2, state=STATE):
    """A call of the step of n workers, which is refused before it is traced."""
    return lambda: slamb_jax.per_worker_step(step, mesh_of(n), exchange)(state, batch)


def making(exchange, mesh=None, step=step):
    def make():
        slamb_jax.per_worker_step(step, mesh or mesh_of(2), exchange)

    return make


def on_groups(step, devices=4):
    """One step on two groups of two devices."""
    run = slamb_jax.per_worker_step(step, mesh_2x2(), GROUPS)
    state = slamb_jax.replicate({"w": jnp.ones(3)}, mesh_2x2(), GROUPS)
    run(state, jnp.ones((devices, 3)) * jnp.arange(float(devices))[:, None])


def simulating(step, exchange=DATA, n=4, state=STATE, batch=None):
    batch = jnp.ones(4) if batch is None else batch
    return lambda: slamb_jax.simulated_step(step, n, exchange)(state, batch)


def slamb_over(axis):
    """A step that exchanges over an axis that may not be bound."""
    tx = slamb_jax.slamb(0.1, slamb_jax.Exchange(axis))
    return lambda s, b: (tx.update(s, tx.init(s), s)[0], b)


def summed_in_the_group():
    tx = slamb_jax.average_gradients(GROUPS)

    def step(p, x):
        grads = jax.grad(lambda p: jnp.sum((x @ p["w"]) ** 2))(p)
        return tx.update(grads, tx.init(p), p)[0]

    split = jax.shard_map(
        step, mesh=mesh_2x2(), in_specs=(P(), P((AXIS, "device"))), out_specs=P()
    )
    jax.eval_shape(split, {"w": PARAMS["w"]}, jnp.ones((4, 2)))


REPLICAS = [
    (replicating(exchange=slamb_jax.Exchange("model")), "axis_name='model' is not"),
    (replicating(exchange=slamb_jax.Exchange()), "axis_name=None.*Exchange.'data'"),
    (replicating(exchange=AXIS), "exchange .*'data'"),
    (replicating(exchange=GROUPS), "local_axis_name='device' is not an axis"),
    (lambda: slamb_jax.replicate(PARAMS, "mesh", DATA), "mesh .*'mesh'"),
    (replicating({"w": "a"}), r"tree\['w'\].*'a'"),
    (
        replicating(exchange=exchange(param_specs=SPECS)),
        "param_specs names 'device', which is not an axis",
    ),
    (
        lambda: slamb_jax.replicate(STATE, mesh_2x2(), exchange(param_specs=SPECS)),
        "param_specs must have one spec for each parameter",
    ),
    (making(slamb_jax.Exchange("x")), "axis_name='x'"),
    (making(AXIS), "exchange .*'data'"),
    (making(DATA, step="step"), "step .*'step'"),
    (making(GROUPS), "local_axis_name='device' is not an axis"),
    (
        making(
            exchange(local_axis_name="device", param_specs={"w": P("device")}),
            mesh_2x2(),
        ),
        "param_specs and local_axis_name cannot both",
    ),
    (stepping(jnp.ones(2)), r"state\['t'\] .*2 replicas.*\(4,\)"),
    (stepping(jnp.ones(6), n=4), r"batch .*multiple of 4.*\(6,\)"),
    (stepping({"x": jnp.ones((6, 2))}, n=4), r"batch\['x'\] .*multiple of 4.*\(6, 2\)"),
    (stepping(jnp.ones(()), n=4), r"batch .*multiple of 4.*\(\)"),
    (lambda: on_groups(step, devices=6), r"batch .*multiple of 4.*\(6, 3\)"),
    (
        lambda: on_groups(lambda state, batch: ({"w": batch.mean(0)}, 0.0)),
        r"state\['w'\] .*differs between the devices of a worker, along 'device'",
    ),
    (summed_in_the_group, r"updates\['w'\] .*'device'.*sums"),
    (of(slamb_jax.consolidate, {"s": jnp.ones(())}), r"tree\['s'\] .*\(\)"),
    (of(slamb_jax.consolidate, {"s": jnp.ones((0, 2))}), r"tree\['s'\] .*\(0, 2\)"),
    (of(slamb_jax.simulated_replicas, PARAMS, 0), "workers .*0"),
    (of(slamb_jax.simulated_replicas, PARAMS, 2.0), "workers .*2.0"),
    (of(slamb_jax.simulated_step, step, -1, DATA), "workers .*-1"),
    (of(slamb_jax.simulated_step, 3, 2, DATA), "step .*3"),
    (of(slamb_jax.simulated_step, step, 2, AXIS), "exchange .*'data'"),
    (
        of(slamb_jax.simulated_step, step, 2, slamb_jax.Exchange()),
        "one axis_name .*None",
    ),
    (
        of(slamb_jax.simulated_step, step, 2, slamb_jax.Exchange(("a", "b"))),
        r"one axis_name .*\('a', 'b'\)",
    ),
    (
        of(slamb_jax.simulated_step, step, 2, GROUPS),
        "without local_axis_name .*'device'",
    ),
    (
        of(slamb_jax.simulated_step, step, 2, exchange(param_specs=SPECS)),
        "without param_specs .*replace",
    ),
    (simulating(step, n=3), r"state\['t'\] .*3 replicas.*\(4,\)"),
    (simulating(step, batch=jnp.ones(6)), r"batch .*multiple of 4.*\(6,\)"),
    (
        simulating(lambda s, b: ({"v": s["w"]}, b)),
        "step must return a state of the structure",
    ),
    (
        simulating(slamb_over(AXIS), slamb_jax.Exchange("x"), state={"w": STATE["w"]}),
        "axis_name='data' is not bound here",
    ),
    (of(slamb_jax.in_chunks, abs, 0), "size .*0"),
    (of(slamb_jax.in_chunks, "abs", 2), "fun .*'abs'"),
    (of(slamb_jax.assert_replicas_agree, STATE, -1.0), "rtol .*-1.0"),
    (of(slamb_jax.assert_replicas_agree, STATE, NAN), "rtol .*nan"),
    (of(slamb_jax.assert_replicas_agree, {"s": jnp.ones(())}), r"tree\['s'\] .*\(\)"),
    (of(slamb_jax.resize, STATE, 2), r"state\['t'\] .*same on all .*\[0, 1"),
    (of(slamb_jax.resize, {"w": jnp.ones((4, 2))}, 0), "workers .*0"),
    (of(slamb_jax.resize, {"w": jnp.ones((4, 2))}, 2.5), "workers .*2.5"),
    (of(slamb_jax.skip_not_finite, optax.sgd(0.1), AXIS), "exchange .*'data'"),
    (of(slamb_jax.check_finite, STATE), "state .*skip_not_finite"),
    (of(slamb_jax.check_finite, STATE, -1), "max_consecutive_errors .*-1"),
    (of(slamb_jax.check_finite, STATE, 2.5), "max_consecutive_errors .*2.5"),
    (of(slamb_jax.Watchdog, 0), "timeout .*0"),
    (of(slamb_jax.Watchdog, NAN), "timeout .*nan"),
    (of(slamb_jax.Watchdog, "10s"), "timeout .*'10s'"),
    (of(slamb_jax.Watchdog, 10, step_timeout=-1), "step_timeout .*-1"),
    (lambda: slamb_jax.Watchdog(10).beat(1.5), "step .*1.5"),
]
