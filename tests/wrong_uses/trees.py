"""Trees that do not fit, and axes that are not bound or already reduced."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import slamb_jax
from slamb_jax import selections
from tests.workers import AXIS, mesh_of, over_workers, stack
from tests.wrong_uses.common import PARAMS, initial, slamb, updating, with_exchange


def bad_leaf(dtype):
    return {"ok": jnp.ones(3), "bad": jnp.ones(3, dtype)}


def injected():
    make = optax.inject_hyperparams(slamb_jax.slamb)
    return make(0.01, slamb_jax.Exchange(), mask=lambda params: params)


def unbound_on_a_mesh():
    tx = slamb(axis_name="model")()
    over_workers(lambda p: tx.update(p, tx.init(p), p)[0], "shard_map", 2)(
        stack(PARAMS, 2)
    )


def averaged_already():
    tx = slamb(axis_name=AXIS)()

    def step(p, x):
        grads = jax.grad(lambda p: jnp.sum((x @ p["w"]) ** 2))(p)
        return tx.update(grads, tx.init(p), p)[0]

    spec = jax.sharding.PartitionSpec
    split = jax.shard_map(
        step, mesh=mesh_of(2), in_specs=(spec(), spec(AXIS)), out_specs=spec()
    )
    jax.eval_shape(split, {"w": PARAMS["w"]}, jnp.ones((4, 2)))


SHORT = {"w": PARAMS["w"]}

TREES = [
    (initial(slamb(), bad_leaf(jnp.int32)), r"params .*int32 at params\['bad'\]"),
    (initial(slamb(), bad_leaf(jnp.complex64)), r"params .*complex64 at params\['bad'"),
    (initial(slamb(), bad_leaf(bool)), r"params .*bool at params\['bad'\]"),
    (initial(slamb(), {"w": 1.0}), r"params .*1.0 .*params\['w'\]"),
    (initial(slamb(), {"w": "a"}), r"params .*'a' .*params\['w'\]"),
    (initial(slamb(), jax.random.key(0)), "params .*key<fry>"),
    (updating(slamb(), params=None), "params must be passed to update, got None"),
    (
        updating(with_exchange(slamb_jax.layerwise_trust_ratio), params=None),
        "params must be passed to update, got None",
    ),
    (
        updating(with_exchange(slamb_jax.average_parameters_every), params=None),
        "params must be passed to update, got None",
    ),
    (updating(slamb(), grads=SHORT), "(?i)dict key mismatch|structure"),
    (updating(slamb(), params=SHORT), "(?i)dict key mismatch|structure"),
    (updating(slamb(), like=SHORT), "(?i)dict key mismatch|structure"),
    (
        updating(slamb(), grads=PARAMS | {"w": jnp.ones((3, 2))}),
        r"updates\['w'\] .*\(3, 2\).*\(2, 3\)",
    ),
    (
        updating(slamb(), grads=PARAMS | {"b": jnp.ones(3, jnp.int32)}),
        r"updates .*int32 at updates\['b'\]",
    ),
    (
        updating(slamb(), grads=PARAMS | {"b": jnp.ones(3, jnp.complex64)}),
        r"updates .*complex64 at updates\['b'\]",
    ),
    (
        updating(slamb(weight_decay=0.1, mask={"w": True})),
        "mask must have the structure of the parameters",
    ),
    (
        updating(slamb(weight_decay=0.1, mask={"w": 1.0, "b": True})),
        r"mask must have bools .*1.0 at mask\['w'\]",
    ),
    (
        updating(slamb(selection=selections.replay_masks([np.ones((4, 7), bool)]))),
        r"masks .*\(4, 7\).* 3 elements",
    ),
    (updating(slamb(axis_name="model")), "axis_name='model' is not bound here"),
    (unbound_on_a_mesh, "axis_name='model' is not bound here"),
    (averaged_already, r"updates\['w'\] does not vary .*averaged"),
    (initial(injected, PARAMS), "mask must be static, got .*static_args"),
]
