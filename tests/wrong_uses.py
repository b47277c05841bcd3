"""Wrong uses of everything public: what is done, the error, and what it must say.

Each is ``(call, error, message)``: a function without arguments (or with a directory),
the type of the error, and a pattern that names the argument and the value.
"""

import functools
import inspect
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import slamb_jax
from examples.byte_lm import data
from examples.byte_lm.main import main as byte_lm
from examples.byte_lm.train import Config
from slamb_jax import _cli
from tests.workers import AXIS, P, mesh_of, over_workers, stack

NAN, INF = float("nan"), float("inf")
PARAMS = {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}
STEP = lambda state, batch: (state, batch)  # noqa: E731


def of(make, *args, **settings):
    """A call that makes something with these arguments."""
    return functools.partial(make, *args, **settings)


def slamb(**settings):
    return of(slamb_jax.slamb, **({"learning_rate": 0.01} | settings))


def updating(make, grads=PARAMS, params=PARAMS, like=PARAMS):
    """A call that updates once, jitted as in a training loop."""

    def call():
        tx = make() if callable(make) else make
        jax.jit(tx.update)(grads, tx.init(like), params)

    return call


def rescaling(selection):
    """A call that rescales once, on two workers."""

    def call():
        tx = slamb_jax.elementwise_rescale(selection, axis_name=AXIS)
        update = over_workers(lambda u: tx.update(u, tx.init(u))[0], "vmap", 2)
        update(stack(PARAMS, 2))

    return call


def initial(make, params):
    return lambda: make().init(params)


def command(text):
    return lambda: _cli.main(text.split())


SETTINGS = [
    ({"learning_rate": "fast"}, "learning_rate .*'fast'"),
    ({"learning_rate": NAN}, "learning_rate .*nan"),
    ({"learning_rate": None}, "learning_rate .*None"),
    ({"learning_rate": True}, "learning_rate .*True"),
    ({"learning_rate": [0.1]}, r"learning_rate .*\[0.1\]"),
    ({"learning_rate": 1j}, "learning_rate .*1j"),
    ({"compress_ratio": 0.0}, r"compress_ratio .*\(0.0, 1.0\].*0.0"),
    ({"compress_ratio": 1.1}, "compress_ratio .*1.1"),
    ({"compress_ratio": -0.1}, "compress_ratio .*-0.1"),
    ({"compress_ratio": NAN}, "compress_ratio .*nan"),
    ({"compress_ratio": "0.1"}, "compress_ratio .*'0.1'"),
    ({"b1": 1.0}, r"b1 .*\[0.0, 1.0\).*1.0"),
    ({"b1": -0.1}, "b1 .*-0.1"),
    ({"b1": NAN}, "b1 .*nan"),
    ({"b2": 1.5}, "b2 .*1.5"),
    ({"b2": None}, "b2 .*None"),
    ({"b2": INF}, "b2 .*inf"),
    ({"b3": 1.01}, r"b3 .*\[0.0, 1.0\].*1.01"),
    ({"b3": -0.01}, "b3 .*-0.01"),
    ({"b3": NAN}, "b3 .*nan"),
    ({"eps": 0.0}, "eps .*0.0"),
    ({"eps": True}, "eps .*True"),
    ({"eps": -1e-6}, "eps .*-1e-06"),
    ({"eps": NAN}, "eps .*nan"),
    ({"weight_decay": -0.1}, "weight_decay .*-0.1"),
    ({"weight_decay": NAN}, "weight_decay .*nan"),
    ({"weight_decay": "some"}, "weight_decay .*'some'"),
    ({"sync_every": 0}, "sync_every .*at least 1.*0"),
    ({"sync_every": -10}, "sync_every .*-10"),
    ({"sync_every": 2.5}, "sync_every .*integer.*2.5"),
    ({"sync_every": True}, "sync_every .*True"),
    ({"form": "difference"}, "form .*sum, product.*'difference'"),
    ({"form": None}, "form .*None"),
    (
        {"selection": "random"},
        "selection .*strided, permutation, bernoulli, top_k.*'random'",
    ),
    ({"selection": 3}, "selection .*3"),
    ({"selection": None}, "selection .*None"),
    ({"selection": slamb_jax.Strided}, "selection .*Strided"),
    ({"c_min": -1.0}, "c_min .*-1.0"),
    ({"c_min": 2.0, "c_max": 1.0}, "c_min must not exceed c_max.*2.0 and 1.0"),
    ({"c_max": NAN}, "c_max .*nan"),
    ({"c_max": "1"}, "c_max .*'1'"),
    ({"min_size": -1}, "min_size .*-1"),
    ({"min_size": 10.5}, "min_size .*10.5"),
    ({"bias_correction": False}, "bias_correction=False .*form='product'"),
    ({"mu_dtype": "int32"}, "mu_dtype .*'int32'"),
    ({"mu_dtype": "float64"}, "mu_dtype .*'float64'"),
    ({"mu_dtype": "no such"}, "mu_dtype .*'no such'"),
    ({"mu_dtype": jnp.complex64}, "mu_dtype .*complex64"),
    ({"seed": 0.5}, "seed .*0.5"),
    ({"seed": None}, "seed .*None"),
    ({"axis_name": 0}, "axis_name .*0"),
    ({"axis_name": ["data"]}, r"axis_name .*\['data'\]"),
    ({"axis_name": ()}, r"axis_name .*\(\)"),
    ({"mask": 3}, "mask .*3"),
    ({"payload": "int8"}, "payload .*Quantizer, got 'int8'"),
    ({"payload": jnp.bfloat16}, "payload .*bfloat16"),
    ({"payload": slamb_jax.StochasticUniform}, "payload .*StochasticUniform"),
    ({"average_payload": 8}, "average_payload .*got 8"),
    ({"local_axis_name": 0, "axis_name": "node"}, "local_axis_name .*0"),
    ({"local_axis_name": "device"}, "local_axis_name .*'device' and None"),
    (
        {"local_axis_name": ("a", "b"), "axis_name": ("b", "c")},
        r"local_axis_name .*\('a', 'b'\) and \('b', 'c'\)",
    ),
    ({"overlap": 1}, "overlap .*True or False.*1"),
    ({"overlap": "yes"}, "overlap .*'yes'"),
    (
        {"selection": "top_k", "compress_ratio": {0: 0.5, 9: 0.1}},
        "compress_ratio .*a number .*top_k",
    ),
    ({"nu_of": "gradients"}, "nu_of must be .*'gradients'"),
    ({"nu_dtype": "float16"}, "nu_dtype .*'float16'"),
    ({"nu_dtype": "no such"}, "nu_dtype .*'no such'"),
    ({"stacked": 3}, "stacked must have bools .*3"),
    ({"stacked": {"w": "yes"}}, r"stacked must have bools .*'yes' at stacked\['w'\]"),
    ({"param_specs": "model"}, "param_specs must have .*PartitionSpec.*'model'"),
    ({"param_specs": {"w": 3}}, "param_specs must have .*PartitionSpec.*got 3"),
    ({"param_specs": P.UNCONSTRAINED}, "param_specs must have .*UNCONSTRAINED"),
    (
        {"param_specs": P("data"), "axis_name": "data"},
        "param_specs must not name the axis of the workers, 'data'",
    ),
]

CUT = {"w": P(None, "model"), "b": P()}


def ratio(**settings):
    return functools.partial(slamb_jax.layerwise_trust_ratio, **settings)


def scalar_stack():
    params = {"s": jnp.ones(())}
    return updating(slamb(stacked=True), params, params, params)


SHARDS = [
    (updating(ratio(param_specs=CUT)), "'model', which is not bound here"),
    (updating(slamb(stacked={"x": True})), "stacked must have the structure"),
    (scalar_stack(), r"stacked must be False .* params\['s'\]"),
    (
        updating(ratio(param_specs={"w": P(None, None, "a"), "b": None})),
        r"param_specs must have at most one entry .*\(2, 3\) at params\['w'\]",
    ),
    (of(slamb_jax.on_shards, "slamb", CUT), "tx .*'slamb'"),
    (of(slamb_jax.on_shards, optax.sgd(0.1), {"w": 1}), "param_specs .*got 1"),
    (
        lambda: slamb_jax.replicate(PARAMS, mesh_of(8), AXIS, CUT),
        "param_specs names 'model', which is not an axis of the mesh",
    ),
    (
        lambda: slamb_jax.replicate(PARAMS, mesh_of(8), AXIS, {"w": P()}),
        "param_specs must have one spec for each parameter",
    ),
    (
        lambda: slamb_jax.replicate(PARAMS, mesh_of(8), AXIS, {"w": P(AXIS), "b": P()}),
        "param_specs must not name the axis of the workers",
    ),
    (of(slamb_jax.train_in_bfloat16, optax.sgd), "inner .*function sgd"),
    (of(slamb_jax.train_in_bfloat16, optax.sgd(0.1), "up"), "rounding .*'up'"),
    (of(slamb_jax.train_in_bfloat16, optax.sgd(0.1), seed=0.5), "seed .*0.5"),
    (
        lambda: slamb_jax.train_in_bfloat16(optax.sgd(0.1)).init(
            {"w": jnp.ones(2, jnp.float16)}
        ),
        r"params must be bfloat16 or float32, got float16 at params\['w'\]",
    ),
    (
        updating(lambda: slamb_jax.train_in_bfloat16(optax.sgd(0.1)), params=None),
        "params must be passed",
    ),
]

LINKS = [
    (of(slamb_jax.accumulate, optax.sgd(1.0), 0), "every .*at least 1.*0"),
    (of(slamb_jax.accumulate, optax.sgd(1.0), 2.0), "every .*integer.*2.0"),
    (of(slamb_jax.accumulate, "sgd", 2), "tx .*'sgd'"),
    (of(slamb_jax.accumulate, slamb_jax.slamb, 2), "tx .*function slamb"),
    (of(slamb_jax.skip_not_finite, optax.sgd, None), "tx .*function sgd"),
    (of(slamb_jax.skip_not_finite, optax.sgd(1.0), 3), "axis_name .*3"),
    (of(slamb_jax.mask_momentum, "randk"), "compressor .*'randk'"),
    (of(slamb_jax.mask_momentum, optax.identity(), overlap=None), "overlap .*None"),
    (of(slamb_jax.TopK, patience=0), "patience .*at least 1.*0"),
    (of(slamb_jax.TopK, compress_ratio=0.0), "compress_ratio .*0.0"),
    (of(slamb_jax.Piecewise, {0: slamb_jax.TopK()}), "phases .*TopK.* at 0"),
    (rescaling(slamb_jax.TopK(min_size=1)), "selection=TopK.*slamb_jax.slamb"),
    (
        updating(lambda: slamb_jax.layerwise_trust_ratio(slamb_jax.TopK(min_size=1))),
        "selection=TopK.*slamb_jax.slamb",
    ),
    (of(slamb_jax.mask_momentum, optax.identity(), 1.5), "b1 .*1.5"),
    (of(slamb_jax.mask_momentum, optax.identity(), eps=0), "eps .*0"),
    (
        of(slamb_jax.randk_compress_with_error_feedback, "strided"),
        "selection .*strided",
    ),
    (of(slamb_jax.randk_compress_with_error_feedback, axis_name={}), r"axis_name .*\{"),
    (
        of(slamb_jax.randk_compress_with_error_feedback, payload="float8"),
        "payload .*'float8'",
    ),
    (of(slamb_jax.average_gradients, 3), "local_axis_name .*3"),
    (of(slamb_jax.StochasticUniform, 2), "bits .*2"),
    (of(slamb_jax.StochasticUniform, True), "bits .*True"),
    (of(slamb_jax.StochasticUniform, block_size=1), "block_size .*1"),
    (of(slamb_jax.StochasticUniform, error_feedback=1), "error_feedback .*1"),
    (of(slamb_jax.NaturalCompression, block_size=2.5), "block_size .*2.5"),
    (of(slamb_jax.NaturalCompression, seed="a"), "seed .*'a'"),
    (of(slamb_jax.average_parameters_every, 5, "a", payload=True), "payload .*True"),
    (
        of(slamb_jax.average_parameters_every, 5, "a", local_axis_name="a"),
        "local_axis_name .*'a' and 'a'",
    ),
    (of(slamb_jax.layerwise_trust_ratio, b3=2.0), "b3 .*2.0"),
    (of(slamb_jax.layerwise_trust_ratio, form="product "), "form .*'product '"),
    (of(slamb_jax.layerwise_trust_ratio, c_max=-1), "c_max .*-1"),
    (of(slamb_jax.elementwise_rescale, "strided"), "selection .*'strided'"),
    (of(slamb_jax.elementwise_rescale, b3="1"), "b3 .*'1'"),
    (of(slamb_jax.average_parameters_every, 0, None), "sync_every .*0"),
    (of(slamb_jax.average_parameters_every, 5, 7), "axis_name .*7"),
    (of(slamb_jax.average_parameters, PARAMS, "rows"), "axis_name='rows' is not bound"),
    (of(slamb_jax.Strided, compress_ratio=2.0), "compress_ratio .*2.0"),
    (of(slamb_jax.Strided, min_size="0"), "min_size .*'0'"),
    (of(slamb_jax.Permutation, seed="a"), "seed .*'a'"),
    (of(slamb_jax.Bernoulli, slack=-1.0), "slack .*-1.0"),
    (of(slamb_jax.Bernoulli, slack=INF), "slack .*inf"),
    (of(slamb_jax.replay_masks, np.ones((2, 3))), "masks .*boolean.*float64"),
    (of(slamb_jax.replay_masks, np.ones(3, bool)), r"masks .*\(3,\)"),
    (of(slamb_jax.replay_masks, np.ones((0, 3), bool)), r"masks .*\(0, 3\)"),
]


def bad_leaf(dtype):
    return {"ok": jnp.ones(3), "bad": jnp.ones(3, dtype)}


def injected():
    return optax.inject_hyperparams(slamb_jax.slamb)(0.01, compress_ratio=0.5)


def unbound():
    return slamb_jax.slamb(0.01, axis_name="model")


def unbound_on_a_mesh():
    tx = unbound()
    over_workers(lambda p: tx.update(p, tx.init(p), p)[0], "shard_map", 2)(
        stack(PARAMS, 2)
    )


def averaged_already():
    tx = slamb_jax.slamb(0.01, axis_name=AXIS)

    def step(p, x):
        grads = jax.grad(lambda p: jnp.sum((x @ p["w"]) ** 2))(p)
        return tx.update(grads, tx.init(p), p)[0]

    spec = jax.sharding.PartitionSpec
    split = jax.shard_map(
        step, mesh=mesh_of(2), in_specs=(spec(), spec(AXIS)), out_specs=spec()
    )
    jax.jit(split)({"w": PARAMS["w"]}, jnp.ones((4, 2)))


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
        updating(of(slamb_jax.layerwise_trust_ratio), params=None),
        "params must be passed to update, got None",
    ),
    (
        updating(of(slamb_jax.average_parameters_every, 2, None), params=None),
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
        updating(slamb(selection=slamb_jax.replay_masks(np.ones((4, 7), bool)))),
        r"masks .*\(4, 7\).* 9 elements",
    ),
    (updating(unbound), "axis_name='model' is not bound here"),
    (unbound_on_a_mesh, "axis_name='model' is not bound here"),
    (averaged_already, r"updates\['w'\] does not vary .*averaged"),
    (initial(injected, PARAMS), "compress_ratio.* must be static, got .*STATIC_ARGS"),
]

STATE = {"w": jnp.ones((4, 3)), "t": jnp.arange(4)}
REPLICAS = [
    (lambda: slamb_jax.replicate(PARAMS, mesh_of(2), "model"), "axis_name='model'"),
    (lambda: slamb_jax.replicate(PARAMS, "mesh", AXIS), "mesh .*'mesh'"),
    (lambda: slamb_jax.replicate({"w": "a"}, mesh_of(2), AXIS), r"tree\['w'\].*'a'"),
    (lambda: slamb_jax.per_worker_step(STEP, mesh_of(2), "x"), "axis_name='x'"),
    (lambda: slamb_jax.per_worker_step("step", mesh_of(2), AXIS), "step .*'step'"),
    (
        lambda: slamb_jax.per_worker_step(STEP, mesh_of(2), AXIS)(STATE, jnp.ones(2)),
        r"state\['t'\] .*2 replicas.*\(4,\)",
    ),
    (
        lambda: slamb_jax.per_worker_step(STEP, mesh_of(4), AXIS)(STATE, jnp.ones(6)),
        r"batch .*multiple of 4.*\(6,\)",
    ),
    (
        lambda: slamb_jax.per_worker_step(STEP, mesh_of(4), AXIS)(STATE, jnp.ones(())),
        r"batch .*multiple of 4.*\(\)",
    ),
    (
        lambda: slamb_jax.per_worker_step(STEP, mesh_of(2), AXIS, local_axis_name="x"),
        "local_axis_name='x' is not an axis",
    ),
    (
        lambda: slamb_jax.per_worker_step(STEP, mesh_of(2), AXIS, local_axis_name=AXIS),
        "local_axis_name .*'data' and 'data'",
    ),
    (lambda: on_groups(STEP, devices=6), r"batch .*multiple of 4.*\(6, 3\)"),
    (
        lambda: on_groups(lambda state, batch: ({"w": batch.mean(0)}, 0.0)),
        r"state\['w'\] .*may differ .*local_axis_name='device'",
    ),
    (summed_in_the_group, r"updates\['w'\] .*'device'.*sums"),
    (of(slamb_jax.consolidate, {"s": jnp.ones(())}), r"tree\['s'\] .*\(\)"),
    (of(slamb_jax.consolidate, {"s": jnp.ones((0, 2))}), r"tree\['s'\] .*\(0, 2\)"),
    (of(slamb_jax.simulated_replicas, PARAMS, 0), "workers .*0"),
    (of(slamb_jax.simulated_replicas, PARAMS, 2.0), "workers .*2.0"),
    (of(slamb_jax.simulated_step, STEP, -1, AXIS), "workers .*-1"),
    (
        lambda: slamb_jax.simulated_step(STEP, 3, AXIS)(STATE, jnp.ones(3)),
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

NETWORK = slamb_jax.Network(workers=8, link=1e9)
ADVICE = [
    (of(slamb_jax.Network, workers=1, link=1e9), "workers .*1"),
    (of(slamb_jax.Network, workers=8, link=0), "link .*0"),
    (of(slamb_jax.Network, workers=8, link=INF), "link .*inf"),
    (of(slamb_jax.Network, workers=8, link=1e9, latency=-1), "latency .*-1"),
    (of(slamb_jax.Network, 8, 1e9, workers_per_node=3), "workers_per_node.*8 and 3"),
    (of(slamb_jax.Network, 8, 1e9, workers_per_node=8), "local_link .*inf"),
    (of(NETWORK.seconds, "broadcast", 8), "kind .*'broadcast'"),
    (of(NETWORK.seconds, "all-reduce", -8), "payload_bytes .*-8"),
    (of(slamb_jax.advise, 1e6, "network", step_seconds=1.0), "network .*'network'"),
    (of(slamb_jax.advise, 0, NETWORK, step_seconds=1.0), "params .*0"),
    (of(slamb_jax.advise, NAN, NETWORK, step_seconds=1.0), "params .*nan"),
    (of(slamb_jax.advise, {}, NETWORK, step_seconds=1.0), "params must have elements"),
    (of(slamb_jax.advise, 1e6, NETWORK, step_seconds=0.0), "step_seconds .*0.0"),
    (
        of(slamb_jax.advise, 1e6, NETWORK, step_seconds=1.0, optimizer_seconds=3),
        "optimizer_seconds .*3",
    ),
    (
        of(slamb_jax.advise, 1e6, NETWORK, step_seconds=1.0, payload="int8"),
        "payload .*'int8'",
    ),
    (
        of(slamb_jax.advise, 1e6, NETWORK, step_seconds=1.0, average_payload=4),
        "average_payload .*4",
    ),
    (
        of(slamb_jax.advise, 1e6, NETWORK, step_seconds=1.0, hierarchical=True),
        "hierarchical=True .*workers_per_node=1",
    ),
    (
        of(slamb_jax.advise, 1e6, NETWORK, step_seconds=1.0, hierarchical="yes"),
        "hierarchical .*'yes'",
    ),
    (
        lambda: slamb_jax.WireReport(()).bytes_over(mesh_of(2), "model"),
        "mesh must have the axis 'model'",
    ),
    (of(slamb_jax.wire_report, "no program"), "program .*'no program'"),
    (of(slamb_jax.wire_report, 3), "program .*3"),
]


def saved(directory, state=None):
    with slamb_jax.Checkpoints(directory / "c") as checkpoints:
        checkpoints.save(3, {"w": jnp.ones((4, 3))} if state is None else state)
    return directory / "c"


def restoring(like):
    def call(directory):
        with slamb_jax.Checkpoints(saved(directory)) as checkpoints:
            checkpoints.restore(like)

    return call


def saving(*args, **settings):
    def call(directory):
        with slamb_jax.Checkpoints(directory) as checkpoints:
            checkpoints.save(*args, **settings)

    return call


def saving_twice(directory):
    with slamb_jax.Checkpoints(saved(directory)) as checkpoints:
        checkpoints.save(3, {"w": jnp.ones((4, 3))})


def in_a_file(directory):
    (directory / "file").write_text("")
    slamb_jax.Checkpoints(directory / "file")


def on_a_full_disk(directory):
    del directory
    slamb_jax.Checkpoints("/proc/nowhere")  # takes no files, not even root's


def of_a_later_format(directory):
    about = saved(directory) / "3" / "about" / "metadata"
    about.write_text(about.read_text().replace('"format": 1', '"format": 2'))
    with slamb_jax.Checkpoints(directory / "c") as checkpoints:
        checkpoints.restore({"w": jnp.ones((4, 3))})


CHECKPOINTS = [
    (lambda directory: slamb_jax.Checkpoints(3), "directory .*3"),
    (lambda directory: slamb_jax.Checkpoints(directory, keep=1), "keep .*1"),
    (in_a_file, "directory .*file"),
    (on_a_full_disk, "directory .*/proc/nowhere"),
    (saving(-1, STATE), "step .*-1"),
    (saving(1.5, STATE), "step .*1.5"),
    (saving(1, {"w": jnp.ones(())}), r"state\['w'\] .*\(\)"),
    (saving(1, {}), r"state .*leaves.*\{\}"),
    (saving(1, STATE, {"rng": object()}), "extra .*object"),
    (saving(1, STATE, {"x": np.ones(2)}), "extra .*ndarray"),
    (saving(1, STATE, [1]), r"extra .*\[1\]"),
    (saving(1, STATE, rtol=NAN), "rtol .*nan"),
    (saving_twice, "step .*not there yet, got 3"),
    (restoring({"w": jnp.ones((2, 3))}), "is of 4 workers, expected 2"),
    (restoring({"v": jnp.ones((4, 3))}), r"\['v'\] is missing; \['w'\] is not expec"),
    (restoring({"w": jnp.ones((4, 2))}), r"\['w'\] has shape \[3\], expected \[2\]"),
    (restoring({"w": jnp.ones((4, 3), jnp.bfloat16)}), "float32, expected bfloat16"),
    (of_a_later_format, "has format 2, and this version of slamb_jax reads 1"),
]


def resizing(options, make=saved):
    def call(directory):
        source = make(directory)
        _cli.main(["resize", str(source), *options.format(d=directory).split()])

    return call


def nothing(directory):
    return directory / "nothing"


def no_checkpoints(directory):
    (directory / "empty").mkdir()
    return directory / "empty"


def occupied(directory):
    (directory / "out").mkdir()
    (directory / "out" / "thesis").write_text("")
    return saved(directory)


def unlike(directory):
    return saved(directory, {"t": jnp.arange(4)})


def damaged(directory):
    about = saved(directory) / "3" / "about" / "metadata"
    found = json.loads(about.read_text())
    found["leaves"]["['w']"]["checksums"][0][0] ^= 1
    about.write_text(json.dumps(found))
    return directory / "c"


ADVISE = "advise --params 1M --workers 8 --link 1Gbit --step 1s --lamb 1ms --slamb 1ms "
COMMANDS = [
    (command(""), "arguments are required: command"),
    (command("average"), "invalid choice: 'average'"),
    (command("advise --params 1M"), "required: --workers, --link, --step"),
    (command(ADVISE + "--params lots"), "--params: .*'lots'"),
    (command(ADVISE + "--workers 1"), "workers .*1"),
    (command(ADVISE + "--link 10"), "--link: .*'10'"),
    (command(ADVISE + "--step 5"), "--step: .*'5'"),
    (command(ADVISE + "--mu-dtype int8"), "mu_dtype .*'int8'"),
    (command(ADVISE + "--compress-ratio nan"), "compress_ratio .*nan"),
    (command(ADVISE + "--payload int8"), "--payload: .*uniform8.*'int8'"),
    (command(ADVISE + "--hierarchical"), "hierarchical=True .*workers_per_node=1"),
    (command(ADVISE + "--overlap 3"), "unrecognized arguments: 3"),
    (command(ADVISE + "--speed 3"), "unrecognized arguments: --speed 3"),
    (resizing("{d}/out --workers 0"), "workers .*0"),
    (resizing("{d}/out --workers two"), "--workers: .*'two'"),
    (resizing("{d}/out"), "required: --workers"),
    (resizing("--workers 2"), "required: OUT"),
    (resizing("{d}/out --workers 2", nothing), "CHECKPOINT .*nothing"),
    (resizing("{d}/out --workers 2", no_checkpoints), "CHECKPOINT .*empty"),
    (resizing("{d}/out --workers 2", occupied), "OUT .*empty or new.*out"),
    (resizing("{d}/out --workers 2", unlike), r"\['t'\] must be the same on all"),
    (resizing("{d}/out --workers 2", damaged), r"damaged .*\['w'\]"),
    (resizing("/proc/nowhere --workers 2"), "directory .*/proc/nowhere"),
]


def reading(contents, context=64):
    def call(directory):
        for name, content in contents.items():
            (directory / name).write_bytes(content)
        data.load(data.text_files([directory]), context)

    return call


def running(**settings):
    return lambda directory: byte_lm(Config(**({"out": directory} | settings)))


CONFIGS = [
    (running(workers=0), "workers .*0"),
    (running(workers=2.5), "workers .*2.5"),
    (running(steps=0), "steps .*0"),
    (running(batch=0), "batch .*0"),
    (running(context=-1), "context .*-1"),
    (running(layers=0), "layers .*0"),
    (running(width=96, heads=5), "width .*heads.*96 and 5"),
    (running(lamb_rate=NAN), "lamb_rate .*nan"),
    (running(slamb_rate=-1.0), "slamb_rate .*-1.0"),
    (running(compress_ratio=0.0), "compress_ratio .*0.0"),
    (running(b3=2.0), "b3 .*2.0"),
    (running(sync_every=0), "sync_every .*0"),
    (running(selection="best"), "selection .*'best'"),
    (running(evaluations=0), "evaluations .*0"),
]
BYTE_LM = [
    (running(files=(Path("/nowhere/text"),)), "--files: .*/nowhere/text"),
    (running(out=Path("/proc/nowhere")), "--out: .*/proc/nowhere"),
    (reading({}), "--files: 0 bytes in 0 files"),
    (reading({"a": b""}), "--files: 0 bytes in 1 files"),
    (reading({"a": b"abc" * 50}), "--files: 150 bytes in 1 files"),
]


def everything():
    """All rows: ``(call, error, message)``."""
    rows = [(slamb(**s), ValueError, m) for s, m in SETTINGS]
    for group in (SHARDS, LINKS, TREES, REPLICAS, ADVICE, CHECKPOINTS, CONFIGS):
        rows += [(call, ValueError, m) for call, m in group]
    return rows + [(call, SystemExit, m) for call, m in COMMANDS + BYTE_LM]


def takes_directory(call):
    return not isinstance(call, functools.partial) and bool(
        inspect.signature(call).parameters
    )
