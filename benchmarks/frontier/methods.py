"""The methods: how each is made, and the middle of the rates to look among."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import slamb_jax
from benchmarks import rivals
from benchmarks.frontier.grid import Setting
from examples.common.simulated import AXIS
from slamb_jax import recipes
from slamb_jax.advisor.parameters import count_elements
from slamb_jax.exchange.budget import settings_of_period
from slamb_jax.exchange.json_form import to_json

DENSE = "LAMB"  # the row that shares are of
# Fixed per task, as in the recorded runs; an Exchange's own choice is close to these.
MIN_SIZE = {"byte_lm": 1000, "digits": 256}
# The settings of an exchange that are part of a result's key.
KEY = ("payload", "average_payload", "compress_ratio", "sync_every", "b3")


@dataclasses.dataclass(frozen=True)
class Method:
    """A row of the tables."""

    rate: float  # the middle of the sweep
    make: Callable[..., rivals.Rival]  # of a schedule, the setting and the settings
    settings: dict[str, Any]  # with name, setting, rate and seed the key of a result


def rival(rate: float, make: Callable[..., rivals.Rival], **settings: float) -> Method:
    """A method that is made alike in every setting."""
    return Method(rate, lambda rate, _, **how: make(rate, AXIS, **how), settings)


def on_lamb(make: Callable[..., rivals.Rival]) -> Callable[..., rivals.Rival]:
    """LAMB on gradients averaged in some way."""
    return lambda rate, axis, **how: make(optax.lamb(rate), axis, **how)


def one_bit_lamb(rate: optax.Schedule, setting: Setting, warmup: float) -> rivals.Rival:
    """1-bit LAMB with a share of the steps as its warm-up."""
    steps = round(warmup * setting.steps)
    return rivals.one_bit_lamb(rate, AXIS, setting.workers, steps)


def exchanging(
    make: Callable[..., optax.GradientTransformation],
    rate: float,
    settings: dict[str, Any],
    optimizer: dict[str, Any] | None = None,
) -> Method:
    """An optimizer of this library: settings of its exchange, arguments of its own."""
    optimizer, outer = optimizer or {}, settings.get("outer")
    if outer is not None:  # rate and Nesterov momentum
        tx = optax.sgd(outer[0], outer[1] or None, nesterov=outer[1] > 0)
        settings = settings | {"outer": tx}
    shown = slamb_jax.Exchange(AXIS, **settings)

    def made(schedule: optax.Schedule, setting: Setting, **_: Any) -> rivals.Rival:
        exchange = dataclasses.replace(shown, min_size=MIN_SIZE[setting.task])
        tx = make(schedule, exchange, **optimizer)
        return rivals.Rival(
            tx,
            functools.partial(sends_of, exchange),
            lambda step: not exchange.rolling and averages(exchange, step),
        )

    written = to_json({name: getattr(shown, name) for name in KEY}) | optimizer
    written |= {"rolling": True} if shown.rolling else {}
    return Method(rate, made, written | ({} if outer is None else {"outer": outer}))


def averages(exchange: slamb_jax.Exchange, step: int) -> bool:
    """Whether parameters are averaged at a step, counted from 1."""
    every, first = exchange.sync_every, 1 if exchange.outer is None else 0
    return every is not None and (exchange.rolling or step % every == first % every)


def sends_of(
    exchange: slamb_jax.Exchange, params: Any, workers: int, step: int
) -> rivals.Sends:
    """The collectives of a step."""
    shapes = tuple(x.shape for x in jax.tree.leaves(params))
    momentum, parameters = elements_of(exchange, shapes)
    means = [(momentum, exchange.payload)] if momentum else []
    if averages(exchange, step):
        means.append((parameters, exchange.average_payload))
    return [x for d, how in means for x in rivals.mean_sends(d, workers, how)]


def slamb(recipe: recipes.Recipe, **changed: Any) -> Method:
    """A recipe, with changes to its exchange; tuned rates are up to twice LAMB's."""
    optimizer = {"nu_of": "gradient"} | recipe.optimizer
    return exchanging(slamb_jax.slamb, 0.02, recipe.settings | changed, optimizer)


def adamw(rate: optax.Schedule, exchange: slamb_jax.Exchange, **how: Any) -> Any:
    """Without decay, as all methods here."""
    return slamb_jax.adamw(rate, exchange, weight_decay=0.0, **how)


@functools.cache
def elements_of(
    exchange: slamb_jax.Exchange, shapes: tuple[tuple[int, ...], ...]
) -> tuple[int, int]:
    """Elements of the momentum at each step, and of the parameters at an average."""
    params = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    found = count_elements(params, exchange)
    return found.per_step, sum(found.averaged.values())


ALL = {"compress_ratio": 1.0, "sync_every": None}
OUTER = ((0.7, 0.9), (0.7, 0.5), (1.0, 0.5), (1.0, 0.0))  # rates, Nesterov momenta


def matrices(params: Any) -> Any:
    """Which dimensions of a leaf are a matrix, for Muon; tables are left to Adam."""
    of = slamb_jax.directions.DimensionNumbers
    attention = {"query": of(0, (1, 2)), "key": of(0, (1, 2)), "value": of(0, (1, 2))}
    attention |= {"out": of((0, 1), 2)}

    def numbers(path: Any, x: Any) -> Any:
        layer, name = (str(part.key) for part in path[-2:])
        return attention.get(layer, of()) if name == "kernel" and x.ndim > 1 else None

    return jax.tree_util.tree_map_with_path(
        lambda path, x: numbers(path, x) if len(path) > 1 else None, params
    )


def muon(rate: Any, exchange: slamb_jax.Exchange, **how: Any) -> Any:
    """Kernels by Muon, the rest by Adam at a third of its rate."""
    return slamb_jax.muon(
        rate,
        exchange,
        adam_learning_rate=lambda count: rate(count) / 3,
        muon_weight_dimension_numbers=matrices,
        **how,
    )


def dense_muon(rate: Any, axis: str) -> rivals.Rival:
    tx = muon(rate, slamb_jax.Exchange(), nu_of="gradient")
    return rivals.dense(tx, axis)


def diloco(make: Any, every: int, outer: tuple[float, float], rate: float) -> Method:
    """Local steps of an optimizer, and an outer step of Nesterov's momentum."""
    local = {"compress_ratio": 0, "sync_every": every, "outer": outer}
    return exchanging(make, rate, local, {"nu_of": "gradient"})


METHODS = {
    "LAMB": rival(0.02, on_lamb(rivals.dense)),
    "AdamW": rival(
        0.004,
        lambda rate, axis: rivals.dense(optax.adamw(rate, weight_decay=0.0), axis),
    ),
    "AdamW, v of m": exchanging(adamw, 0.0057, ALL),
    "adamw, 8 bits": exchanging(
        adamw,
        0.0057,
        settings_of_period(1)
        | {"compress_ratio": 1 / 4, "average_payload": "uniform8"},
    ),
    "adamw, 4 bits": exchanging(
        adamw, 0.0057, settings_of_period(1) | {"average_payload": "uniform4"}
    ),
    **{
        f"adamw, H {h}": exchanging(adamw, 0.0057, settings_of_period(h))
        for h in (1, 2, 4, 8, 16, 32)
    },
    "Muon": rival(0.016, dense_muon),
    **{f"muon, H {h}": exchanging(muon, 0.016, settings_of_period(h)) for h in (1, 2)},
    **{
        f"{name}, H {h}, outer {o[0]:g} {o[1]:g}": diloco(make, h, o, rate)
        for name, make, rate in (("DiLoCo", adamw, 0.008), ("MuLoCo", muon, 0.016))
        for h in (30, 100)
        for o in OUTER
    },
    "SLAMB, as published": slamb(recipes.PAPER, b3=0.99),
    "SLAMB, FLOAT32": slamb(recipes.FLOAT32),
    "SLAMB, FEW_BYTES": slamb(recipes.FEW_BYTES),
    "SLAMB, LARGE_BATCH": slamb(recipes.LARGE_BATCH),
    "SLAMB, k 1/2": slamb(recipes.FEW_BYTES, compress_ratio=1 / 2),
    "SLAMB, k 1/6": slamb(recipes.LARGE_BATCH, compress_ratio=1 / 6, sync_every=20),
    "SLAMB, k 1/32": slamb(
        recipes.FEW_BYTES,
        compress_ratio=1 / 32,
        sync_every=100,
        average_payload="uniform4",
    ),
    "1-bit LAMB": Method(0.02, one_bit_lamb, {"warmup": 0.2}),
    "DiLoCo": rival(0.004, rivals.diloco, sync_every=25),
    "SparseLoCo": rival(0.016, rivals.sparseloco, sync_every=25, chosen=64),
    "SparseLoCo, H 5": rival(0.016, rivals.sparseloco, sync_every=5, chosen=64),
    "DeMo": rival(0.004, rivals.demo, chosen=32),
    "top-k, LAMB": rival(0.02, on_lamb(rivals.topk), ratio=0.01),
    "PowerSGD, LAMB": rival(0.02, on_lamb(rivals.powersgd), rank=4),
}


def make(method: str, rate: Any, setting: Setting) -> rivals.Rival:
    """The method at a rate, a number or a schedule."""
    chosen = METHODS[method]
    return chosen.make(rate, setting, **chosen.settings)


def exchanges(
    rival: rivals.Rival, params: Any, workers: int, steps: int
) -> list[list[Any]]:
    """All collectives of so many steps: [kind, bytes put in, how often].

    With them the average that gives one copy of the parameters where replicas differ.
    """
    shapes = jax.eval_shape(lambda x: x, params)
    sends = [
        send for t in range(1, steps + 1) for send in rival.sends(shapes, workers, t)
    ]
    if not rival.agreed(steps):
        sends += rivals.mean_sends(rivals.elements(shapes), workers)
    return [[*send, sends.count(send)] for send in dict.fromkeys(sends)]
