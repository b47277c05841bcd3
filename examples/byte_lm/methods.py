"""The optimizers that the main job can compare, each with a rate to start from."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import optax
from jax.sharding import Mesh

import slamb_jax
from examples.common import AXIS
from examples.common.optimizers import dense
from examples.common.simulated import Method
from examples.common.traffic import Traffic, report_of, traffic_of
from slamb_jax import Exchange

EXCHANGE, PAPER = Exchange(AXIS), Exchange.paper(AXIS)


ADAMW: dict[str, Any] = {"b1": 0.8, "b2": 0.95, "weight_decay": 0.0}
LION: dict[str, Any] = {"weight_decay": 0.0}
SGD: dict[str, Any] = {"momentum": 0.9}


class Entry(NamedTuple):
    """``make`` takes a rate, then the exchange if there is one, then the settings."""

    title: str
    rate: float
    make: Callable[..., optax.GradientTransformation]
    exchange: Exchange | None = EXCHANGE
    settings: Mapping[str, Any] = {}


# Without an exchange gradients are averaged. The first four are the main job's; each
# has its peak rate.
METHODS = {
    "dense_adamw": Entry("AdamW (dense)", 0.016, optax.adamw, None, ADAMW),
    "dense_lamb": Entry("LAMB (dense)", 0.02, optax.lamb, None),
    "slamb": Entry("SLAMB, as published", 0.0141, slamb_jax.slamb, PAPER),
    "adamw": Entry("AdamW with the exchange", 0.008, slamb_jax.adamw, EXCHANGE, ADAMW),
    "lamb": Entry("LAMB with the exchange", 0.0283, slamb_jax.lamb),
    "dense_lion": Entry("Lion (dense)", 0.002, optax.lion, None, LION),
    "lion": Entry("Lion with the exchange", 0.002, slamb_jax.lion, EXCHANGE, LION),
    "dense_muon": Entry("Muon (dense)", 0.02, optax.contrib.muon, None),
    "muon": Entry(
        "Muon with the exchange",
        0.02,
        slamb_jax.muon,
        Exchange(AXIS, payload="uniform8"),
    ),
    "dense_sgd": Entry("SGD (dense)", 0.3, optax.sgd, None, SGD),
    "sgd": Entry("SGD with the exchange", 0.3, slamb_jax.sgd, EXCHANGE, SGD),
}


def method(name: str, settings: Mapping[str, Any]) -> Method:
    """The method of that name; ``settings`` change its exchange, if it has one."""
    if name not in METHODS:
        raise ValueError(f"name must be one of {', '.join(METHODS)}, got {name!r}")
    title, _, make, exchange, own = METHODS[name]
    if exchange is not None:
        given = Exchange.from_json(exchange.to_json() | dict(settings))
        return Method(title, functools.partial(make, **own), given)
    return Method(title, lambda rate, _: dense(make(rate, **own), AXIS))


def traffic(name: str, method: Method, params: optax.Params, mesh: Mesh) -> Traffic:
    """Bytes that each worker sends, read off the compiled optimizer."""
    make = functools.partial(method.make, optax.constant_schedule(1.0))
    if METHODS[name].exchange is not None:
        return traffic_of(make, method.exchange, params, mesh)
    report = report_of(make(method.exchange), method.exchange, params, mesh)
    return Traffic(report.bytes_sent())
