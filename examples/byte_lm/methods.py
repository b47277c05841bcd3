"""The optimizers that the main job can compare, each with a rate to start from."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import Mesh

import slamb_jax
from examples.byte_lm.model import blocks
from examples.common import AXIS
from examples.common.optimizers import dense
from examples.common.simulated import Method
from examples.common.traffic import Traffic, report_of, traffic_of
from slamb_jax import Exchange, directions, jointspar

BUDGET = 2.0  # blocks that JointSpar trains per step, on average
EXCHANGE = Exchange(AXIS)


def matrices(params: optax.Params) -> optax.Params:
    """Leaves that LARS gives a rate of their own: biases and norms start from zero."""
    return jax.tree.map(lambda p: p.ndim > 1, params)


# LARS's relative step is 0.005 at a rate of 1, before momentum.
LARS: dict[str, Any] = {"trust_coefficient": 0.005, "trust_ratio_mask": matrices}


def slamb_from_links(
    rate: optax.ScalarOrSchedule, exchange: Exchange
) -> optax.GradientTransformationExtraArgs:
    """The steps of ``slamb_jax.slamb``, link by link."""
    adam = directions.adam(1e-6, eps_before_correction=True)
    return optax.chain(
        slamb_jax.mask_momentum(exchange, adam, 0.9, 0.999),
        slamb_jax.layerwise_trust_ratio(exchange, b3=0.93),
        slamb_jax.elementwise_rescale(exchange, b3=0.93),
        optax.scale_by_learning_rate(rate),
        slamb_jax.average_parameters_every(exchange),
    )


class Entry(NamedTuple):
    """``make`` takes a rate, and the exchange unless the optimizer is dense."""

    title: str
    rate: float
    make: Callable[..., optax.GradientTransformation]
    exchange: Exchange | None = None


def _exchanging(
    title: str,
    rate: float,
    make: Callable[..., Any],
    exchange: Exchange = EXCHANGE,
    **settings: Any,
) -> Entry:
    return Entry(title, rate, functools.partial(make, **settings), exchange)


def _dense(title: str, rate: float, make: Callable[..., Any], **settings: Any) -> Entry:
    def averaged(rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
        return dense(make(rate, **settings), AXIS)

    return Entry(f"{title} (dense)", rate, averaged)


def _jointspar(rate: optax.ScalarOrSchedule, **run: Any) -> Any:
    lars = optax.lars(rate, **LARS)
    return jointspar.jointspar(lars, EXCHANGE, blocks, BUDGET, **run)


PAPER = Exchange.paper(AXIS)
ADAMW: dict[str, Any] = {"b1": 0.8, "b2": 0.95, "weight_decay": 0.0}
METHODS = {
    "dense_adamw": _dense("AdamW", 0.016, optax.adamw, **ADAMW),
    "dense_lamb": _dense("LAMB", 0.02, optax.lamb),
    "slamb": _exchanging("SLAMB, as published", 0.0141, slamb_jax.slamb, PAPER),
    "adamw": _exchanging("AdamW with the exchange", 0.008, slamb_jax.adamw, **ADAMW),
    "slamb_from_links": _exchanging("SLAMB, links", 0.0141, slamb_from_links, PAPER),
    "lamb": _exchanging("LAMB with the exchange", 0.0283, slamb_jax.lamb),
    "dense_lion": _dense("Lion", 0.002, optax.lion, weight_decay=0.0),
    "lion": _exchanging(
        "Lion with the exchange", 0.002, slamb_jax.lion, weight_decay=0.0
    ),
    "dense_muon": _dense("Muon", 0.02, optax.contrib.muon),
    "muon": _exchanging(
        "Muon with the exchange",
        0.02,
        slamb_jax.muon,
        Exchange(AXIS, payload="uniform8"),
    ),
    "dense_sgd": _dense("SGD", 0.3, optax.sgd, momentum=0.9),
    "sgd": _exchanging("SGD with the exchange", 0.3, slamb_jax.sgd, momentum=0.9),
    "dense_lars": _dense("LARS", 1.0, optax.lars, **LARS),
    "jointspar_lars": Entry("JointSpar-LARS", 1.0, _jointspar),
}
"""By name, with the peak rate. The first four are the main job's."""


def method(name: str, steps: int, seed: int, settings: Mapping[str, Any]) -> Method:
    """The method of that name; ``settings`` change its exchange, if it has one."""
    if name not in METHODS:
        raise ValueError(f"name must be one of {', '.join(METHODS)}, got {name!r}")
    title, _, make, exchange = METHODS[name]
    if exchange is not None:
        given = Exchange.from_json(exchange.to_json() | dict(settings))
        return Method(title, make, given)
    if make is _jointspar:
        make = functools.partial(make, horizon=steps, seed=seed)
    return Method(title, lambda rate, _: make(rate))


def bytes_sent(
    name: str, method: Method, params: optax.Params, mesh: Mesh
) -> Callable[[int], float]:
    """Bytes each worker sends in the first t steps, read off the compiled optimizer."""
    make = functools.partial(method.make, optax.constant_schedule(1.0))
    if METHODS[name].exchange is not None:
        return traffic_of(make, method.exchange, params, mesh).until
    report = report_of(make(method.exchange), method.exchange, params, mesh)
    # The blocks of JointSpar are of one size and stand in branches: BUDGET are taken.
    share = BUDGET / len(set(blocks(params).values()) - {None})
    each = report.bytes_sent() + share * report.bytes_sent(conditional=True)
    return Traffic(each).until
