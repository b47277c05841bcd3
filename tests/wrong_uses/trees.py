"""Trees that do not fit, and axes that are not bound or already reduced."""

import jax
import jax.numpy as jnp

import slamb_jax
from slamb_jax.exchange.selections import Strided
from tests.workers import AXIS, P, over_workers, stack
from tests.wrong_uses.common import (
    PARAMS,
    initial,
    of,
    on_mesh,
    slamb,
    updates_of,
    updating,
)

ALONE, GROUPS = slamb_jax.Exchange(), slamb_jax.Exchange("node", local_axis_name=AXIS)
GRADIENTS = updates_of(slamb_jax.average_gradients(GROUPS))
AVERAGE = slamb_jax.average_parameters_every(slamb_jax.Exchange(payload=None))


def on_workers(tx):
    """Two workers, whose gradients differ over the axis."""
    return lambda: over_workers(updates_of(tx), "shard_map", 2)(stack(PARAMS, 2))


def too_many_blocks():
    leaf = {"w": jax.ShapeDtypeStruct((2**31, 1), jnp.float32)}
    jax.eval_shape(updates_of(slamb(payload=None, selection=Strided(0.5))()), leaf)


def averaged_already(own_state=False, accumulated=False):
    """The trap: jax.grad of replicated parameters inside shard_map sums them."""
    tx = slamb(axis_name=AXIS)()
    tx = slamb_jax.accumulate(tx, 2) if accumulated else tx
    params = {"w": PARAMS["w"]}
    state = stack(tx.init(params), 2) if own_state else tx.init(params)

    def step(p, state, x):
        if own_state:
            state = jax.tree.map(lambda s: jnp.squeeze(s, 0), state)
        grads = jax.grad(lambda p: jnp.sum((x @ p["w"]) ** 2))(p)
        return tx.update(grads, state, p)[0]

    specs = P(), P(AXIS) if own_state else P(), P(AXIS)
    on_mesh(step, params, state, jnp.ones((4, 2)), specs=specs)


SHORT, W, B = {"w": PARAMS["w"]}, PARAMS["w"], PARAMS["b"]
INT, COMPLEX = B.astype("int32"), B.astype("complex64")
NOT_FLOATING = {
    "int32": INT, "complex64": COMPLEX, "bool": B.astype(bool), "1.0": 1.0, "'a'": "a"
}  # fmt: skip
TRUST, ADAMW = slamb_jax.layerwise_trust_ratio(ALONE), slamb_jax.adamw(0.1, ALONE)


def masked(mask):
    return updating(slamb(mask=mask, weight_decay=0.1))


TREES = [
    *(
        (initial(slamb(), {"ok": B, "bad": value}), rf"params .*{got} .*params\['bad'")
        for got, value in NOT_FLOATING.items()
    ),
    (initial(slamb(), jax.random.key(0)), "params .*key<fry>"),
    *(
        (updating(make, params=None), "params must be passed to update, got None")
        for make in (slamb(), TRUST, AVERAGE, ADAMW)
    ),
    *(
        (updating(slamb(), **{name: SHORT}), "(?i)dict key mismatch|structure")
        for name in ("grads", "params", "like")
    ),
    (updating(slamb(), grads={"w": W.T, "b": B}), r"\['w'\] .*\(3, 2\).*\(2, 3\)"),
    (updating(slamb(), {"w": W, "b": INT}), r"updates .*int32 at updates\['b'\]"),
    (updating(slamb(), {"w": W, "b": COMPLEX}), r"complex64 at updates\['b'\]"),
    (too_many_blocks, r"leaf of 2147483648 elements, \(2147483648, 1\).*int32 .*pad"),
    (masked({"w": True}), "mask must have the structure of the parameters"),
    (masked({"w": 1.0, "b": True}), r"mask must have bools .*1.0 at mask\['w'\]"),
    (updating(slamb(axis_name="model")), "axis_name='model' is not bound here"),
    (updating(slamb(axis_name=("data", "model"))), "axis_name=.*model.* is not bound"),
    (on_workers(slamb(axis_name="model")()), "axis_name='model' is not bound here"),
    (on_workers(ADAMW), "axis_name=None exchanges nothing over .*'data'"),
    (on_workers(AVERAGE), "axis_name=None exchanges nothing over .*'data'"),
    (
        of(on_mesh, GRADIENTS, PARAMS, specs=P()),
        r"updates\['b'\] does not vary .*'data'",
    ),
    *(
        (of(averaged_already, own, more), r"updates\['w'\] does not vary .*averaged")
        for own in (True, False)
        for more in (True, False)
    ),
]
