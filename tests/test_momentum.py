"""The mean of the workers' momentum: its recurrence, and what is never lost."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slamb_jax
from slamb_jax._core.leaves import Leaf
from slamb_jax.links._packed import Pack
from tests.close import assert_agree_but, assert_close
from tests.optimizers import descend, random_tree, standard_promotion
from tests.workers import AXIS, over_workers, stack, train

N = 4
SHAPES = {"w": (12, 16), "b": (16,), "stack": (3, 6, 20), "scale": ()}
CODES = ("ternary", "uniform4", "uniform8", "largest_of_7")


def gradients(steps, shapes=SHAPES):
    """Of workers whose data differ: each has a mean of its own."""
    own = random_tree(shapes, 1000, N)
    noise = [random_tree(shapes, t, N, scale=0.3) for t in range(steps)]
    return [jax.tree.map(jnp.add, own, x) for x in noise]


@pytest.mark.parametrize(
    ("payload", "mapping", "overlap"),
    [(payload, "vmap", False) for payload in (None, "bfloat16", *CODES)]
    + [("ternary", "vmap", True), ("ternary", "shard_map", False)]
    + [(None, "shard_map", True), ("uniform8", "shard_map", True)],
)
def test_all_but_the_momentum_is_equal_on_all_workers(payload, mapping, overlap):
    exchange = slamb_jax.Exchange(AXIS, payload=payload, overlap=overlap)
    tx, params = slamb_jax.adamw(0.1, exchange), random_tree(SHAPES, 99)
    params, state = train(tx, params, gradients(4), mapping)[-1]
    assert all((m != m[:1]).any() for m in jax.tree.leaves(state[0].mu))
    assert_agree_but((params, state), ["mu"])


@pytest.mark.parametrize("payload", CODES)
@pytest.mark.parametrize("b1", [0.0, 0.9])
def test_what_was_not_sent_is_in_the_momenta(payload, b1):
    """The sum of the means is that of the gradients, less what the momenta hold."""
    exchange = slamb_jax.Exchange(AXIS, payload=payload)
    tx = slamb_jax.mask_momentum(exchange, b1=b1, b2=None, bias_correction=False)
    grads = gradients(12)
    zeros = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    sent, state = train(tx, zeros, grads, "vmap")[-1]
    for name, x in sent.items():
        given = np.sum([np.mean(g[name], 0) for g in grads], 0)
        held = np.asarray(state.mu[name]).mean(0) / (1 - b1)
        room = 2e-5 * len(grads) * (1 + np.abs(given).max()) / (1 - b1)
        np.testing.assert_allclose(x[0] + held, given, atol=room, rtol=0)


def test_with_overlap_a_step_is_that_of_the_step_before():
    """In float32, of equal gradients; nothing is lost by being late."""
    runs = []
    for overlap in (True, False):
        exchange = slamb_jax.Exchange(AXIS, payload=None, overlap=overlap)
        tx = slamb_jax.adamw(0.1, exchange, weight_decay=0.0)
        history = train(tx, random_tree(SHAPES, 9), gradients(5), "vmap")
        runs.append([p for p, _ in history])
    late, soon = runs
    assert_close(late, [stack(random_tree(SHAPES, 9), N), *soon[:-1]], units=512)


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


@pytest.mark.parametrize("payload", [None, "bfloat16", *CODES[:1], CODES[3]])
def test_a_leaf_steps_as_by_itself(payload):
    """Small leaves share arrays, and nothing else: no code, no decay rate, no mean."""
    shapes = SHAPES | {
        "b2": (33,),
        "long": (2100,),
        "wide": (40, 60),
        "large": (300, 250),
    }
    b1 = {name: 0.5 if name.startswith("b") else 0.9 for name in shapes}
    params = random_tree(shapes, 9)
    params["long"] = params["long"].astype(jnp.bfloat16)
    (grads,) = jax.tree.map(
        lambda g, p: g.astype(p.dtype), gradients(1, shapes), [params]
    )
    adam = slamb_jax.directions.adam(1e-8)

    def step(names):
        exchange = slamb_jax.Exchange(AXIS, payload=payload)
        own = {name: b1[name] for name in names}
        tx = slamb_jax.mask_momentum(exchange, adam, own, 0.9)
        start, g = ({name: x[name] for name in names} for x in (params, grads))
        # Before the first step the units are 1, whatever the order of a sum.
        return over_workers(lambda g: tx.update(g, tx.init(start), start), "vmap", N)(g)

    u, state = step(shapes)
    for name in set(shapes) - {"large"}:  # which is by itself in any case
        alone, own = step([name])
        assert_close((u[name], state.mu[name]), (alone[name], own.mu[name]), units=8)
        assert_close(state.nu[name], own.nu[name], units=8)
        if state.nu_mean is not None:
            assert_close(state.nu_mean[name], own.nu_mean[name], units=64)


def test_leaves_that_share_an_array_keep_their_places_and_sums():
    sizes, block = (5, 64, 1, 130), 32
    leaves = [Leaf(i, (size,)) for i, size in enumerate(sizes)]
    xs = [jnp.arange(1.0, size + 1) for size in sizes]
    pack = Pack((0, 2, 3), tuple(leaves[i] for i in (0, 2, 3)), block)
    values = pack.gather([jnp.float32(10 * i) for i in range(4)])
    (back,), each = pack.split([pack.join(xs)], values)
    chex.assert_trees_all_equal(back, [xs[i] for i in (0, 2, 3)])
    assert [float(x) for x in each] == [0, 20, 30]
    np.testing.assert_array_equal(pack.sums(pack.join(xs)), [15, 1, 130 * 131 / 2])
    want = np.repeat([0, 20, 30], [block, block, 5 * block])
    np.testing.assert_array_equal(pack.spread(values), want)
