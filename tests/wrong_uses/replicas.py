"""Wrong replicas, steps and simulations."""

import dataclasses
import pickle
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

import slamb_jax
from tests.workers import AXIS, P, mesh_of
from tests.wrong_uses.common import NAN, PARAMS, bad, of

STATE = {"w": jnp.ones((4, 3)), "t": jnp.array([0, 1, 1, 3])}
DATA, NO_AXIS = slamb_jax.Exchange(AXIS), slamb_jax.Exchange()
GROUPS = slamb_jax.Exchange(AXIS, local_axis_name="device")
W, MESH, ONES = {"w": STATE["w"]}, mesh_of(4, (AXIS, "device")), jnp.ones(4)
NODE, NODES = slamb_jax.Exchange("node"), mesh_of(4, ("node", AXIS))
PAIR = {"w": jnp.ones((2, 3))}
BOTH = dataclasses.replace(GROUPS, param_specs=P("device"))
SHARDED = slamb_jax.Exchange(AXIS, param_specs={"w": P(None, "device"), "b": P()})


def step(state, batch):
    return state, batch


def replicating(tree=PARAMS, exchange=DATA, mesh=None):
    return of(slamb_jax.replicate, tree, mesh or mesh_of(2), exchange)


def stepping(batch, n=4, step=step, mesh=None, exchange=DATA, state=STATE):
    """A call of the step of n workers."""
    mesh = mesh or mesh_of(n)
    return lambda: slamb_jax.per_worker_step(step, mesh, exchange)(state, batch)


def twice(tree=PARAMS, between=lambda replicas: replicas):
    """Replicas that are replicated once more."""
    replicating(between(replicating(tree)()))()


def stored(replicas):
    return pickle.loads(pickle.dumps(replicas))


def making(exchange, mesh=None, step=step):
    return of(slamb_jax.per_worker_step, step, mesh or mesh_of(2), exchange)


def on_groups():
    """One step on two groups of two devices."""
    run = making(GROUPS, MESH)()
    run(replicating({"w": jnp.ones(3)}, GROUPS, MESH)(), jnp.ones((6, 3)))


def simulating(exchange=DATA, step=step, state=STATE, batch=ONES):
    return lambda: slamb_jax.simulated_step(step, 4, exchange)(state, batch)


def over(exchange):
    """A step whose optimizer has this exchange, which may be another one's."""
    tx = slamb_jax.lamb(0.1, exchange)
    return lambda s, b: (tx.update(s, tx.init(s), s)[0], b)


def moving(state, batch):
    total = jax.lax.psum(batch.sum(), AXIS)
    return jax.tree.map(lambda x: x + total, state), batch


two_of = partial(slamb_jax.simulated_replicas, workers=2)
ON_MESH = slamb_jax.per_worker_step(moving, mesh_of(2), DATA)
SIMULATED = slamb_jax.simulated_step(moving, 2, DATA)


def used_twice(run, make):
    """A state that the first step took for good."""
    return lambda: [run(state, ONES) for state in [make()] * 2]


def mapped(exchange=DATA, mesh=None):
    tx = slamb_jax.sgd(0.1, exchange)
    return slamb_jax.on_workers(tx, mesh or mesh_of(4), exchange)


def updating_alone():
    """By gradients without a leading axis."""
    mapped().update(jnp.ones(2), mapped().init(W), W)


def forgotten(tx):
    """A step whose optimizer does not know the axis of its workers."""

    def step(p, x):
        return tx.update(jax.tree.map(lambda p: x.sum() * p, p), tx.init(p), p)[0], x

    run, state = making(DATA, step=step)(), replicating()()
    return partial(run.lower, state, ONES)


FORGOTTEN = r"axis_name=None .*'data'.* slamb_jax.Exchange\('data'\)"
ALONE = slamb_jax.Exchange.paper()
BLIND = [
    slamb_jax.adamw(0.1, NO_AXIS),
    slamb_jax.mask_momentum(ALONE),
    slamb_jax.average_parameters_every(ALONE),
]
ALONE_FINITE = optax.apply_if_finite(slamb_jax.adamw(0.1, DATA), 3).init(PARAMS)
SKIPS = slamb_jax.skip_not_finite(optax.sgd(0.1), NO_AXIS)

RUN = PARAMS, slamb_jax.adamw(0.1, DATA).init(PARAMS)
CUT = [  # numbers that are not what jax would make of them
    (2**33 + 5, "int32", "8589934597"),
    (np.int64(2**33 + 5), "int32", "8589934597"),
    (np.array([0, -(2**40)]), "int32", "-1099511627776"),
    (np.uint64(2**63), "uint32", "9223372036854775808"),
    (np.float64(0.1), "float32", "0.1"),
    (np.float64(1e300), "float32", "1e"),
    (np.complex128(1 + 1e-12j), "complex64", "1e-12"),
]

REPLICAS = [
    (replicating(exchange=slamb_jax.Exchange("model")), "axis_name .*'model'.* is not"),
    (replicating(exchange=NO_AXIS), "axis_name, got None.*Exchange.'data'"),
    (replicating(exchange=AXIS), "exchange .*'data'"),
    (replicating(exchange=GROUPS), "local_axis_name .*'device'.* is not an axis"),
    (replicating(mesh="mesh"), "mesh .*'mesh'"),
    (of(mapped, GROUPS, MESH), "local_axis_name must be None .*per_worker_step"),
    (lambda: mapped().init(jnp.ones((3, 2))), r"params .* 4 replicas.*\(3, 2\)"),
    (updating_alone, r"updates .* 4 replicas.*\(2,\)"),
    (replicating(ALONE_FINITE), "apply_if_finite around .*skip_not_finite"),
    (of(twice), "tree must be one copy, got replicas over 'data'.*consolidate"),
    (of(twice, RUN, stored), "tree must be one copy, .*go on with them as they are"),
    (replicating({"w": "a"}), r"tree\['w'\].*'a'"),
    *(
        (replicating({"n": x}), rf"tree\['n'\] .*{held} holds.*{said}.*x64")
        for x, held, said in CUT
    ),
    *(
        (of(f, {"n": np.stack([x] * 4)}), r"tree\['n'\] .* holds, .*x64")
        for x, *_ in CUT[1:]
        for f in (two_of, slamb_jax.consolidate)
    ),
    *bad(partial(two_of, PARAMS), "equal_keys", "all"),
    (of(two_of, PARAMS, equal_keys=[True]), "equal_keys must have the structure"),
    (replicating(exchange=SHARDED), "param_specs .*'device', which is not an axis"),
    (replicating(STATE, SHARDED, MESH), "param_specs must have one spec for each"),
    (making(DATA, step="step"), "step .*'step'"),
    (making(BOTH, MESH), "param_specs and local_axis_name cannot both"),
    (stepping(jnp.ones(2), n=2), r"state\['t'\] .*2 replicas.*\(4,\)"),
    (stepping(jnp.ones(6)), r"batch .*multiple of 4.*\(6,\)"),
    (stepping(jnp.ones(())), r"batch .*multiple of 4.*\(\)"),
    (used_twice(ON_MESH, replicating()), r"state\['[bw]'\] was donated .*go on"),
    (used_twice(SIMULATED, of(two_of, PARAMS)), r"state\['[bw]'\] was donated .*go on"),
    (stepping({"x": jnp.ones((6, 2))}), r"batch\['x'\] .*multiple of 4.*\(6, 2\)"),
    (stepping({"x": [1.0, 2.0]}), r"batch\['x'\]\[0\] .*multiple of 4.*\(\)"),
    (stepping(ONES, step=lambda s, b: s), "return .state, report., .*got"),
    (
        stepping(ONES, step=lambda s, b: (s["w"], b)),
        "return .state, report., with .* of the structure",
    ),
    (
        stepping(ONES, step=over(NODE), mesh=NODES, state=PAIR),
        "not vary over .*'node', but over .'data'.*not that of per_worker_step",
    ),
    (on_groups, r"batch .*multiple of 4.*\(6, 3\)"),
    *((forgotten(tx), FORGOTTEN) for tx in BLIND),
    (forgotten(SKIPS), "'data', over which skip_not_finite"),
    (of(slamb_jax.consolidate, {"s": jnp.ones(())}), r"tree\['s'\] .*\(\)"),
    (of(slamb_jax.consolidate, {"s": jnp.ones((0, 2))}), r"tree\['s'\] .*\(0, 2\)"),
    (
        of(slamb_jax.consolidate, PARAMS),
        r"tree\['w'\] .* axis of 3 replicas.* as tree\['b'\] .*\(2, 3\).*replicate",
    ),
    *bad(partial(slamb_jax.simulated_replicas, PARAMS), "workers", 0, 2.0),
    *bad(partial(slamb_jax.simulated_step, step, exchange=DATA), "workers", -1),
    *bad(partial(slamb_jax.simulated_step, workers=2, exchange=DATA), "step", 3),
    *bad(partial(slamb_jax.simulated_step, step, 2), "exchange", AXIS),
    (simulating(NO_AXIS), r"one axis_name, .*Exchange\(\)"),
    (simulating(slamb_jax.Exchange(("a", "b"))), r"one axis_name, .*\('a', 'b'\)"),
    (simulating(GROUPS), "neither local_axis_name .*'device'"),
    (simulating(SHARDED), "nor param_specs, .*param_specs="),
    (simulating(batch=jnp.ones(6)), r"batch .*multiple of 4.*\(6,\)"),
    (simulating(slamb_jax.Exchange("x"), over(DATA), W), "'data' is not bound here"),
    *bad(partial(slamb_jax.assert_replicas_agree, STATE), "rtol", -1.0, NAN),
    (of(slamb_jax.assert_replicas_agree, {"s": jnp.ones(())}), r"tree\['s'\] .*\(\)"),
    (of(slamb_jax.check_finite, STATE), "state .*skip_not_finite"),
    *bad(partial(slamb_jax.check_finite, STATE), "max_consecutive_errors", -1, 2.5),
]
