"""The methods: the table of their names, and the middle of the rates to look among."""

import functools
from typing import Any

import optax

import slamb_jax
from benchmarks import rivals
from benchmarks.frontier.grid import Setting
from benchmarks.frontier.kinds import MIN_SIZE as MIN_SIZE
from benchmarks.frontier.kinds import (
    adamw,
    averaged,
    dense,
    exchanging,
    in_sum_form,
    lion,
    local,
    matrices,
    mean_first,
    of_one,
    on,
    on_matrices,
    one_bit_lamb,
    rival,
    sparseloco,
)
from benchmarks.frontier.wire import Made
from examples.common.simulated import AXIS
from slamb_jax import Exchange

# b2 of every Adam, as language models are trained.
ADAM: dict[str, Any] = {"b2": 0.95}
MUON: dict[str, Any] = {"adam_b2": 0.95}
DENSE = "AdamW"  # the row that shares are of
ADAMW = functools.partial(optax.adamw, weight_decay=0.0)
LION = functools.partial(optax.lion, weight_decay=0.0)
OPTAX_MUON = on_matrices(optax.contrib.muon)
muon = on_matrices(slamb_jax.muon)
GRADIENT, MOMENTUM = {"nu_of": "gradient"}, {"nu_of": "momentum"}  # in recorded keys
OUTER = ((0.7, 0.9), (0.7, 0.5), (1.0, 0.5), (1.0, 0.0))
LARGEST = {7: 0.0113, 31: 0.016, 127: 0.0226}  # of so many, and the middle of the rates

METHODS = {
    "LAMB": rival(0.02, on(optax.lamb, rivals.dense)),
    "LAMB, v of m": dense(of_one(slamb_jax.lamb), 0.02, key=MOMENTUM),
    "AdamW": dense(ADAMW, 0.016, **ADAM),
    "AdamW, bfloat16": rival(0.016, on(ADAMW, rivals.dense_bfloat16), **ADAM),
    "AdamW, b1 0.8": dense(ADAMW, 0.016, b1=0.8, **ADAM),
    "AdamW, v of m": dense(of_one(adamw), 0.0113, key=MOMENTUM, **ADAM),
    **{
        f"{name}, outer {o[0]:g} {o[1]:g}": dense(make, rate, outer=o, key=key, **how)
        for name, make, rate, key, how in (
            ("LAMB", in_sum_form, 0.02, {}, {}),
            ("AdamW", ADAMW, 0.016, GRADIENT, ADAM),
            ("Lion", LION, 0.002, {}, {}),
            ("Muon", OPTAX_MUON, 0.0453, GRADIENT, MUON),
        )
        for o in OUTER[:3]
    },
    "Lion": dense(LION, 0.002),
    "Muon": dense(OPTAX_MUON, 0.0453, key=GRADIENT, **MUON),
    "Muon, v of m": dense(of_one(muon), 0.0453, key=MOMENTUM, **MUON),
    "adamw, 4 bits, H 1": mean_first(adamw, 0.008, "uniform4", **ADAM),
    "adamw, H 1": mean_first(adamw, 0.008, **ADAM),
    **{
        f"adamw, largest of {k}": mean_first(adamw, rate, f"largest_of_{k}", **ADAM)
        for k, rate in LARGEST.items()
    },
    "adamw, b1 0.8, H 1": mean_first(adamw, 0.008, b1=0.8, **ADAM),
    "adamw, signs, b1 0.8": mean_first(adamw, 0.0113, "sign", b1=0.8, **ADAM),
    # Of the recorded runs: each worker orthogonalized its own momentum, in 0.3.0. Now
    # muon takes the mean first, which is another method in 4 bits, and refuses three
    # values.
    "muon, 4 bits, H 1": mean_first(
        muon, 0.0453, "uniform4", "of the directions", **MUON
    ),
    "muon, 8 bits": mean_first(muon, 0.0453, "uniform8", **MUON),
    "muon, H 1": mean_first(muon, 0.0453, mean="of the directions", **MUON),
    **{
        f"{name}, outer, H {h}, outer {o[0]:g} {o[1]:g}": local(make, rate, h, o, **how)
        for name, make, rate, how in (
            ("adamw", adamw, 0.008, ADAM),
            ("muon", muon, 0.032, MUON),
        )
        for h in (10, 30, 100)
        for o in OUTER[1:]
    },
    "lion, H 1": mean_first(lion, 0.002),
    "slamb, H 1": mean_first(slamb_jax.lamb, 0.02),  # as in the recorded runs
    "SLAMB, as published": exchanging(
        slamb_jax.slamb,
        0.02,
        Exchange.paper(AXIS),
        {"compress_ratio": 0.1, "nu_of": "gradient"},
        b3=0.99,
    ),
    **{
        f"{name}, H {h}, outer {o[0]:g} {o[1]:g}": local(
            averaged(make), rate, h, o, None, GRADIENT, **how
        )
        for name, make, rate, how in (
            ("DiLoCo", ADAMW, 0.008, ADAM),
            ("MuLoCo", OPTAX_MUON, 0.032, MUON),
        )
        for h in (30, 100)
        for o in OUTER
    },
    "DiLoCo, H 10, outer 0.7 0.5": local(
        averaged(ADAMW), 0.008, 10, OUTER[1], None, GRADIENT, **ADAM
    ),
    "SparseLoCo, H 25": sparseloco(0.016, 25, **ADAM),
    "SparseLoCo, H 5": sparseloco(0.016, 5, **ADAM),
    "Dion2, 1/4 of the rows": rival(
        0.016,
        lambda rate, axis, **how: rivals.dion2(rate, axis, matrices, **how),
        **ADAM,
    ),
    "DeMo": rival(0.008, rivals.demo, chosen=32),
    "1-bit LAMB": one_bit_lamb(0.02, warmup=0.2),
    "PowerSGD, LAMB": rival(
        0.02, on(optax.lamb, rivals.powersgd, rank=4), key={"rank": 4}
    ),
}
OURS = "adamw,", "muon,", "lion,", "slamb,", "SLAMB"  # whose exchange is this library's


def make(method: str, rate: Any, setting: Setting) -> Made:
    """The method at a schedule of the rate."""
    return METHODS[method].make(rate, setting)
