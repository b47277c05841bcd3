"""Optimizers and averages against the float64 oracle, over random everything."""

import contextlib
import dataclasses
import functools
import math
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from hypothesis import example, given
from hypothesis import strategies as st

import slamb_jax
from slamb_jax.exchange.codecs import CODECS, Group
from slamb_jax.exchange.selections import Leaf, Strided
from slamb_jax.optimizers._chain import chain_between
from tests.campaign.draws import drawn
from tests.close import assert_close
from tests.naive import PLAIN, Workers
from tests.optimizers import standard_promotion
from tests.replay import Replay, mask_at
from tests.workers import AXIS, train

STEPS = 6
RATES = {
    "constant": 0.05,
    "linear": optax.linear_schedule(0.1, 0.0, STEPS),
    "warm": optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, STEPS),
}
SHAPES = [(), (0,), (1,), (7,), (1, 1), (3, 5), (16, 8), (0, 4), (2, 3, 5), (11, 13)]
TREES = st.lists(st.sampled_from(SHAPES), min_size=1, max_size=4)


@dataclasses.dataclass(frozen=True)
class Keeping:
    """In place of a codec: the four bytes of so much of each number."""

    share: float
    has_zero = True
    draws = False

    def group_of(self, size):
        return Group(1, 2, 8 if size > 64 else 1, 4)

    def nbytes(self, shape):
        return 4 * (shape.size + shape.blocks)  # a scale says nothing

    def encode(self, x, first=0, seed=None):
        del first, seed
        in_bytes = jax.lax.bitcast_convert_type(np.float32(self.share) * x, jnp.uint8)
        scales = jnp.zeros((*x.shape[:-3], 1, x.shape[-2], 4), jnp.uint8)
        return in_bytes.reshape(*x.shape[:-1], -1), scales

    def decode(self, digits, scales):
        del scales
        in_bytes = digits.reshape(*digits.shape[:-1], -1, 4)
        return jax.lax.bitcast_convert_type(in_bytes, jnp.float32)

    def split_bytes(self, codes, shape):
        digits, scales = jnp.split(codes, [4 * shape.size], -1)
        digits = digits.reshape(*codes.shape[:-1], *shape[:3], -1)
        lead = *codes.shape[:-1], shape.groups
        return digits, scales.reshape(*lead, 1, shape.rows, 4)


@st.composite
def settings_of(draw):
    """Settings that may stand together."""

    def one_of(*values):
        return draw(st.sampled_from(values))

    optimizer = one_of("adamw", "lion", "sgd", "lamb", "momentum", "slamb", "slamb")
    outer, every = one_of(None, None, (0.7, 0.5)), one_of(1, 1, 2, 3)
    if masked := optimizer == "slamb":
        outer, every = None, one_of(1, 3, None)
    coded = (outer is not None or every == 1) and not masked
    return {
        "optimizer": optimizer,
        "b1": one_of(0.5 if optimizer == "lion" else 0.0, 0.5, 0.9),
        "b2": one_of(0.9, 0.99 if masked else 0.999),
        "share": one_of(0.0, 0.8),
        "eps": 1e-4,
        "eps_root": one_of(0.0, 1e-3),
        "nesterov": optimizer in ("adamw", "sgd", "momentum") and one_of(False, True),
        "form": one_of("sum", "product"),
        "c_min": one_of(0.01, 0.5, 0.0),
        "c_max": one_of(1000.0, 1.0, np.inf),
        "b3": one_of(0.0, 0.7, 0.99, 1.0),
        "selection": Strided(one_of(1.0, 0.5, 0.3, 0.1, 0.02), one_of(0, 10)),
        "recorded": one_of(False, True),  # masks that no selection would choose
        "zero": masked and one_of(False, True),
        "weight_decay": 0.0 if optimizer in ("sgd", "momentum") else one_of(0.0, 0.1),
        "codes": one_of(None, "bfloat16", 1.0, 0.5) if coded else None,
        "sync_every": every,
        "outer": outer,
        "rate": one_of(*RATES),
    }


def selection_of(given, shapes, rng):
    """Or drawn masks: each coordinate of a matrix by itself, as often as it happens."""
    ratio, selection = given["selection"].compress_ratio, given["selection"]
    odds = [((STEPS, math.prod(s)), ratio if len(s) > 1 else 1) for s in shapes]
    drawn = Replay([rng.random(shape) < odd for shape, odd in odds])
    return drawn if given["recorded"] else selection


def optimizer_of(given, mask, selection):
    rate, codes, outer = RATES[given["rate"]], given["codes"], given["outer"]
    exchange = slamb_jax.Exchange(
        AXIS,
        selection=selection if given["optimizer"] == "slamb" else None,
        payload="ternary" if isinstance(codes, float) else codes,
        outer=outer and optax.sgd(outer[0], momentum=outer[1], nesterov=True),
        sync_every=given["sync_every"],
    )

    def some(*names, **renamed):
        renamed |= dict(zip(names, names, strict=True))
        return {ours: given[name] for ours, name in renamed.items()}

    lamb = "b1", "b2", "eps", "form", "c_min", "c_max", "weight_decay"
    arguments = {
        "adamw": some("b1", "b2", "eps", "eps_root", "nesterov", "weight_decay"),
        "lion": some("weight_decay", b1="share", b2="b1"),
        "sgd": some("nesterov", momentum="b1"),
        "lamb": some(*lamb),
        "slamb": some(*lamb, "b3"),
        "momentum": some("b1", "nesterov"),
    }[given["optimizer"]]
    if given["optimizer"] == "momentum":
        mean = slamb_jax.mask_momentum(exchange, b2=None, **arguments)
        return chain_between(
            "momentum", exchange, mean, optax.scale_by_learning_rate(rate)
        )
    if "weight_decay" in arguments:
        arguments["mask"] = mask
    return getattr(slamb_jax, given["optimizer"])(rate, exchange, **arguments)


DILOCO = {"optimizer": "adamw", "sync_every": 2, "outer": (0.7, 0.9), "codes": None}
SLAMB = PLAIN | {"optimizer": "slamb", "codes": None, "b2": 0.99, "eps": 1e-6}
SLAMB |= {"sync_every": 3, "weight_decay": 0.1, "c_min": 0.5, "c_max": 2.0}
SLAMB |= {"selection": Strided(0.3, 0)}
DENSE = {"codes": None, "weight_decay": 0.1, "rate": "linear"}
TREE = [(12, 16), (16,), ()]


@drawn(6, 200)
@given(
    settings=settings_of(), shapes=TREES, n=st.sampled_from([1, 2, 3, 5]),
    seed=st.integers(0, 10**6),
)  # fmt: skip
@example(PLAIN | {"optimizer": "adamw"}, [(40,)], 4, 0)
@example(PLAIN | {"optimizer": "momentum", "b1": 0.5}, [(40,)], 4, 1)
@example(PLAIN | DENSE | {"optimizer": "adamw", "eps_root": 0.1}, TREE, 4, 2)
@example(PLAIN | DENSE | {"optimizer": "lamb", "form": "product"}, TREE, 4, 2)
@example(PLAIN | DILOCO, TREE, 4, 2)
@example(SLAMB | {"recorded": False, "rate": "linear"}, TREE, 3, 4)
@example(SLAMB | {"recorded": True, "zero": True}, TREE, 3, 5)
@example(SLAMB | {"recorded": True, "form": "product", "b3": 0.99}, TREE, 2, 6)
def test_follows_the_oracle(settings, shapes, n, seed):
    rng = np.random.default_rng(seed)
    params = [rng.normal(size=s).astype(np.float32) for s in shapes]
    # Not near 0, where the sign of a sum would be that of its rounding.
    grads = [
        [rng.uniform(0.4, 1.4, size=(n, *s)).astype(np.float32)
         * rng.choice([-1, 1], size=(n, *s)).astype(np.float32) for s in shapes]
        for _ in range(STEPS)
    ]  # fmt: skip
    if masked := settings["optimizer"] == "slamb":
        grads = [[rng.normal(size=g.shape).astype("f") for g in x] for x in grads]
    if settings["zero"]:  # a leaf, and for a step a gradient
        params[0][...], grads[1][-1][...] = 0, 0
    decays = [i % 2 == 0 for i in range(len(shapes))]
    oracle = Workers(params, n, settings | {"decays": decays})
    selection = masked and selection_of(settings, shapes, rng)
    leaves = [Leaf(j, shape) for j, shape in enumerate(shapes)]
    codes, rate = settings["codes"], RATES[settings["rate"]]
    keeping = mock.patch.dict(CODECS, ternary=Keeping(codes))
    keeping = keeping if isinstance(codes, float) else contextlib.nullcontext()
    with keeping, standard_promotion():
        tx = optimizer_of(settings, decays, selection)
        history = train(tx, params, jax.tree.map(jnp.asarray, grads), "vmap")
    room = 2e-2 if codes == "bfloat16" else 2e-4
    close = functools.partial(chex.assert_trees_all_close, rtol=room, atol=room)
    if masked:  # 1 - 0.99**t in float32 is 6e-6 off, 50 units; sums and roots add some
        close = functools.partial(assert_close, units=512, floor=0.01)
    for t, (p, state) in enumerate(history):
        masks = [mask_at(selection, x, t + 1) for x in leaves] if masked else None
        oracle.step(grads[t], float(rate(t)) if callable(rate) else rate, masks)
        for j in (j for j in range(len(shapes)) if not oracle.undecided[j]):
            close(p[j], oracle.p[j])
        mu, nu, nu_mean = (optax.tree.get(state, x) for x in ("mu", "nu", "nu_mean"))
        means = [x.mean(0) for x in oracle.held]
        close([x.mean(0) for x in mu], means)
        if not oracle.is_("momentum"):  # what its means lose waits in one worker
            close(mu, oracle.held)
        means = [x.reshape(n, -1).mean(1) if x.size else np.zeros(n) for x in oracle.v]
        for ours, theirs in ((nu, oracle.v), (nu_mean, means)):
            close(ours, ours and theirs)  # None where nothing needs it
