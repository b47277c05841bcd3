"""Wrong settings of the links, of selections and payloads, and of the wrappers."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import optax

import slamb_jax
from slamb_jax import directions, payloads, selections
from tests.workers import AXIS, P
from tests.wrong_uses.common import INF, NAN, PARAMS, bad, of, slamb, updating

NARROW = slamb_jax.train_in_bfloat16(optax.sgd(0.1))
HALF = jnp.ones(2, jnp.float16)
SPECS = {"w": P(None, "model"), "b": P()}
ALONE, STRIDED = slamb_jax.Exchange(), selections.Strided()
momentum = partial(slamb_jax.mask_momentum, ALONE)
trust_ratio = partial(slamb_jax.layerwise_trust_ratio, ALONE)
feedback = partial(slamb_jax.randk_compress_with_error_feedback, ALONE)
doubled = slamb_jax.randk_compress_with_error_feedback(
    slamb_jax.Exchange(compress_ratio=0.5)
)


def ratio(specs):
    exchange = slamb_jax.Exchange(param_specs=specs)
    return updating(of(slamb_jax.layerwise_trust_ratio, exchange))


def diagonal(rows, columns):
    """A matrix of which one dimension is named twice, or that lacks one."""
    numbers = directions.DimensionNumbers(rows, columns)
    make = of(directions.muon, weight_dimension_numbers={"w": numbers, "b": None})
    return updating(make)


def scalar_stack():
    params = {"s": jnp.ones(())}
    return updating(slamb(stacked=True), params, params, params)


SHARDS = [
    (ratio(SPECS), "'model', and the mesh here has none"),
    (updating(slamb(stacked={"x": True})), "stacked must have the structure"),
    (scalar_stack(), r"stacked must be False .* params\['s'\]"),
    (ratio({"w": P(None, None, None), "b": None}), r"entry .*\(2, 3\) at .*\['w'\]"),
    (of(slamb_jax.on_shards, "slamb", slamb_jax.Exchange()), "tx .*'slamb'"),
    (of(slamb_jax.on_shards, optax.sgd(0.1), {"w": 1}), "exchange must be .*'w': 1"),
    *bad(slamb_jax.train_in_bfloat16, "inner", optax.sgd),
    *bad(partial(slamb_jax.train_in_bfloat16, optax.sgd(0.1)), "rounding", "up"),
    *bad(partial(slamb_jax.train_in_bfloat16, optax.sgd(0.1)), "seed", 0.5),
    (of(NARROW.init, {"w": HALF}), r"bfloat16 or float32, got float16 at .*\['w'\]"),
    (updating(NARROW, params=None), "params must be passed"),
]

DIRECTIONS = [
    *bad(directions.adam, "b2", 1.0),
    *bad(directions.adam, "eps", 0, "1"),
    *bad(directions.adam, "eps_root", -1e-8),
    *bad(directions.adam, "form", "product "),
    (of(directions.adam, form="sum", bias_correction=False), "bias_correction=False"),
    *bad(directions.adam, "nu_of", "gradients"),
    *bad(directions.adam, "nu_dtype", "float16"),
    (updating(directions.adam), "nu_of='gradient' needs .*grad.*mask_momentum"),
    *bad(directions.lion, "b1", 1.0),
    *bad(directions.lion, "b2", -0.1, 0.0, None),
    (updating(directions.lion), "grad must be .*None: slamb_jax.mask_momentum"),
    *bad(directions.muon, "ns_steps", 0, 2.5),
    *bad(directions.muon, "eps", 0.0),
    *bad(directions.muon, "ns_coeffs", (1.0, 2.0), ((1.0, 2.0, 3.0),)),
    *bad(directions.muon, "consistent_rms", "0.2"),
    (diagonal(0, -2), r"weight_dimension_numbers .*once, got .*\(2, 3\)"),
    (diagonal(2, 0), r"weight_dimension_numbers .*got .*\(2, 3\)"),
]

OPTIMIZERS = [
    row
    for optimizer, name, *values in (
        (slamb_jax.adamw, "b1", 1.0),
        (slamb_jax.adamw, "eps_root", -1.0),
        (slamb_jax.adamw, "nu_of", "mean"),
        (slamb_jax.lion, "b2", 1.5),
        (slamb_jax.lion, "mu_dtype", "int32"),
        (slamb_jax.muon, "beta", 1.0),
        (slamb_jax.muon, "adam_b1", -1.0),
        (slamb_jax.muon, "adam_b2", 1.0),
        (slamb_jax.sgd, "momentum", 1.0, "0.9"),
        (slamb_jax.sgd, "nesterov", 1),
    )
    for row in bad(partial(optimizer, 0.01, ALONE), name, *values)
]
OPTIMIZERS += [
    row
    for optimizer in (slamb_jax.adamw, slamb_jax.lion, slamb_jax.muon, slamb_jax.sgd)
    for row in (
        *bad(partial(optimizer, exchange=ALONE), "learning_rate", NAN, None),
        (of(optimizer, 0.01, "data"), r"exchange .*'data': .*Exchange\('data'\)"),
    )
]
OPTIMIZERS += [
    (of(slamb_jax.muon, 0.01, slamb_jax.Exchange(param_specs=SPECS)), "specs=.*muon"),
]

ANY = "exchange must be a slamb_jax.Exchange, got "

LINKS = [
    *DIRECTIONS,
    *OPTIMIZERS,
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
    *bad(partial(slamb_jax.accumulate, optax.sgd(1.0)), "every", 0, 2.0),
    *bad(partial(slamb_jax.accumulate, every=2), "tx", "sgd", slamb_jax.slamb),
    *bad(partial(slamb_jax.skip_not_finite, exchange=ALONE), "tx", optax.sgd),
    *bad(partial(slamb_jax.skip_not_finite, optax.sgd(1.0)), "exchange", 3, AXIS),
    *bad(momentum, "b1", 1.5),
    *bad(momentum, "direction", "adam", directions.adam),
    *bad(momentum, "nesterov", 1),
    *bad(momentum, "bias_correction", None),
    *bad(momentum, "compressor", "randk"),
    (updating(of(momentum, compressor=doubled)), "compressor .*keep_residual=Fal"),
    *bad(feedback, "keep_residual", 1),
    *bad(trust_ratio, "form", "product "),
    *bad(trust_ratio, "c_max", -1),
    (of(slamb_jax.average_parameters, PARAMS, "rows"), "axis_name='rows' is not bound"),
    *bad(payloads.StochasticUniform, "bits", 2, True),
    *bad(payloads.StochasticUniform, "block_size", 1),
    *bad(payloads.StochasticUniform, "error_feedback", 1),
    *bad(payloads.LargestOf, "count", 1, 128, 2.5),
    *bad(payloads.LargestOf, "block_size", 2.5),
    *bad(payloads.LargestOf, "seed", "a"),
    *bad(selections.Strided, "compress_ratio", 2.0),
    *bad(selections.Strided, "min_size", "0"),
    *bad(selections.Permutation, "seed", "a"),
    *bad(selections.Bernoulli, "slack", -1.0, INF),
    *bad(selections.Schedule, "phases", {}, STRIDED),
    (of(selections.Schedule, {1: STRIDED}), "phases .*one of them 0"),
    (of(selections.Schedule, {0: STRIDED, 1.5: STRIDED}), r"phases .*1\.5"),
    (of(selections.Schedule, {0: 0.5}), "phases .*0.5 at 0"),
    (of(selections.Schedule, {0: selections.Strided}), "phases .*Strided.* at 0"),
    (of(selections.replay_masks, [np.ones((2, 3))]), "masks .*boolean.*float64"),
    (of(selections.replay_masks, [np.ones(3, bool)]), r"masks .*\(3,\)"),
    (of(selections.replay_masks, [np.ones((0, 3), bool)]), r"masks .*\(0, 3\)"),
]
