"""The mean of the workers' momentum: its recurrence, and what is never lost."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slamb_jax
from tests.optimizers import descend, gradients, random_tree, standard_promotion
from tests.workers import AXIS, over_workers, stack, train

N = 4
SHAPES = {"w": (12, 16), "b": (16,), "stack": (3, 6, 20), "scale": ()}
CODES = ("ternary", "uniform4", "uniform8", "largest_of_7")


@pytest.mark.parametrize("payload", CODES)
@pytest.mark.parametrize("b1", [0.0, 0.9])
def test_what_was_not_sent_is_in_the_momenta(payload, b1):
    """The sum of the means is that of the gradients, less what the momenta hold."""
    exchange = slamb_jax.Exchange(AXIS, payload=payload)
    tx = slamb_jax.mask_momentum(exchange, b1=b1, b2=None, bias_correction=False)
    grads = gradients(12, SHAPES, N)
    zeros = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    sent, state = train(tx, zeros, grads, "vmap")[-1]
    for name, x in sent.items():
        given = np.sum([np.mean(g[name], 0) for g in grads], 0)
        held = np.asarray(state.mu[name]).mean(0) / (1 - b1)
        room = 2e-5 * len(grads) * (1 + np.abs(given).max()) / (1 - b1)
        np.testing.assert_allclose(x[0] + held, given, atol=room, rtol=0)


def test_no_coordinate_is_lost_for_good():
    """Without noise the weights of every group of features end at the truth."""
    features = np.repeat(np.float32([1, 0.3, 0.1, 0.03]), 32)
    truth = np.random.default_rng(7).normal(size=features.shape).astype(np.float32)

    def gradient(params, key, t):
        x = features[None] * jax.random.normal(jax.random.fold_in(key, t), (16, 128))
        return jax.grad(lambda w: jnp.mean(jnp.square(x @ (w - truth))))(params)

    rate = optax.cosine_decay_schedule(0.03, 1500)
    tx = slamb_jax.adamw(rate, slamb_jax.Exchange(AXIS), weight_decay=0.0)
    keys = jax.random.split(jax.random.key(0), 8)
    params = descend(tx, gradient, np.zeros_like(truth), keys, 1500)
    errors = np.abs(np.asarray(params[0]) - truth).reshape(4, -1).mean(1)
    assert (errors < 0.02).all(), errors  # they begin at 0.8


def test_what_is_a_thousand_times_smaller_than_its_block_still_trains():
    scales = np.float32([1.0] * 200 + [1e-3] * 100)
    rate = optax.cosine_decay_schedule(0.02, 2000)
    tx = slamb_jax.adamw(rate, slamb_jax.Exchange(AXIS), weight_decay=0.0)
    gradient = lambda p, own, t: scales * (p - 1)  # noqa: E731
    params = descend(tx, gradient, np.zeros_like(scales), np.zeros(4), 2000)
    assert float(jnp.abs(params - 1).max()) < 0.1, params


@pytest.mark.parametrize("payload", ["ternary", "uniform8", None])
@pytest.mark.parametrize(
    ("rate", "of_rate"), [(0.1, ()), (optax.linear_schedule(0.1, 0, 9), ("count",))]
)
def test_the_state_of_adamw_is_two_moments_and_counts(payload, rate, of_rate):
    """Three links; there is nothing of masks, or of averages of parameters."""
    tx = slamb_jax.adamw(rate, slamb_jax.Exchange(AXIS, payload=payload))
    mean, decay, scaled = tx.init(random_tree(SHAPES, 0))
    assert mean._fields == ("count", "mu", "nu", "nu_mean", "compressor", "direction")
    assert jax.tree.leaves((mean.compressor, mean.direction, decay)) == []
    shapes = jax.tree.map(jnp.shape, (mean.count, mean.mu, mean.nu, mean.nu_mean))
    unit = None if payload is None else dict.fromkeys(SHAPES, ())  # codes have one
    assert shapes == ((), SHAPES, SHAPES, unit)
    assert getattr(scaled, "_fields", ()) == of_rate
    given = stack(random_tree(SHAPES, 0), N)
    with standard_promotion():
        step = over_workers(lambda p: tx.update(p, tx.init(p), p), "vmap", N)
        assert "scatter" not in step.lower(given).as_text()  # as SLAMB's has
