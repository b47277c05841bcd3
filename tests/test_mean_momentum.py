"""The mean of the workers' momentum: what it is equal to, and what is never lost."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slamb_jax
from tests.close import assert_close, assert_same_bits
from tests.optimizers import plain, random_tree, standard_promotion
from tests.workers import AXIS, MAPPINGS, train

SHAPES = {"w": (12, 16), "b": (16,), "stack": (3, 6, 20), "scale": ()}
RATE = optax.linear_schedule(0.1, 0.01, 6)
STEPS = 6
OPTIMIZERS = {  # and what it is in dense training
    "adamw": (
        lambda e: slamb_jax.adamw(RATE, e, weight_decay=0.1, eps_root=1e-6),
        None,
    ),
    "adamw, nesterov": (
        lambda e: slamb_jax.adamw(0.1, e, b1=0.8, b2=0.95, nesterov=True),
        None,
    ),
    "slamb": (
        lambda e: slamb_jax.slamb(RATE, e, weight_decay=0.1, nu_of="momentum"),
        None,
    ),
    "slamb, product form": (
        lambda e: slamb_jax.slamb(
            RATE, e, form="product", bias_correction=False, nu_of="momentum"
        ),
        None,
    ),
    "sgd": (lambda e: slamb_jax.sgd(0.1, e), optax.sgd(0.1)),
    "sgd, momentum": (
        lambda e: slamb_jax.sgd(RATE, e, momentum=0.9),
        optax.sgd(RATE, 0.9),
    ),
    "sgd, nesterov": (
        lambda e: slamb_jax.sgd(0.1, e, momentum=0.9, nesterov=True),
        optax.sgd(0.1, 0.9, nesterov=True),
    ),
    "lion": (
        lambda e: slamb_jax.lion(RATE, e, weight_decay=0.1),
        optax.lion(RATE, weight_decay=0.1),
    ),
}
CODES = ("ternary", "uniform4", "uniform8", "largest_of_7")


def gradients(n, steps=STEPS, shapes=SHAPES):
    """Of workers whose data differ: each has a mean of its own."""
    own = random_tree(shapes, 1000, n)
    noise = [random_tree(shapes, t, n, scale=0.3) for t in range(steps)]
    return [jax.tree.map(lambda a, b: a + b, own, x) for x in noise]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    ("n", "mapping"), [(1, "vmap"), (2, "vmap"), *((8, x) for x in MAPPINGS)]
)
def test_in_float32_it_is_the_dense_optimizer_whatever_data_a_worker_has(
    name, n, mapping
):
    make, dense = OPTIMIZERS[name]
    if dense is None:  # v is of the momentum, which no optimizer of optax has
        dense = make(plain(compress_ratio=1.0, sync_every=None))
    grads, params = gradients(n), random_tree(SHAPES, 99)
    means = [jax.tree.map(lambda g: np.mean(g, 0, keepdims=True), g) for g in grads]
    exchange = slamb_jax.Exchange(AXIS, average_payload=None, average_b2=None)
    with standard_promotion():
        got = train(make(exchange), params, grads, mapping)
        want = train(dense, params, means, "vmap")
    for (p, _), (q, _) in zip(got, want, strict=True):
        for i in range(n):
            one = jax.tree.map(lambda x, i=i: x[i : i + 1], p)
            assert_close(one, q, units=512)


@pytest.mark.parametrize("payload", [None, "bfloat16", *CODES])
@pytest.mark.parametrize("mapping", ["vmap", "shard_map"])
@pytest.mark.parametrize("overlap", [False, True])
def test_all_but_the_momentum_is_equal_on_all_workers(payload, mapping, overlap):
    exchange = slamb_jax.Exchange(
        AXIS, average_payload=payload, average_b2=None, overlap=overlap
    )
    tx = slamb_jax.adamw(0.1, exchange)
    params, state = train(tx, random_tree(SHAPES, 99), gradients(4), mapping)[-1]
    momentum = state[0]
    apart = jax.tree.map(lambda m: bool((m != m[:1]).any()), momentum.mu)
    assert all(jax.tree.leaves(apart))
    alike = params, momentum._replace(mu=None), state[1:]
    first = jax.tree.map(lambda x: np.broadcast_to(x[:1], x.shape), alike)
    assert_same_bits(alike, first)


@pytest.mark.parametrize("payload", ["uniform8", "uniform4", "ternary"])
def test_muon_orthogonalizes_the_mean_unless_its_codes_are_coarse(payload):
    """Of workers whose own momenta are orthogonal to each other."""
    exchange = slamb_jax.Exchange(AXIS, average_payload=payload)
    tx = slamb_jax.muon(1.0, exchange, beta=0.0, nesterov=False, consistent_rms=None)
    own = np.zeros((2, 8, 8), np.float32)
    own[0, :4, :4], own[1, 4:, 4:] = np.eye(4), 0.5 * np.eye(4)
    params, _ = train(tx, {"w": np.zeros((8, 8), np.float32)}, [{"w": own}], "vmap")[-1]
    size = np.linalg.norm(np.asarray(params["w"])[0])
    # Each own direction has four singular values of about 1, the mean of both half.
    assert (size > 2) == (payload == "uniform8")


@pytest.mark.parametrize("payload", CODES)
@pytest.mark.parametrize("b1", [0.0, 0.9])
def test_what_was_not_sent_is_in_the_momenta(payload, b1):
    """The sum of the means is that of the gradients, less what the momenta hold."""
    n, steps = 4, 12
    exchange = slamb_jax.Exchange(AXIS, average_payload=payload, average_b2=None)
    tx = slamb_jax.sgd(1.0, exchange, momentum=b1)
    grads, zeros = (
        gradients(n, steps),
        jax.tree.map(np.zeros_like, random_tree(SHAPES, 0)),
    )
    params, state = train(tx, zeros, grads, "vmap")[-1]
    for name, moved in params.items():
        sent = -np.asarray(moved)[0] * (1 - b1)
        given = np.sum([np.mean(g[name], 0) for g in grads], 0)
        held = np.asarray(state[0].mu[name]).mean(0) / (1 - b1)
        room = 2e-5 * steps * (1 + np.abs(given).max()) / (1 - b1)
        np.testing.assert_allclose(sent + held, given, atol=room, rtol=0)


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

    def step(carry, _):
        params, state = carry
        updates, state = tx.update(scales * (params - 1), state, params)
        return (optax.apply_updates(params, updates), state), None

    tx = slamb_jax.adamw(
        optax.cosine_decay_schedule(0.02, 2000),
        slamb_jax.Exchange(AXIS),
        weight_decay=0.0,
    )

    def run(worker):
        params = jnp.zeros(300) + 0 * worker
        return jax.lax.scan(step, (params, tx.init(params)), length=2000)[0][0]

    with standard_promotion():
        params = jax.jit(jax.vmap(run, axis_name=AXIS))(jnp.zeros(4))[0]
    assert float(jnp.abs(params - 1).max()) < 0.1, params


def test_the_state_is_two_copies_of_the_parameters():
    params = random_tree(SHAPES, 0)
    size = sum(x.size for x in jax.tree.leaves(params))
    tx = slamb_jax.adamw(0.1, slamb_jax.Exchange(AXIS))
    arrays = jax.tree.leaves(tx.init(params))
    scalars = 3 + len(jax.tree.leaves(params))  # counts, and the mean of v of each leaf
    assert sum(x.size for x in arrays) <= 2 * size + scalars


@pytest.mark.parametrize("payload", ["largest_of_7", "largest_of_31"])
def test_averaged_parameters_may_not_lose_all_but_the_largest(payload):
    """Muon in codes averages them after steps of the workers' own."""
    with pytest.raises(ValueError, match=rf"'{payload}' sends one .* lose"):
        slamb_jax.muon(0.1, slamb_jax.Exchange(AXIS, average_payload=payload))


def test_v_of_each_workers_own_gradient_is_refused():
    with pytest.raises(ValueError, match=r"nu_of='gradient' .* steps alike"):
        slamb_jax.adamw(0.1, slamb_jax.Exchange(AXIS), nu_of="gradient")
