"""Wrong settings of the parts, and of what goes around the chain."""

import functools

import jax.numpy as jnp
import numpy as np
import optax

import slamb_jax
from tests.workers import AXIS, P, mesh_of, over_workers, stack
from tests.wrong_uses.common import INF, PARAMS, of, slamb, updating

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


def rescaling(selection):
    """A call that rescales once, on two workers."""

    def call():
        tx = slamb_jax.elementwise_rescale(selection, axis_name=AXIS)
        update = over_workers(lambda u: tx.update(u, tx.init(u))[0], "vmap", 2)
        update(stack(PARAMS, 2))

    return call


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
    (of(slamb_jax.StochasticUniform, mean_bits=16), "mean_bits .*16"),
    (of(slamb_jax.StochasticUniform, block_size=1), "block_size .*1"),
    (of(slamb_jax.StochasticUniform, error_feedback=1), "error_feedback .*1"),
    (of(slamb_jax.NaturalCompression, 3), "bits .*3"),
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
