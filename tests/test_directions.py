"""Each optimizer against optax's of its name, and directions against links."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import slamb_jax
from slamb_jax import directions
from tests.close import assert_close
from tests.optimizers import plain, random_tree
from tests.workers import AXIS, train

SHAPES = {"w": (12, 16), "b": (16,), "tall": (20, 4), "conv": (2, 3, 4, 5), "scale": ()}
RATE = optax.linear_schedule(0.1, 0.01, 6)
GRADIENT: Any = {"nu_of": "gradient"}


def matrices(params: Any) -> Any:
    return jax.tree.map(lambda p: p.ndim > 1, params)


DECAY: Any = {"weight_decay": 0.1, "mask": matrices}
PAIRS = {  # optax's, and ours of an exchange
    "adamw": (
        optax.adamw(RATE, eps_root=1e-6, **DECAY),
        lambda e: slamb_jax.adamw(RATE, e, eps_root=1e-6, **DECAY, **GRADIENT),
    ),
    "adamw, nesterov": (
        optax.adamw(0.1, 0.8, 0.95, nesterov=True),
        lambda e: slamb_jax.adamw(0.1, e, b1=0.8, b2=0.95, nesterov=True, **GRADIENT),
    ),
    "lion": (optax.lion(RATE, **DECAY), lambda e: slamb_jax.lion(RATE, e, **DECAY)),
    "sgd": (optax.sgd(0.1), lambda e: slamb_jax.sgd(0.1, e)),
    "sgd, momentum": (
        optax.sgd(RATE, 0.9),
        lambda e: slamb_jax.sgd(RATE, e, momentum=0.9),
    ),
    "sgd, nesterov": (
        optax.sgd(0.1, 0.9, nesterov=True),
        lambda e: slamb_jax.sgd(0.1, e, momentum=0.9, nesterov=True),
    ),
    "muon": (
        contrib.muon(RATE, weight_decay=0.1, adam_weight_decay=0.2),
        lambda e: slamb_jax.muon(
            RATE, e, weight_decay=0.1, adam_weight_decay=0.2, **GRADIENT
        ),
    ),
    "muon, plain": (
        contrib.muon(0.1, beta=0.9, nesterov=False, ns_steps=3),
        lambda e: slamb_jax.muon(
            0.1, e, beta=0.9, nesterov=False, ns_steps=3, **GRADIENT
        ),
    ),
}
# Of a worker's own gradient besides the exchanged momentum; of its own second moment.
OF_OWN_GRADIENT = (
    "adamw",
    "adamw, nesterov",
    "lion",
    "sgd, nesterov",
    "muon",
    "muon, plain",
)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("axis_name", [None, AXIS])
def test_one_worker_is_optax(name, axis_name):
    theirs, make = PAIRS[name]
    exchange = plain(axis_name, compress_ratio=1.0, sync_every=1)
    grads = [random_tree(SHAPES, t, 1) for t in range(6)]
    params = random_tree(SHAPES, 99)
    got = train(make(exchange), params, grads, "vmap")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        want = train(theirs, params, grads, "vmap")
    # optax rounds 1 - 0.999**t, which is 6e-5 off at t = 1, of a step of 1/10; and
    # Newton-Schulz multiplies the rounding of small directions by up to 3.4**5.
    units = 4096 if "muon" in name else 512
    assert_close([p for p, _ in got], [p for p, _ in want], units=units)


@pytest.mark.parametrize(
    "name", [name for name in PAIRS if name not in OF_OWN_GRADIENT]
)
def test_workers_that_exchange_all_step_on_the_mean_gradient(name):
    theirs, make = PAIRS[name]
    check_mean_gradient(make(plain(AXIS, compress_ratio=1.0)), theirs)


def test_all_momentum_exchanged_gives_the_same_step_to_all():
    """Of v of the momentum, and of Muon that does not look ahead."""
    exchange = plain(AXIS, compress_ratio=1.0)
    alone = plain(compress_ratio=1.0)
    for make in (
        lambda e: slamb_jax.adamw(RATE, e, **DECAY),
        lambda e: slamb_jax.muon(RATE, e, nesterov=False),
    ):
        check_mean_gradient(make(exchange), make(alone))


def check_mean_gradient(
    ours: optax.GradientTransformation, dense: optax.GradientTransformation
) -> None:
    n = 4
    grads = [random_tree(SHAPES, t, n) for t in range(5)]
    means = [jax.tree.map(lambda g: g.mean(0, keepdims=True), g) for g in grads]
    params = random_tree(SHAPES, 99)
    got = train(ours, params, grads, "vmap")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        want = train(dense, params, means, "vmap")
    for (p, _), (q, _) in zip(got, want, strict=True):
        for i in range(n):
            assert_close(
                jax.tree.map(lambda x, i=i: x[i], p),
                jax.tree.map(lambda x: x[0], q),
                units=4096,
            )


@pytest.mark.parametrize(
    "direction", [optax.scale_by_sign(), optax.scale_by_rms(), directions.muon()]
)
def test_a_direction_may_also_be_the_next_link(direction):
    exchange = plain(AXIS, compress_ratio=0.25, min_size=20)
    inside = slamb_jax.mask_momentum(exchange, direction, 0.8)
    behind = optax.chain(slamb_jax.mask_momentum(exchange, b1=0.8), direction)
    grads = [random_tree(SHAPES, t, 3) for t in range(4)]
    with jax.numpy_dtype_promotion("standard"):
        got, want = (
            train(tx, random_tree(SHAPES, 9), grads, "vmap") for tx in (inside, behind)
        )
    assert_close([p for p, _ in got], [p for p, _ in want], units=4096)


@pytest.mark.parametrize("nu_of", ["gradient", "momentum"])
def test_a_constant_gradient_steps_by_the_rate(nu_of):
    """From the first step on, so that nobody needs a warm-up for it."""
    tx = slamb_jax.adamw(0.5, slamb_jax.Exchange(), weight_decay=0.0, nu_of=nu_of)
    g = {"w": jnp.array([1e-3, -2.0, 30.0])}
    state = tx.init(g)
    for _ in range(5):
        u, state = jax.jit(tx.update)(g, state, g)
        np.testing.assert_allclose(u["w"], [-0.5, 0.5, -0.5], rtol=1e-4)


@pytest.mark.parametrize("nesterov", [False, True])
def test_what_codes_round_to_nothing_does_not_step_far(nesterov):
    """v of the momentum holds the step where m is coded as 0, and the gradient not."""
    exchange = slamb_jax.Exchange(
        AXIS, compress_ratio=0.1, payload="uniform4", sync_every=None
    )
    tx = slamb_jax.adamw(1.0, exchange, b2=0.99, weight_decay=0.0, nesterov=nesterov)
    params = {"b": jnp.zeros(200)}  # exchanged densely, in 4 bits of the largest
    scales = jnp.logspace(0, -6, 200)
    grads = [
        {"b": scales[None] * random_tree({"b": (200,)}, t, 4)["b"]} for t in range(6)
    ]
    states = train(tx, params, grads, "vmap")
    ahead = jnp.zeros((4, 200))
    for p, _ in states:
        assert jnp.abs(p["b"] - ahead).max() < 1.1 / np.sqrt(1 - 0.99)
        ahead = p["b"]


def test_an_orthogonalized_matrix_is_nearly_orthogonal():
    """For every shape, and for kernels of attention: heads together, or one by one."""
    dims = directions.DimensionNumbers
    split = {"q": dims(0, (1, 2)), "o": dims((0, 1), 2), "heads": dims(0, 2), "b": None}
    shapes = {"q": (24, 4, 6), "o": (4, 6, 40), "heads": (20, 3, 30), "b": (7,)}
    tx = directions.muon(ns_steps=20, weight_dimension_numbers=split)
    m = random_tree(shapes, 3)
    u, _ = tx.update(m, tx.init(m))
    np.testing.assert_array_equal(u["b"], m["b"])
    flat = {
        "q": u["q"].reshape(1, 24, 24),
        "o": u["o"].reshape(1, 24, 40),
        "heads": u["heads"].transpose(1, 0, 2),
    }
    for x in flat.values():
        scale = max(1, x.shape[2] / x.shape[1]) ** 0.5
        values = np.linalg.svd(np.asarray(x) / scale, compute_uv=False)
        assert ((values > 0.5) & (values < 1.5)).all()  # where the quintic oscillates


def test_optax_dimension_numbers_serve():
    if not hasattr(contrib, "MuonDimensionNumbers"):
        pytest.skip("optax 0.2.5 has none")
    split = {
        "w": contrib.MuonDimensionNumbers(),
        "conv": contrib.MuonDimensionNumbers((0, 1, 2), 3),
    }
    dims = {name: split.get(name) for name in SHAPES}
    ours = slamb_jax.muon(0.1, plain(), muon_weight_dimension_numbers=dims, **GRADIENT)
    theirs = contrib.muon(0.1, muon_weight_dimension_numbers=dims)
    grads = [random_tree(SHAPES, t, 1) for t in range(3)]
    params = random_tree(SHAPES, 9)
    got = train(ours, params, grads, "vmap")
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        want = train(theirs, params, grads, "vmap")
    assert_close([p for p, _ in got], [p for p, _ in want], units=4096)


def test_adam_of_a_gradient_needs_it():
    tx = directions.adam()
    with pytest.raises(ValueError, match="grad"):
        tx.update(jnp.ones(3), tx.init(jnp.ones(3)))
