"""The methods: how each is made, and the middle of the rates to look among."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from slamb_jax._ex.json_form import to_json

import slamb_jax
from benchmarks import rivals
from benchmarks.frontier.grid import Setting
from examples.common.simulated import AXIS
from slamb_jax._bytes import Mean, means_of

# b2 of every Adam, as language models are trained.
ADAM: dict[str, Any] = {"b2": 0.95}
MUON: dict[str, Any] = {"adam_b2": 0.95}
DENSE = "AdamW"  # the row that shares are of
# Of some tasks, as in the recorded runs; an Exchange's own choice is close to these.
MIN_SIZE = {"byte_lm": 1000, "byte_lm_apart": 1000, "digits": 256}


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


def dense_adamw(rate: optax.Schedule, axis: str, **how: float) -> rivals.Rival:
    """optax's, without decay, as all methods here."""
    return rivals.dense(optax.adamw(rate, weight_decay=0.0, **how), axis)


def one_bit_lamb(rate: optax.Schedule, setting: Setting, warmup: float) -> rivals.Rival:
    """1-bit LAMB with a share of the steps as its warm-up."""
    steps = round(warmup * setting.steps)
    return rivals.one_bit_lamb(rate, AXIS, setting.workers, steps)


def exchanging(
    make: Callable[..., optax.GradientTransformation],
    rate: float,
    exchange: slamb_jax.Exchange,
    *,
    outer: tuple[float, float] | None = None,
    **optimizer: Any,
) -> Method:
    """An optimizer of this library, its exchange, and arguments of its own.

    ``outer`` has the rate and the Nesterov momentum of an outer step.
    """
    if outer is not None:
        tx = optax.sgd(outer[0], momentum=outer[1] or None, nesterov=outer[1] > 0)
        exchange = dataclasses.replace(exchange, outer=tx)

    def made(schedule: optax.Schedule, setting: Setting, **_: Any) -> rivals.Rival:
        sized = dataclasses.replace(exchange, min_size=MIN_SIZE.get(setting.task))
        return rivals.Rival(
            make(schedule, sized, **optimizer),
            functools.partial(sends_of, sized),
            lambda step: (
                not (sized.in_turn or sized.keeps_average_error)
                and bool(sized.averages_at(step))
            ),
        )

    written = {name: getattr(exchange, name) for name in ("payload", "average_payload")}
    written |= {
        "compress_ratio": exchange.compress_ratio or 0.0,
        "sync_every": exchange.sync_every,
    }
    written = to_json(written | {"b3": exchange.b3}) | optimizer
    written |= {"rolling": True} if exchange.in_turn else {}
    own_directions = make is muon and exchange.average_payload != "uniform8"
    if exchange.averages_momentum and not own_directions:
        written |= {"mean": "of the momentum"}
    elif exchange.normalizes:
        written |= {"average_b2": exchange.average_b2}
    return Method(rate, made, written | ({} if outer is None else {"outer": outer}))


def sends_of(
    exchange: slamb_jax.Exchange, params: Any, workers: int, step: int
) -> rivals.Sends:
    """The collectives of a step."""
    shapes = tuple(x.shape for x in jax.tree.leaves(params))
    due = [
        mean
        for mean in means_of_shapes(exchange, shapes)
        if mean.per_step == 1 or exchange.averages_at(step)
    ]
    return [x for mean in due for x in rivals.mean_sends(mean[0], workers, mean[1])]


@functools.cache
def means_of_shapes(
    exchange: slamb_jax.Exchange, shapes: tuple[tuple[int, ...], ...]
) -> list[Mean]:
    """The means that an exchange takes of float32 parameters of these shapes."""
    return means_of(exchange, [jax.ShapeDtypeStruct(x, jnp.float32) for x in shapes])[1]


def adamw(rate: optax.Schedule, exchange: slamb_jax.Exchange, **how: Any) -> Any:
    """Without decay, as all methods here."""
    return slamb_jax.adamw(rate, exchange, weight_decay=0.0, **how)


def lion(rate: optax.Schedule, exchange: slamb_jax.Exchange) -> Any:
    return slamb_jax.lion(rate, exchange, weight_decay=0.0)


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


def dense(
    make: Callable[..., optax.GradientTransformation],
    rate: float,
    *,
    outer: tuple[float, float] | None = None,
    **optimizer: Any,
) -> Method:
    """On the mean gradient; with an ``outer`` step every 30 steps that is SNOO."""
    alone = exchanging(
        make,
        rate,
        slamb_jax.Exchange(compress_ratio=1.0, sync_every=30 if outer else None),
        outer=outer,
        **optimizer,
    )

    def made(schedule: optax.Schedule, setting: Setting, **_: Any) -> rivals.Rival:
        return rivals.dense(alone.make(schedule, setting).optimizer, AXIS)

    return Method(rate, made, optimizer | ({"outer": outer} if outer else {}))


def diloco(
    make: Any, every: int, outer: tuple[float, float], rate: float, **how: Any
) -> Method:
    """Local steps of an optimizer, then one of Nesterov's momentum in float32."""
    local = slamb_jax.Exchange(AXIS, sync_every=every, average_payload=None)
    return exchanging(make, rate, local, outer=outer, nu_of="gradient", **how)


OUTER = ((0.7, 0.9), (0.7, 0.5), (1.0, 0.5), (1.0, 0.0))  # rates, Nesterov momenta
EVERY = {h: slamb_jax.Exchange(AXIS, sync_every=h) for h in (1, 2, 3, 4, 8, 16, 32, 64)}
FEEDBACK = {
    h: slamb_jax.Exchange(
        AXIS,
        sync_every=h,
        average_payload=slamb_jax.payloads.Ternary(error_feedback=True),
    )
    for h in EVERY
}
FOUR_BITS = {
    h: slamb_jax.Exchange(AXIS, sync_every=h, average_payload="uniform4")
    for h in (1, 2)
}
LARGEST = {
    k: slamb_jax.Exchange(AXIS, average_payload=f"largest_of_{k}") for k in (7, 31, 127)
}
MOMENTUM = slamb_jax.Exchange(
    AXIS,
    sync_every=2,
    compress_ratio=1 / 16,
    payload="uniform4",
    average_payload=slamb_jax.payloads.Ternary(error_feedback=True),
)

METHODS = {
    "LAMB": rival(0.02, on_lamb(rivals.dense)),
    "LAMB, v of m": dense(slamb_jax.slamb, 0.02, nu_of="momentum"),
    "AdamW": rival(0.016, dense_adamw, **ADAM),
    "AdamW, b1 0.8": rival(0.016, dense_adamw, b1=0.8, **ADAM),
    "AdamW, v of m": dense(adamw, 0.0113, nu_of="momentum", **ADAM),
    **{
        f"{name}, outer {o[0]:g} {o[1]:g}": dense(make, rate, outer=o, **how)
        for name, make, rate, how in (
            ("LAMB", slamb_jax.slamb, 0.02, {}),
            ("AdamW", adamw, 0.016, {"nu_of": "gradient", **ADAM}),
            ("Lion", lion, 0.002, {}),
            ("Muon", muon, 0.0453, {"nu_of": "gradient", **MUON}),
        )
        for o in OUTER[:3]
    },
    "Lion": dense(lion, 0.002),
    "Muon": dense(muon, 0.0453, nu_of="gradient", **MUON),
    "Muon, v of m": dense(muon, 0.0453, nu_of="momentum", **MUON),
    "adamw, 4 bits, H 1": exchanging(adamw, 0.008, FOUR_BITS[1], **ADAM),
    "adamw, H 1": exchanging(adamw, 0.008, EVERY[1], **ADAM),
    **{
        f"adamw, largest of {k}": exchanging(adamw, rate, x, **ADAM)
        for (k, x), rate in zip(LARGEST.items(), (0.0113, 0.016, 0.0226), strict=True)
    },
    "adamw, b1 0.8, H 1": exchanging(adamw, 0.008, EVERY[1], b1=0.8, **ADAM),
    **{
        f"adamw, feedback, H {h}": exchanging(adamw, 0.016, x, **ADAM)
        for h, x in FEEDBACK.items()
        if h > 1
    },
    **{
        f"adamw, H {h}": exchanging(adamw, 0.016, x, **ADAM)
        for h, x in EVERY.items()
        if h > 1
    },
    **{
        f"muon, 4 bits, H {h}": exchanging(muon, 0.0453, x, **MUON)
        for h, x in FOUR_BITS.items()
    },
    "muon, 8 bits": exchanging(
        muon,
        0.0453,
        slamb_jax.Exchange(AXIS, average_payload="uniform8"),
        **MUON,
    ),
    **{
        f"muon, feedback, H {h}": exchanging(muon, 0.0453, FEEDBACK[h], **MUON)
        for h in (1, 2, 4, 16, 32, 64)
    },
    **{
        f"muon, H {h}": exchanging(muon, 0.0453, EVERY[h], **MUON)
        for h in (1, 2, 4, 16, 32, 64)
    },
    **{
        f"{name}, outer, H {h}, outer {o[0]:g} {o[1]:g}": exchanging(
            make, rate, slamb_jax.Exchange(AXIS, sync_every=h), outer=o, **how
        )
        for name, make, rate, how in (
            ("adamw", adamw, 0.008, ADAM),
            ("muon", muon, 0.032, MUON),
        )
        for h in (10, 30, 100)
        for o in OUTER[1:]
    },
    **{f"lion, H {h}": exchanging(lion, 0.002, EVERY[h]) for h in (1, 2, 4)},
    **{f"slamb, H {h}": exchanging(slamb_jax.slamb, 0.02, EVERY[h]) for h in (1, 2, 4)},
    "slamb, feedback, H 2": exchanging(slamb_jax.slamb, 0.02, FEEDBACK[2]),
    "slamb, momentum, feedback, H 2": exchanging(slamb_jax.slamb, 0.02, MOMENTUM),
    "SLAMB, as published": exchanging(
        slamb_jax.slamb,
        0.02,
        slamb_jax.Exchange.paper(AXIS, b3=0.99),
        nu_of="gradient",
    ),
    **{
        f"{name}, H {h}, outer {o[0]:g} {o[1]:g}": diloco(make, h, o, rate, **how)
        for name, make, rate, how in (
            ("DiLoCo", adamw, 0.008, ADAM),
            ("MuLoCo", muon, 0.032, MUON),
        )
        for h in (30, 100)
        for o in OUTER
    },
    "SparseLoCo, H 25": rival(
        0.016, rivals.sparseloco, sync_every=25, chosen=64, **ADAM
    ),
    "SparseLoCo, H 5": rival(0.016, rivals.sparseloco, sync_every=5, chosen=64, **ADAM),
    "Dion2, 1/4 of the rows": rival(
        0.016,
        lambda rate, axis, **how: rivals.dion2(rate, axis, matrices, **how),
        **ADAM,
    ),
    "DeMo": rival(0.008, rivals.demo, chosen=32),
    "1-bit LAMB": Method(0.02, one_bit_lamb, {"warmup": 0.2}),
    "PowerSGD, LAMB": rival(0.02, on_lamb(rivals.powersgd), rank=4),
}
OURS = "adamw,", "muon,", "lion,", "slamb,", "SLAMB"  # whose exchange is this library's


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
