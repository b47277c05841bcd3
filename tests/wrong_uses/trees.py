"""Trees that do not fit, and axes that are not bound or already reduced."""

import jax
import jax.numpy as jnp
import optax

import slamb_jax
from slamb_jax.exchange.selections import Strided
from tests.workers import AXIS, P, mesh_of, over_workers, stack
from tests.wrong_uses.common import PARAMS, initial, of, slamb, updating

ALONE = slamb_jax.Exchange()
AVERAGE = slamb_jax.average_parameters_every(slamb_jax.Exchange(payload=None))


def injected():
    make = optax.inject_hyperparams(slamb_jax.slamb)
    return make(0.01, slamb_jax.Exchange(), mask=lambda params: params)


def unbound_on_a_mesh():
    tx = slamb(axis_name="model")()
    over_workers(lambda p: tx.update(p, tx.init(p), p)[0], "shard_map", 2)(
        stack(PARAMS, 2)
    )


def too_many_blocks():
    leaf = {"w": jax.ShapeDtypeStruct((2**31, 1), jnp.float32)}
    tx = slamb(payload=None, selection=Strided(0.5))()
    jax.eval_shape(lambda p: tx.update(p, tx.init(p), p), leaf)


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
    split = jax.shard_map(step, mesh=mesh_of(2), in_specs=specs, out_specs=P())
    jax.eval_shape(split, params, state, jnp.ones((4, 2)))


def unlike_over_an_axis(link):
    """An exchange without an axis, where gradients differ over one."""
    update = lambda p: link.update(p, link.init(p), p)[0]  # noqa: E731
    return lambda: over_workers(update, "shard_map", 2)(stack(PARAMS, 2))


def summed_in_a_group():
    exchange = slamb_jax.Exchange("node", local_axis_name=AXIS)
    tx = slamb_jax.average_gradients(exchange)
    update = lambda g: tx.update(g, tx.init(g))[0]  # noqa: E731
    split = jax.shard_map(update, mesh=mesh_of(2), in_specs=P(), out_specs=P())
    jax.eval_shape(split, PARAMS)


SHORT, W, B = {"w": PARAMS["w"]}, PARAMS["w"], PARAMS["b"]
INT, COMPLEX = B.astype("int32"), B.astype("complex64")
NO_PARAMS = "params must be passed to update, got None"


def with_leaf(value):
    return initial(slamb(), {"ok": B, "bad": value})


def masked(mask):
    return updating(slamb(mask=mask, weight_decay=0.1))


TREES = [
    (with_leaf(INT), r"params .*int32 at params\['bad'\]"),
    (with_leaf(COMPLEX), r"params .*complex64 at params\['bad'"),
    (with_leaf(B.astype(bool)), r"params .*bool at params\['bad'\]"),
    (with_leaf(1.0), r"params .*1.0 .*params\['bad'\]"),
    (with_leaf("a"), r"params .*'a' .*params\['bad'\]"),
    (initial(slamb(), jax.random.key(0)), "params .*key<fry>"),
    (updating(slamb(), params=None), NO_PARAMS),
    (updating(slamb_jax.layerwise_trust_ratio(ALONE), params=None), NO_PARAMS),
    (updating(AVERAGE, params=None), NO_PARAMS),
    (updating(of(slamb_jax.adamw, 0.1, ALONE), params=None), NO_PARAMS),
    (updating(slamb(), grads=SHORT), "(?i)dict key mismatch|structure"),
    (updating(slamb(), params=SHORT), "(?i)dict key mismatch|structure"),
    (updating(slamb(), like=SHORT), "(?i)dict key mismatch|structure"),
    (updating(slamb(), grads={"w": W.T, "b": B}), r"\['w'\] .*\(3, 2\).*\(2, 3\)"),
    (updating(slamb(), {"w": W, "b": INT}), r"updates .*int32 at updates\['b'\]"),
    (updating(slamb(), {"w": W, "b": COMPLEX}), r"complex64 at updates\['b'\]"),
    (too_many_blocks, r"leaf of 2147483648 elements, \(2147483648, 1\).*int32 .*pad"),
    (masked({"w": True}), "mask must have the structure of the parameters"),
    (masked({"w": 1.0, "b": True}), r"mask must have bools .*1.0 at mask\['w'\]"),
    (updating(slamb(axis_name="model")), "axis_name='model' is not bound here"),
    (updating(slamb(axis_name=("data", "model"))), "axis_name=.*model.* is not bound"),
    *(
        (unlike_over_an_axis(link), "axis_name=None exchanges nothing over .*'data'")
        for link in (slamb_jax.adamw(0.1, ALONE), AVERAGE)
    ),
    (summed_in_a_group, r"updates\['b'\] does not vary .*'data'"),
    (unbound_on_a_mesh, "axis_name='model' is not bound here"),
    *(
        (of(averaged_already, own, more), r"updates\['w'\] does not vary .*averaged")
        for own in (True, False)
        for more in (True, False)
    ),
    (initial(injected, PARAMS), "mask must be static, got .*static_args"),
]
