"""The methods: dense optimizers, those of this library, and rivals.

A method is a chain, as a function of a rate and its exchange, and the middle of the
rates to search among. Grids have further ones of their own.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import optax

import slamb_jax
from benchmarks import rivals
from benchmarks.train.trials import Method
from examples.common.simulated import AXIS
from slamb_jax import Exchange, selections

# b2 of every Adam, as language models are trained.
ADAM: dict[str, Any] = {"b2": 0.95}
MUON: dict[str, Any] = {"adam_b2": 0.95}
Outer = tuple[float, float]  # the rate and the Nesterov momentum of an outer step
Make = Callable[..., Any]  # of a rate, an exchange and settings

ADAMW = functools.partial(optax.adamw, weight_decay=0.0)
LION = functools.partial(optax.lion, weight_decay=0.0)
adamw = functools.partial(slamb_jax.adamw, weight_decay=0.0)
lion = functools.partial(slamb_jax.lion, weight_decay=0.0)


def rival(rate: float, make: Make, **settings: Any) -> Method:
    """A method whose exchange is its own, at every step."""
    return Method(rate, lambda rate, _: make(rate, AXIS, **settings))


def dense(make: Make, rate: float, **how: Any) -> Method:
    """On the mean gradient."""
    return Method(rate, lambda rate, _: rivals.dense(make(rate, **how), AXIS))


def exchanging(make: Make, rate: float, payload: Any = "ternary", **how: Any) -> Method:
    """All workers take the same step, after a mean over them."""
    return Method(rate, functools.partial(make, **how), Exchange(AXIS, payload=payload))


def local(
    make: Make,
    rate: float,
    every: int,
    outer: Outer,
    payload: str | None = "ternary",
    **how: Any,
) -> Method:
    """Steps of their own, and every H an outer step by the mean of what they moved."""
    exchange = Exchange(AXIS, payload=payload, sync_every=every, outer=nesterov(outer))
    return Method(rate, functools.partial(make, **how), exchange)


def averaged(make: Make) -> Make:
    """An optimizer of optax on each worker, and averages of the parameters: DiLoCo."""
    return lambda rate, exchange, **how: optax.chain(
        make(rate, **how), slamb_jax.average_parameters_every(exchange)
    )


def nesterov(outer: Outer) -> optax.GradientTransformation:
    """The outer optimizer."""
    return optax.sgd(outer[0], momentum=outer[1] or None, nesterov=outer[1] > 0)


def on(optimizer: Make, make: Make, **how: Any) -> Make:
    """What exchanges around an optimizer, whose settings are the others."""
    return lambda rate, axis, **rest: make(optimizer(rate, **rest), axis, **how)


def sparseloco(rate: float, every: int, **how: Any) -> Method:
    """Around AdamW."""
    return Method(
        rate,
        lambda rate, _: rivals.sparseloco(ADAMW(rate, **how), AXIS, every),
        Exchange(AXIS, payload=None, sync_every=every, outer=optax.sgd(1.0)),
    )


def one_bit_lamb(rate: float, warmup: float) -> Method:
    """With a share of the steps as its warm-up."""
    return Method(
        rate,
        lambda rate, _: rivals.one_bit_lamb(rate, AXIS, warm=False),
        first=lambda rate, _: rivals.one_bit_lamb(rate, AXIS, warm=True),
        warmup=warmup,
    )


def matrices(params: Any) -> Any:
    """Which dimensions of a leaf are a matrix, for Muon; tables are left to Adam."""
    of = optax.contrib.MuonDimensionNumbers
    attention = {"query": of(0, (1, 2)), "key": of(0, (1, 2)), "value": of(0, (1, 2))}
    attention |= {"out": of((0, 1), 2)}

    def numbers(path: Any, x: Any) -> Any:
        layer, name = (str(part.key) for part in path[-2:])
        return attention.get(layer, of()) if name == "kernel" and x.ndim > 1 else None

    return jax.tree_util.tree_map_with_path(
        lambda path, x: numbers(path, x) if len(path) > 1 else None, params
    )


def on_matrices(make: Make) -> Make:
    """A Muon: kernels by Muon, the rest by Adam at a third of its rate."""

    def made(rate: Any, *exchange: Exchange, **how: Any) -> Any:
        return make(
            rate,
            *exchange,
            adam_learning_rate=lambda count: rate(count) / 3,
            muon_weight_dimension_numbers=matrices,
            **how,
        )

    return made


def of_one(make: Make) -> Make:
    """This library's optimizer for a single worker, with v of the momentum."""
    return lambda rate, **how: make(rate, Exchange(), **how)


OPTAX_MUON = on_matrices(optax.contrib.muon)
muon = on_matrices(slamb_jax.muon)
OUTER = ((0.7, 0.9), (0.7, 0.5), (1.0, 0.5), (1.0, 0.0))
PAPER = Exchange.paper(AXIS, selection=selections.Strided(0.1, min_size=1000))
LARGEST = {7: 0.0113, 31: 0.016, 127: 0.0226}  # of so many, and the middle of the rates


def locals_of(
    name: str, make: Any, rate: float, every: Any, outer: Any, **how: Any
) -> dict[str, Method]:
    """Local steps with each H and each of the outer steps."""
    return {
        f"{name}, H {h}, outer {o[0]:g} {o[1]:g}": local(make, rate, h, o, **how)
        for h in every
        for o in outer
    }


METHODS = {
    "LAMB": dense(optax.lamb, 0.02),
    "LAMB, v of m": dense(of_one(slamb_jax.lamb), 0.02),
    "AdamW": dense(ADAMW, 0.016, **ADAM),
    "AdamW, bfloat16": rival(0.016, on(ADAMW, rivals.dense_bfloat16), **ADAM),
    "AdamW, b1 0.8": dense(ADAMW, 0.016, b1=0.8, **ADAM),
    "AdamW, v of m": dense(of_one(adamw), 0.0113, **ADAM),
    "Lion": dense(LION, 0.002),
    "Muon": dense(OPTAX_MUON, 0.0453, **MUON),
    "Muon, v of m": dense(of_one(muon), 0.0453, **MUON),
    "adamw, 4 bits, H 1": exchanging(adamw, 0.008, "uniform4", **ADAM),
    "adamw, H 1": exchanging(adamw, 0.008, **ADAM),
    **{
        f"adamw, largest of {k}": exchanging(adamw, rate, f"largest_of_{k}", **ADAM)
        for k, rate in LARGEST.items()
    },
    "adamw, b1 0.8, H 1": exchanging(adamw, 0.008, b1=0.8, **ADAM),
    "adamw, signs, b1 0.8": exchanging(adamw, 0.0113, "sign", b1=0.8, **ADAM),
    # Of the recorded runs: each worker orthogonalized its own momentum, in 0.3.0. Now
    # muon takes the mean first, which is another method in 4 bits, and refuses three
    # values.
    "muon, 4 bits, H 1": exchanging(muon, 0.0453, "uniform4", **MUON),
    "muon, 8 bits": exchanging(muon, 0.0453, "uniform8", **MUON),
    "muon, H 1": exchanging(muon, 0.0453, **MUON),
    **locals_of("adamw, outer", adamw, 0.008, (10, 30, 100), OUTER[1:], **ADAM),
    **locals_of("muon, outer", muon, 0.032, (10, 30, 100), OUTER[1:], **MUON),
    "lion, H 1": exchanging(lion, 0.002),
    "slamb, H 1": exchanging(slamb_jax.lamb, 0.02),  # as in the recorded runs
    "SLAMB, as published": Method(
        0.02, lambda rate, exchange: slamb_jax.slamb(rate, exchange, b3=0.99), PAPER
    ),
    **locals_of(
        "DiLoCo", averaged(ADAMW), 0.008, (30, 100), OUTER, payload=None, **ADAM
    ),
    **locals_of(
        "MuLoCo", averaged(OPTAX_MUON), 0.032, (30, 100), OUTER, payload=None, **MUON
    ),
    **locals_of(
        "DiLoCo", averaged(ADAMW), 0.008, (10,), OUTER[1:2], payload=None, **ADAM
    ),
    "SparseLoCo, H 25": sparseloco(0.016, 25, **ADAM),
    "SparseLoCo, H 5": sparseloco(0.016, 5, **ADAM),
    "Dion2, 1/4 of the rows": rival(
        0.016, functools.partial(rivals.dion2, matrices=matrices), **ADAM
    ),
    "DeMo": rival(0.008, rivals.demo, chosen=32),
    "1-bit LAMB": one_bit_lamb(0.02, warmup=0.2),
    "PowerSGD, LAMB": rival(0.02, on(optax.lamb, rivals.powersgd, rank=4)),
}
