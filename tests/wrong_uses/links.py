"""Wrong settings of the links, of selections and payloads, and of the wrappers."""

import jax.numpy as jnp
import numpy as np
import optax

import slamb_jax
from slamb_jax import payloads, selections
from tests.workers import AXIS, P, mesh_of
from tests.wrong_uses.common import INF, PARAMS, of, slamb, updating, with_exchange

SPECS = {"w": P(None, "model"), "b": P()}
TOP_K = {"selection": selections.TopK(min_size=1)}


def ratio(**settings):
    return with_exchange(slamb_jax.layerwise_trust_ratio, exchange=settings)


def replicating(devices, specs):
    exchange = {"axis_name": AXIS, "param_specs": specs}
    return lambda: slamb_jax.replicate(
        PARAMS, mesh_of(devices), slamb_jax.Exchange(**exchange)
    )


def scalar_stack():
    params = {"s": jnp.ones(())}
    return updating(slamb(stacked=True), params, params, params)


SHARDS = [
    (updating(ratio(param_specs=SPECS)), "'model', and the mesh here has none"),
    (updating(slamb(stacked={"x": True})), "stacked must have the structure"),
    (scalar_stack(), r"stacked must be False .* params\['s'\]"),
    (
        updating(ratio(param_specs={"w": P(None, None, None), "b": None})),
        r"param_specs must have at most one entry .*\(2, 3\) at params\['w'\]",
    ),
    (of(slamb_jax.on_shards, "slamb", slamb_jax.Exchange()), "tx .*'slamb'"),
    (of(slamb_jax.on_shards, optax.sgd(0.1), {"w": 1}), "exchange must be .*'w': 1"),
    (
        replicating(8, SPECS),
        "param_specs names 'model', which is not an axis of the mesh",
    ),
    (replicating(8, {"w": P()}), "param_specs must have one spec for each parameter"),
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

ANY = "exchange must be a slamb_jax.Exchange, got "

LINKS = [
    *(
        (of(link, "data"), ANY + r"'data': slamb_jax.Exchange\('data'\)")
        for link in (
            slamb_jax.scale_by_slamb,
            slamb_jax.mask_momentum,
            slamb_jax.randk_compress_with_error_feedback,
            slamb_jax.layerwise_trust_ratio,
            slamb_jax.elementwise_rescale,
            slamb_jax.average_parameters_every,
            slamb_jax.average_gradients,
        )
    ),
    (of(slamb_jax.accumulate, optax.sgd(1.0), 0), "every .*at least 1.*0"),
    (of(slamb_jax.accumulate, optax.sgd(1.0), 2.0), "every .*integer.*2.0"),
    (of(slamb_jax.accumulate, "sgd", 2), "tx .*'sgd'"),
    (of(slamb_jax.accumulate, slamb_jax.slamb, 2), "tx .*function slamb"),
    (of(slamb_jax.skip_not_finite, optax.sgd, slamb_jax.Exchange()), "tx .*sgd"),
    (of(slamb_jax.skip_not_finite, optax.sgd(1.0), 3), ANY + "3"),
    (with_exchange(slamb_jax.mask_momentum, 1.5), "b1 .*1.5"),
    (with_exchange(slamb_jax.mask_momentum, eps=0), "eps .*0"),
    (
        with_exchange(slamb_jax.mask_momentum, compressor="randk"),
        "compressor .*'randk'",
    ),
    (
        with_exchange(slamb_jax.randk_compress_with_error_feedback, keep_residual=1),
        "keep_residual .*1",
    ),
    (with_exchange(slamb_jax.layerwise_trust_ratio, 2.0), "b3 .*2.0"),
    (
        with_exchange(slamb_jax.layerwise_trust_ratio, form="product "),
        "form .*'product '",
    ),
    (with_exchange(slamb_jax.layerwise_trust_ratio, c_max=-1), "c_max .*-1"),
    (with_exchange(slamb_jax.elementwise_rescale, "1"), "b3 .*'1'"),
    (
        with_exchange(slamb_jax.layerwise_trust_ratio, exchange=TOP_K),
        "selection=TopK.*scale_by_slamb",
    ),
    (
        with_exchange(slamb_jax.elementwise_rescale, exchange=TOP_K),
        "selection=TopK.*scale_by_slamb",
    ),
    (of(slamb_jax.average_parameters, PARAMS, "rows"), "axis_name='rows' is not bound"),
    (of(payloads.StochasticUniform, 2), "bits .*2"),
    (of(payloads.StochasticUniform, True), "bits .*True"),
    (of(payloads.StochasticUniform, mean_bits=16), "mean_bits .*16"),
    (of(payloads.StochasticUniform, block_size=1), "block_size .*1"),
    (of(payloads.StochasticUniform, error_feedback=1), "error_feedback .*1"),
    (of(payloads.NaturalCompression, 4), "bits .*4"),
    (of(payloads.NaturalCompression, block_size=2.5), "block_size .*2.5"),
    (of(payloads.NaturalCompression, seed="a"), "seed .*'a'"),
    (of(selections.Strided, compress_ratio=2.0), "compress_ratio .*2.0"),
    (of(selections.Strided, min_size="0"), "min_size .*'0'"),
    (of(selections.Permutation, seed="a"), "seed .*'a'"),
    (of(selections.Bernoulli, slack=-1.0), "slack .*-1.0"),
    (of(selections.Bernoulli, slack=INF), "slack .*inf"),
    (of(selections.TopK, patience=0), "patience .*at least 1.*0"),
    (of(selections.TopK, compress_ratio=0.0), "compress_ratio .*0.0"),
    (of(selections.Schedule, {}), "phases .*{}"),
    (of(selections.Schedule, {1: selections.Strided()}), "phases .*one of them 0"),
    (
        of(selections.Schedule, selections.Strided()),
        "phases must be a mapping.*Strided",
    ),
    (
        of(selections.Schedule, {0: selections.Strided(), 1.5: selections.Strided()}),
        r"phases .*1\.5",
    ),
    (of(selections.Schedule, {0: 0.5}), "phases .*0.5 at 0"),
    (of(selections.Schedule, {0: selections.Strided}), "phases .*Strided.* at 0"),
    (of(selections.Schedule, {0: selections.TopK()}), "phases .*state.*TopK.* at 0"),
    (of(selections.replay_masks, [np.ones((2, 3))]), "masks .*boolean.*float64"),
    (of(selections.replay_masks, [np.ones(3, bool)]), r"masks .*\(3,\)"),
    (of(selections.replay_masks, [np.ones((0, 3), bool)]), r"masks .*\(0, 3\)"),
]
