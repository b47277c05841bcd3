"""The mean of the workers' momentum: its recurrence, and what is never lost."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import slamb_jax
from slamb_jax import momentum
from slamb_jax._mean import Means
from tests.close import assert_close, assert_same_bits
from tests.optimizers import random_tree, standard_promotion
from tests.workers import AXIS, over_workers, stack, train

N = 4
SHAPES = {"w": (12, 16), "b": (16,), "stack": (3, 6, 20), "scale": ()}
CODES = ("ternary", "uniform4", "uniform8", "largest_of_7")


def gradients(n, steps, shapes=SHAPES):
    """Of workers whose data differ: each has a mean of its own."""
    own = random_tree(shapes, 1000, n)
    noise = [random_tree(shapes, t, n, scale=0.3) for t in range(steps)]
    return [jax.tree.map(lambda a, b: a + b, own, x) for x in noise]


def half_of_all(arrays, leaves, exchange, payload, step, *, with_errors):
    """Stands for codes: half of each array arrives, and three quarters of the mean."""
    sent = [x / 2 for x in arrays]
    means = lax.pmean(sent, AXIS)
    owner = (lax.axis_index(AXIS) == 0).astype(jnp.float32)
    return Means(
        [0.75 * x for x in means], sent, [owner * x for x in means]
    )  # of N = 4


@pytest.mark.parametrize("b2", [0.95, None])
@pytest.mark.parametrize("b1", [0.9, 0.5])
def test_it_is_the_documented_recurrence(b1, b2, monkeypatch):
    monkeypatch.setattr(momentum, "mean_over_workers", half_of_all)
    tx = slamb_jax.average_momentum(slamb_jax.Exchange(AXIS), b1=b1, b2=b2)
    run, state = over_workers(tx.update, "vmap", N), stack(tx.init(jnp.zeros(40)), N)
    m, v, grads = np.zeros((N, 40)), np.zeros(40), gradients(N, 6, {"g": (40,)})
    for t, g in enumerate((g["g"] for g in grads), 1):
        fix, r, w = 1 - b1**t, 1.0, 1.0
        if b2 is not None and t > 1:
            root = np.sqrt(v / (1 - b2 ** (t - 1)))
            r = root + 0.05 * np.sqrt(np.mean(root**2))
            w = 1 - root / (2 * r)
        x = b1 * m + (1 - b1) * np.float64(g)
        q = r * (x / r / 2)
        e, mean = x - q, q.mean(0)
        lost = np.zeros((N, 1)) if b2 is not None else N * np.eye(N, 1) * mean / 4
        m = x + (1 - b1) / b1 * w * (e + lost)
        updates, state = run(g, state)
        assert_close(updates, np.stack([0.75 * mean / fix] * N))
        assert_close(state.mu, b1 * m)
        if b2 is not None:
            v = b2 * v + (1 - b2) * (0.75 * mean / fix) ** 2
            assert_close(state.nu, np.stack([v] * N))
            assert_close(state.nu_mean, np.full(N, v.mean()))


@pytest.mark.parametrize(
    ("payload", "mapping", "overlap"),
    [(payload, "vmap", False) for payload in (None, "bfloat16", *CODES)]
    + [("ternary", "vmap", True), ("ternary", "shard_map", False)]
    + [(None, "shard_map", True), ("uniform8", "shard_map", True)],
)
def test_all_but_the_momentum_is_equal_on_all_workers(payload, mapping, overlap):
    exchange = slamb_jax.Exchange(AXIS, payload=payload, overlap=overlap)
    tx = slamb_jax.adamw(0.1, exchange)
    history = train(tx, random_tree(SHAPES, 99), gradients(N, 4), mapping)
    params, state = history[-1]
    for m in jax.tree.leaves(state[0].mu):
        assert (m != m[:1]).any()
    alike = params, state[0]._replace(mu=None), state[1:]
    assert_same_bits(alike, jax.tree.map(lambda x: np.stack([x[0]] * N), alike))


@pytest.mark.parametrize("payload", CODES)
@pytest.mark.parametrize("b1", [0.0, 0.9])
def test_what_was_not_sent_is_in_the_momenta(payload, b1):
    """The sum of the means is that of the gradients, less what the momenta hold."""
    steps = 12
    exchange = slamb_jax.Exchange(AXIS, payload=payload)
    tx = slamb_jax.average_momentum(exchange, b1=b1, b2=None, bias_correction=False)
    tx = optax.chain(tx, optax.scale(-1.0))
    grads = gradients(N, steps)
    zeros = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    params, state = train(tx, zeros, grads, "vmap")[-1]
    for name, moved in params.items():
        sent = -np.asarray(moved)[0]
        given = np.sum([np.mean(g[name], 0) for g in grads], 0)
        held = np.asarray(state[0].mu[name]).mean(0) / (1 - b1)
        room = 2e-5 * steps * (1 + np.abs(given).max()) / (1 - b1)
        np.testing.assert_allclose(sent + held, given, atol=room, rtol=0)


def test_with_overlap_a_step_is_that_of_the_step_before():
    """In float32, of equal gradients; nothing is lost by being late."""
    runs = []
    for overlap in (True, False):
        exchange = slamb_jax.Exchange(AXIS, payload=None, overlap=overlap)
        tx = slamb_jax.adamw(0.1, exchange, weight_decay=0.0)
        runs.append(train(tx, random_tree(SHAPES, 9), gradients(N, 5), "vmap"))
    late, soon = ([p for p, _ in run] for run in runs)
    assert_close(late[0], stack(random_tree(SHAPES, 9), N), units=1)
    assert_close(late[1:], soon[:-1], units=512)


def regression(tx, scales, n=8, batch=16, steps=1500):
    """Mean error of the weights of each group of features, all workers alike."""
    features = np.repeat(np.float32(scales), 32)
    truth = np.random.default_rng(7).normal(size=features.shape).astype(np.float32)

    def step(carry, key):
        params, state = carry
        x = features[None] * jax.random.normal(key, (batch, len(features)))
        grads = jax.grad(lambda w: jnp.mean(jnp.square(x @ (w - truth))))(params)
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    def run(key):
        params = jnp.zeros(features.shape)
        keys = jax.random.split(key, steps)
        return jax.lax.scan(step, (params, tx.init(params)), keys)[0][0]

    keys = jax.random.split(jax.random.key(0), n)
    with standard_promotion():
        params = jax.jit(jax.vmap(run, axis_name=AXIS))(keys)[0]
    return np.abs(np.asarray(params) - truth).reshape(len(scales), -1).mean(1)


def test_no_coordinate_is_lost_for_good():
    """Without noise the weights of every group of features end at the truth."""
    rate = optax.cosine_decay_schedule(0.03, 1500)
    tx = slamb_jax.adamw(rate, slamb_jax.Exchange(AXIS), weight_decay=0.0)
    errors = regression(tx, (1, 0.3, 0.1, 0.03))
    assert (errors < 0.02).all(), errors  # they begin at 0.8


def test_what_is_a_thousand_times_smaller_than_its_block_still_trains():
    scales = np.float32([1.0] * 200 + [1e-3] * 100)
    rate = optax.cosine_decay_schedule(0.02, 2000)
    tx = slamb_jax.adamw(rate, slamb_jax.Exchange(AXIS), weight_decay=0.0)

    def step(carry, _):
        params, state = carry
        updates, state = tx.update(scales * (params - 1), state, params)
        return (optax.apply_updates(params, updates), state), None

    def run(worker):
        params = jnp.zeros(300) + 0 * worker
        return jax.lax.scan(step, (params, tx.init(params)), length=2000)[0][0]

    with standard_promotion():
        params = jax.jit(jax.vmap(run, axis_name=AXIS))(jnp.zeros(4))[0]
    assert float(jnp.abs(params - 1).max()) < 0.1, params


@pytest.mark.parametrize("payload", ["ternary", "uniform8", None])
@pytest.mark.parametrize(
    ("rate", "of_rate"), [(0.1, ()), (optax.linear_schedule(0.1, 0, 9), ("count",))]
)
def test_the_state_of_adamw_is_two_moments_and_counts(payload, rate, of_rate):
    """Three links: of masks, averages of parameters and their turns there is nothing."""
    params = random_tree(SHAPES, 0)
    exchange = slamb_jax.Exchange(AXIS, payload=payload)
    mean, decay, scaled = slamb_jax.adamw(rate, exchange).init(params)
    assert mean._fields == ("count", "mu", "nu", "nu_mean", "direction")
    assert jax.tree.leaves((mean.direction, decay)) == []
    assert jax.tree.map(jnp.shape, (mean.mu, mean.nu)) == (SHAPES, SHAPES)
    assert jax.tree.map(jnp.shape, mean.nu_mean) == dict.fromkeys(SHAPES, ())
    assert mean.count.shape == ()
    assert getattr(scaled, "_fields", ()) == of_rate
