"""Optimizers and averages against the float64 oracle, over random everything."""

import dataclasses
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from hypothesis import given
from hypothesis import strategies as st

import slamb_jax
from slamb_jax.exchange import mean as _mean
from slamb_jax.exchange.codes import Group
from slamb_jax.links.mask_momentum import chain_between
from tests.campaign.draws import drawn
from tests.campaign.oracle import Workers
from tests.close import assert_near
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
RATES = {
    "constant": 0.05,
    "linear": optax.linear_schedule(0.1, 0.0, STEPS),
    "warm": optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, STEPS),
}


@dataclasses.dataclass(frozen=True)
class Keeping:
    """In place of a quantizer: the four bytes of so much of each number."""

    share: float

    def group_of(self, size: int) -> Group:
        return Group(1, 2, 8 if size > 64 else 1, 4)

    def nbytes(self, shape: Group) -> int:
        return 4 * shape.size + shape.blocks  # a scale is a byte that says nothing

    def encode(
        self, x: jax.Array, seed: jax.Array, flat: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        del seed, flat
        in_bytes = jax.lax.bitcast_convert_type(np.float32(self.share) * x, jnp.uint8)
        scales = jnp.zeros((*x.shape[:-3], x.shape[-2], 1), jnp.uint8)
        return in_bytes.reshape(*x.shape[:-1], -1), scales

    def decode(self, digits: jax.Array, scales: jax.Array) -> jax.Array:
        in_bytes = digits.reshape(*digits.shape[:-1], -1, 4)
        return jax.lax.bitcast_convert_type(in_bytes, jnp.float32)

    def parted(self, codes: jax.Array, shape: Group) -> tuple[jax.Array, jax.Array]:
        digits, scales = jnp.split(codes, [4 * shape.size], -1)
        digits = digits.reshape(*codes.shape[:-1], *shape[:3], -1)
        return digits, scales.reshape(*codes.shape[:-1], shape.groups, shape.rows, 1)


@st.composite
def settings_of(draw: Any) -> dict[str, Any]:
    """Settings that may stand together."""

    def one_of(*values: Any) -> Any:
        return draw(st.sampled_from(values))

    optimizer = one_of("adamw", "lion", "sgd", "slamb", "slamb", "momentum")
    outer, every = one_of(None, None, (0.7, 0.5)), one_of(1, 1, 2, 3)
    coded = outer is not None or every == 1
    return {
        "optimizer": optimizer,
        "b1": one_of(0.5 if optimizer == "lion" else 0.0, 0.5, 0.9),
        "b2": one_of(0.9, 0.999),
        "share": one_of(0.0, 0.8),
        "eps": 1e-4,
        "eps_root": one_of(0.0, 1e-3),
        "nesterov": optimizer not in ("lion", "slamb") and one_of(False, True),
        "form": one_of("sum", "product"),
        "c_min": one_of(0.01, 0.5),
        "c_max": one_of(1000.0, 1.0),
        "weight_decay": 0.0 if optimizer in ("sgd", "momentum") else one_of(0.0, 0.1),
        "codes": one_of(None, "bfloat16", 1.0, 0.5) if coded else None,
        "overlap": one_of(False, True),
        "sync_every": every,
        "outer": outer,
        "rate": one_of(*RATES),
    }


def optimizer_of(given: dict[str, Any], mask: Any) -> Any:
    rate, codes, outer = RATES[given["rate"]], given["codes"], given["outer"]
    exchange = slamb_jax.Exchange(
        AXIS,
        payload="ternary" if isinstance(codes, float) else codes,
        outer=outer and optax.sgd(outer[0], momentum=outer[1], nesterov=True),
        **{name: given[name] for name in ("overlap", "sync_every")},
    )

    def some(*names: str) -> dict[str, Any]:
        return {name: given[name] for name in names}

    decay, b1 = some("weight_decay") | {"mask": mask}, given["b1"]
    match given["optimizer"]:
        case "adamw":
            names = ("b1", "b2", "eps", "eps_root", "nesterov")
            return slamb_jax.adamw(rate, exchange, **some(*names), **decay)
        case "lion":
            return slamb_jax.lion(rate, exchange, b1=given["share"], b2=b1, **decay)
        case "sgd":
            return slamb_jax.sgd(rate, exchange, momentum=b1, **some("nesterov"))
        case "slamb":
            names = ("b1", "b2", "eps", "form", "c_min", "c_max")
            return slamb_jax.slamb(rate, exchange, **some(*names), **decay)
    momentum = slamb_jax.mask_momentum(exchange, None, b1, None, **some("nesterov"))
    return chain_between(exchange, momentum, optax.scale_by_learning_rate(rate))


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
    oracle = Workers(params, n, settings | {"decays": decays})
    codes, rate = settings["codes"], RATES[settings["rate"]]
    replaced = (lambda _: Keeping(codes)) if isinstance(codes, float) else None
    with (
        mock.patch.object(_mean, "quantizer_of", replaced or _mean.quantizer_of),
        standard_promotion(),
    ):
        tx = optimizer_of(settings, decays)
        history = train(tx, params, jax.tree.map(jnp.asarray, grads), "vmap")
    room = 2e-2 if codes == "bfloat16" else 2e-4
    for t, (p, _) in enumerate(history):
        oracle.step(grads[t], float(rate(t)) if callable(rate) else rate)
        for j in (j for j in range(len(shapes)) if not oracle.undecided[j]):
            assert_near(p[j], oracle.p[j], room)
