"""The mean of the workers' momentum: its recurrence, and what is never lost."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import slamb_jax
from tests.optimizers import descend
from tests.workers import AXIS


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
