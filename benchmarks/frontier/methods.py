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

DENSE = "LAMB"  # the row that shares are of
# Fixed per task, as in the recorded runs; an Exchange's own choice is close to these.
MIN_SIZE = {"byte_lm": 1000, "digits": 256}


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


def slamb(recipe: recipes.Recipe, *, b3: float | None = None, **changed: Any) -> Method:
    """A recipe, with changes to its exchange; tuned rates are up to twice LAMB's."""
    optimizer = dict(recipe.optimizer) | ({} if b3 is None else {"b3": b3})

    def make(rate: optax.Schedule, setting: Setting, **_: Any) -> rivals.Rival:
        exchange = recipe.exchange(AXIS, min_size=MIN_SIZE[setting.task], **changed)

        def averages(step: int) -> bool:  # at 1, H + 1, 2H + 1, ...
            every = exchange.sync_every
            return every is not None and step % every == 1 % every

        def sends(params: Any, workers: int, step: int) -> rivals.Sends:
            shapes = tuple(x.shape for x in jax.tree.leaves(params))
            means = [(packed(exchange, shapes), exchange.payload)]
            if averages(step):
                means.append((rivals.elements(params), exchange.average_payload))
            return [x for d, how in means for x in rivals.mean_sends(d, workers, how)]

        tx = slamb_jax.slamb(rate, exchange, **optimizer)
        return rivals.Rival(tx, sends, averages)

    exchange = recipe.exchange(AXIS, **changed)
    written = {"payload": None, "average_payload": None} | exchange.to_json()
    del written["axis_name"]
    named = {"sync_every": exchange.sync_every, "nu_of": "gradient"}  # if the default
    return Method(0.02, make, written | named | optimizer)


@functools.cache
def packed(exchange: slamb_jax.Exchange, shapes: tuple[tuple[int, ...], ...]) -> int:
    """Elements of the momentum that SLAMB exchanges per step."""
    params = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return count_elements(params, exchange).per_step


METHODS = {
    "LAMB": rival(0.02, on_lamb(rivals.dense)),
    "AdamW": rival(
        0.004,
        lambda rate, axis: rivals.dense(optax.adamw(rate, weight_decay=0.0), axis),
    ),
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
