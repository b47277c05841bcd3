"""Optimizers and averages against the float64 oracle, over random everything."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from hypothesis import given
from hypothesis import strategies as st

import slamb_jax
from slamb_jax.selections import Strided
from tests.campaign.draws import drawn
from tests.campaign.oracle import Workers
from tests.close import assert_near
from tests.masks import masks_of
from tests.optimizers import standard_promotion
from tests.workers import AXIS, train

STEPS = 6
SHAPES = st.lists(
    st.sampled_from(
        [(), (0,), (1,), (7,), (1, 1), (3, 5), (16, 8), (0, 4), (2, 3, 5), (11, 13)]
    ),
    min_size=1,
    max_size=4,
)


@dataclasses.dataclass(frozen=True)
class Lossless:
    """Codes that are the four bytes of each number."""

    error_feedback: bool = False
    seed: int = 0

    def nbytes(self, size: int) -> int:
        return 4 * size

    def encode(self, x: jax.Array, seed: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(x, jnp.uint8).reshape(*x.shape[:-1], -1)

    def decode(self, codes: jax.Array, size: int) -> jax.Array:
        words = codes.reshape(*codes.shape[:-1], size, 4)
        return jax.lax.bitcast_convert_type(words, jnp.float32)


@st.composite
def settings_of(draw: Any) -> dict[str, Any]:
    """Settings that may stand together."""

    def one_of(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    optimizer = one_of("adamw", "adamw", "lion", "sgd")
    outer = one_of(None, None, (0.7, 0.5))
    payload = one_of(None, "codes", "codes", "bfloat16")
    return {
        "optimizer": optimizer,
        "b1": one_of(0.5 if optimizer == "lion" else 0.0, 0.5, 0.9),
        "b2": one_of(0.9, 0.999),
        "share": one_of(0.0, 0.8),
        "eps": 1e-4,
        "eps_root": one_of(0.0, 1e-3),
        "nesterov": one_of(False, True),
        "nu_of": one_of("gradient", "momentum"),
        "weight_decay": one_of(0.0, 0.1),
        "ratio": one_of(None, None, 0.5, 0.2, 1.0),
        "b3": one_of(1.0, 0.7, 0.0),
        "overlap": one_of(False, True),
        "sync_every": one_of(1, 2, 3),
        "rolling": False if outer else one_of(False, True),
        "average_payload": payload,
        "average_b2": None if outer or payload is None else one_of(None, 0.9, 0.98),
        "outer": outer,
        "min_size": one_of(0, 20),
        "rate": one_of("constant", "linear", "warm"),
    }


def exchange_of(given: dict[str, Any], seed: int) -> slamb_jax.Exchange:
    outer = given["outer"]
    payload = given["average_payload"]
    return slamb_jax.Exchange(
        AXIS,
        compress_ratio=given["ratio"],
        min_size=given["min_size"],
        seed=seed,
        average_payload=Lossless() if payload == "codes" else payload,
        outer=outer and optax.sgd(outer[0], momentum=outer[1], nesterov=True),
        **{
            name: given[name]
            for name in ("b3", "overlap", "sync_every", "rolling", "average_b2")
        },
    )


def optimizer_of(given: dict[str, Any], rate: Any, exchange: Any, mask: Any) -> Any:
    if given["optimizer"] == "sgd":
        return slamb_jax.sgd(
            rate, exchange, momentum=given["b1"], nesterov=given["nesterov"]
        )
    decay = {"weight_decay": given["weight_decay"], "mask": mask}
    if given["optimizer"] == "lion":
        betas = {"b1": given["share"], "b2": given["b1"]}
        return slamb_jax.lion(rate, exchange, **betas, **decay)
    names = ("b1", "b2", "eps", "eps_root", "nesterov", "nu_of")
    return slamb_jax.adamw(rate, exchange, **{k: given[k] for k in names}, **decay)


def rate_of(kind: str) -> Any:
    return {
        "constant": 0.05,
        "linear": optax.linear_schedule(0.1, 0.0, STEPS),
        "warm": optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, STEPS),
    }[kind]


@drawn(4, 120)
@given(
    settings=settings_of(), shapes=SHAPES, n=st.sampled_from([1, 2, 3, 5]),
    seed=st.integers(0, 10**6),
)  # fmt: skip
def test_follows_the_oracle(
    settings: dict[str, Any], shapes: list[tuple[int, ...]], n: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    params = [rng.normal(size=s).astype(np.float32) for s in shapes]
    # Not near 0, where the sign of a sum would be that of its rounding.
    grads = [
        [rng.uniform(0.4, 1.4, size=(n, *s)).astype(np.float32)
         * rng.choice([-1, 1], size=(n, *s)).astype(np.float32) for s in shapes]
        for _ in range(STEPS)
    ]  # fmt: skip
    decays = [i % 2 == 0 for i in range(len(shapes))]
    small = settings["min_size"]
    turns = masks_of(Strided(1 / settings["sync_every"], small, seed), shapes)
    masks = masks_of(Strided(settings["ratio"] or 1.0, small, seed), shapes)
    exchange = exchange_of(settings, seed)
    rate = rate_of(settings["rate"])
    decay = 0.0 if settings["optimizer"] == "sgd" else settings["weight_decay"]
    exchanges = {"exchanges": settings["ratio"] is not None, "decays": decays}
    exchanges["mean_first"] = exchange.averages_momentum
    if exchange.averages_momentum:
        settings = settings | {"nu_of": "momentum"}
    oracle = Workers(params, n, settings | exchanges | {"weight_decay": decay})
    with standard_promotion():
        tx = optimizer_of(settings, rate, exchange, decays)
        history = train(tx, params, jax.tree.map(jnp.asarray, grads), "vmap")
    room = 2e-2 if settings["average_payload"] == "bfloat16" else 2e-4
    for t, (p, _) in enumerate(history):
        at = float(rate(t)) if callable(rate) else rate
        mine = [[g[i] for g in grads[t]] for i in range(n)]
        oracle.step(mine, masks(t + 1), turns(t + 1), at)
        for j in (j for j in range(len(shapes)) if not oracle.undecided[j]):
            want = np.stack([oracle.p[i][j] for i in range(n)])
            assert_near(p[j], want, room)
