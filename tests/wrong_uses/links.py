"""Wrong settings of the links, of optimizers, and of the wrappers."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

import slamb_jax
from slamb_jax.links import decay, directions
from tests.workers import AXIS, P
from tests.wrong_uses.common import NAN, PARAMS, bad, of, slamb, updating

NARROW = slamb_jax.train_in_bfloat16(optax.sgd(0.1))
HALF = jnp.ones(2, jnp.float16)
SPECS = {"w": P(None, "model"), "b": P()}
ALONE, PAPER = slamb_jax.Exchange(), slamb_jax.Exchange.paper()
momentum = partial(slamb_jax.mask_momentum, ALONE)
trust_ratio = partial(slamb_jax.layerwise_trust_ratio, ALONE)
skipping = partial(slamb_jax.skip_not_finite, optax.sgd(1.0))


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


def without_units():
    """A state of a single worker, under an exchange in codes."""
    tx, params = slamb_jax.adamw(0.01, slamb_jax.Exchange(AXIS)), jnp.ones(3)
    state = slamb_jax.adamw(0.01, ALONE).init(params)
    update = lambda g: tx.update(g, state, params)[0]  # noqa: E731
    return lambda: jax.vmap(update, axis_name=AXIS)(jnp.ones((2, 3)))


def on_a_mesh(specs):
    """Shards of parameters that do not vary over their axis."""
    tx = slamb_jax.layerwise_trust_ratio(slamb_jax.Exchange(param_specs=specs))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("model",))
    update = lambda p: tx.update(p, tx.init(p), p)[0]  # noqa: E731
    split = jax.shard_map(update, mesh=mesh, in_specs=P(), out_specs=P())
    return lambda: jax.eval_shape(split, PARAMS)


SHARDS = [
    (ratio(SPECS), "'model', and the mesh here has none"),
    (on_a_mesh(SPECS), r"'model'\) for a leaf that does not vary over .*'model'"),
    (updating(slamb(stacked={"x": True})), "stacked must have the structure"),
    (scalar_stack(), r"stacked must be False .* params\['s'\]"),
    (ratio({"w": P(None, None, None), "b": None}), r"entry .*\(2, 3\) at .*\['w'\]"),
    (of(slamb_jax.on_shards, "slamb", ALONE), "tx .*'slamb'"),
    (of(slamb_jax.on_shards, optax.sgd(0.1), {"w": 1}), "exchange must be .*'w': 1"),
]

WRAPPERS = [
    *bad(slamb_jax.train_in_bfloat16, "inner", optax.sgd),
    *bad(partial(slamb_jax.train_in_bfloat16, optax.sgd(0.1)), "rounding", "up"),
    *bad(partial(slamb_jax.train_in_bfloat16, optax.sgd(0.1)), "seed", 0.5),
    (of(NARROW.init, {"w": HALF}), r"bfloat16 or float32, got float16 at .*\['w'\]"),
    (updating(NARROW, params=None), "params must be passed"),
    *bad(partial(slamb_jax.accumulate, optax.sgd(1.0)), "every", 0, 2.0),
    *bad(partial(slamb_jax.accumulate, every=2), "tx", "sgd", slamb_jax.slamb),
    *bad(partial(slamb_jax.skip_not_finite, exchange=ALONE), "tx", optax.sgd),
    *bad(skipping, "exchange", 3, AXIS),
]

DIRECTIONS = [
    *bad(directions.adam, "eps", 0, "1"),
    *bad(directions.adam, "eps_root", -1e-8),
    (updating(directions.adam), "second_moment, .*mask_momentum with a b2"),
    *bad(directions.muon, "ns_steps", 0, 2.5),
    *bad(directions.muon, "eps", 0.0),
    *bad(directions.muon, "ns_coeffs", (1.0, 2.0), ((1.0, 2.0, 3.0),)),
    *bad(directions.muon, "consistent_rms", "0.2"),
    (diagonal(0, -2), r"weight_dimension_numbers .*once, got .*\(2, 3\)"),
    (diagonal(2, 0), r"weight_dimension_numbers .*got .*\(2, 3\)"),
    (
        updating(of(directions.muon, weight_dimension_numbers={"x": None})),
        "weight_dimension_numbers must have the structure",
    ),
]

OPTIMIZERS = [
    row
    for optimizer, name, *values in (
        (slamb_jax.adamw, "b1", 1.0),
        (slamb_jax.adamw, "b2", None, 1.0),
        (slamb_jax.adamw, "eps_root", -1.0),
        (slamb_jax.lion, "b2", 1.5, 0.0, None),
        (slamb_jax.lion, "mu_dtype", "int32"),
        (slamb_jax.muon, "beta", 1.0),
        (slamb_jax.muon, "adam_b1", -1.0),
        (slamb_jax.muon, "adam_b2", 1.0),
        (slamb_jax.muon, "adam_eps_root", -1.0),
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
        (of(optimizer, 0.01, PAPER), "selection=Strided.*slamb.*without one"),
    )
]
OPTIMIZERS += [
    *(
        (
            of(slamb_jax.muon, 0.01, slamb_jax.Exchange(AXIS, param_specs=SPECS, **x)),
            "muon takes param_specs only .*payload='ternary', .*: give payload='uni",
        )
        for x in ({}, {"outer": optax.sgd(1.0)})
    ),
    (without_units(), "payload='ternary' needs .* without nu_mean.*: set it to"),
]

LINKS = [
    *WRAPPERS,
    *DIRECTIONS,
    *OPTIMIZERS,
    *(
        (of(link, "data"), r"exchange must be .*, got 'data': slamb_jax.Exchange\('da")
        for link in (
            slamb_jax.scale_by_slamb,
            slamb_jax.mask_momentum,
            slamb_jax.layerwise_trust_ratio,
            slamb_jax.average_parameters_every,
            slamb_jax.average_gradients,
        )
    ),
    *bad(momentum, "b1", 1.5),
    (of(momentum, b1=(0.9, -0.1)), r"b1 must be in .*got -0.1"),
    *bad(momentum, "b2", 1.0),
    *bad(momentum, "share", 1.0),
    *bad(momentum, "direction", "adam", directions.adam),
    *bad(momentum, "nesterov", 1),
    *bad(momentum, "bias_correction", None),
    *bad(momentum, "nu_dtype", "float16"),
    (updating(of(momentum, b1={"w": 0.9})), "b1 must have the structure"),
    (updating(of(momentum, b1=lambda params: 1.5)), "b1 must be in .*got 1.5"),
    (of(slamb_jax.scale_by_slamb, ALONE), r"must have a selection, got Exchange\(\)"),
    *bad(trust_ratio, "form", "product "),
    *bad(trust_ratio, "c_max", -1),
    *bad(decay.add_decayed_weights, "weight_decay", -1.0),
    (of(slamb_jax.average_parameters_every, ALONE), "payload='ternary' would round"),
    (of(slamb_jax.average_parameters, PARAMS, "rows"), "axis_name='rows' is not bound"),
]
