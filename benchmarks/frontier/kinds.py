"""Kinds of methods: rivals, dense optimizers, and those of this library."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import optax

import slamb_jax
from benchmarks import rivals
from benchmarks.frontier.grid import Setting
from benchmarks.frontier.wire import Made
from examples.common.simulated import AXIS
from slamb_jax import Exchange

# Of some tasks, as in the recorded runs; the default of Strided is close to these.
MIN_SIZE = {"byte_lm": 1000, "byte_lm_apart": 1000, "digits": 256}
Outer = tuple[float, float]  # the rate and the Nesterov momentum of an outer step


@dataclasses.dataclass(frozen=True)
class Method:
    """A row of the tables."""

    rate: float  # the middle of the sweep
    make: Callable[[Any, Setting], Made]  # of a schedule of the rate
    key: dict[str, Any]  # with name, setting, rate and seed the key of a result


def rival(
    rate: float,
    make: Callable[..., optax.GradientTransformation],
    *,
    key: dict[str, Any] | None = None,
    **settings: Any,
) -> Method:
    """A method that is made alike in every setting, and exchanges at every step."""
    return Method(
        rate, lambda rate, _: Made(make(rate, AXIS, **settings)), key or settings
    )


def dense(
    make: Callable[..., optax.GradientTransformation],
    rate: float,
    *,
    outer: Outer | None = None,
    key: dict[str, Any] | None = None,
    **how: Any,
) -> Method:
    """On the mean gradient; with an ``outer`` step every 30 steps that is SNOO."""

    def made(rate: Any, _: Setting) -> Made:
        tx = make(rate, **how)
        if outer is not None:
            every = Exchange(payload=None, sync_every=30, outer=nesterov(outer))
            tx = optax.chain(tx, slamb_jax.average_parameters_every(every))
        return Made(rivals.dense(tx, AXIS))

    return Method(rate, made, (key or {}) | how | ({"outer": outer} if outer else {}))


def on(
    optimizer: Callable[..., Any], make: Callable[..., Any], **how: Any
) -> Callable[..., Any]:
    """What exchanges around an optimizer, whose settings are the others."""
    return lambda rate, axis, **rest: make(optimizer(rate, **rest), axis, **how)


def sparseloco(rate: Any, every: int, **how: Any) -> Method:
    """Around AdamW."""

    def made(rate: Any, _: Setting) -> Made:
        adamw = optax.adamw(rate, weight_decay=0.0, **how)
        outer = Exchange(AXIS, payload=None, sync_every=every, outer=optax.sgd(1.0))
        return Made(rivals.sparseloco(adamw, AXIS, every), outer)

    return Method(rate, made, {"sync_every": every, "chosen": 64} | how)


def one_bit_lamb(rate: float, warmup: float) -> Method:
    """With a share of the steps as its warm-up."""

    def made(rate: Any, setting: Setting) -> Made:
        first, then = (rivals.one_bit_lamb(rate, AXIS, warm) for warm in (True, False))
        return Made(then, first=first, warmup=round(warmup * setting.steps))

    return Method(rate, made, {"warmup": warmup})


def nesterov(outer: Outer) -> optax.GradientTransformation:
    """The outer optimizer."""
    return optax.sgd(outer[0], momentum=outer[1] or None, nesterov=outer[1] > 0)


def exchanging(
    make: Callable[..., optax.GradientTransformation],
    rate: float,
    exchange: Exchange,
    key: dict[str, Any],
    **how: Any,
) -> Method:
    """An optimizer of this library, its exchange, and arguments of its own.

    ``key`` goes into the key of its results. The exchange's settings stand there under
    the names that they had when the first results were recorded.
    """

    def made(rate: Any, setting: Setting) -> Made:
        sized = exchange
        if isinstance(exchange.selection, slamb_jax.selections.Strided):
            selection = dataclasses.replace(
                exchange.selection, min_size=MIN_SIZE.get(setting.task)
            )
            sized = dataclasses.replace(exchange, selection=selection)
        return Made(make(rate, sized, **how), sized)

    recorded: dict[str, Any] = {"payload": None, "average_payload": exchange.payload}
    recorded |= {"compress_ratio": 0.0, "sync_every": exchange.sync_every, "b3": 1.0}
    return Method(rate, made, recorded | how | key)


def mean_first(
    make: Callable[..., optax.GradientTransformation],
    rate: float,
    payload: str = "ternary",
    mean: str = "of the momentum",
    **how: Any,
) -> Method:
    """All workers take the same step, after a mean over them."""
    return exchanging(
        make, rate, Exchange(AXIS, payload=payload), {"mean": mean}, **how
    )


def local(
    make: Callable[..., optax.GradientTransformation],
    rate: float,
    every: int,
    outer: Outer,
    payload: str | None = "ternary",
    key: dict[str, Any] | None = None,
    **how: Any,
) -> Method:
    """Workers step by themselves, and an outer optimizer steps between averages."""
    exchange = Exchange(AXIS, payload=payload, sync_every=every, outer=nesterov(outer))
    return exchanging(make, rate, exchange, (key or {}) | {"outer": outer}, **how)


def adamw(rate: Any, exchange: Exchange, **how: Any) -> Any:
    """Without decay, as all methods here."""
    return slamb_jax.adamw(rate, exchange, weight_decay=0.0, **how)


def lion(rate: Any, exchange: Exchange) -> Any:
    return slamb_jax.lion(rate, exchange, weight_decay=0.0)


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


def on_matrices(make: Callable[..., Any]) -> Callable[..., Any]:
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


def of_one(make: Callable[..., Any]) -> Callable[..., Any]:
    """This library's optimizer for a single worker, with v of the momentum."""
    return lambda rate, **how: make(rate, Exchange(), **how)


def in_sum_form(rate: Any) -> Any:
    """LAMB in the sum form, with v of the gradient."""
    everything = slamb_jax.selections.Strided(1.0)
    whole = Exchange(payload=None, sync_every=None, selection=everything)
    return slamb_jax.slamb(rate, whole)


def averaged(make: Callable[..., Any]) -> Callable[..., Any]:
    """An optimizer of optax on each worker, and averages of the parameters."""

    def made(rate: Any, exchange: Exchange, **how: Any) -> Any:
        assert exchange.sync_every is not None
        tx, every = make(rate, **how), exchange.sync_every
        return rivals.diloco(tx, AXIS, every, exchange.outer)

    return made
