"""The mean of the workers' momentum: its recurrence, and what is never lost."""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slamb_jax
from slamb_jax._core.joining import join_rows, spread_over, sum_parts
from slamb_jax._core.leaves import Leaf
from tests.close import assert_close
from tests.optimizers import descend, random_tree
from tests.workers import AXIS, over_workers


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


@pytest.mark.parametrize("payload", [None, "bfloat16", "ternary", "largest_of_7"])
def test_a_leaf_steps_as_by_itself(payload):
    """Small leaves share arrays, and nothing else: no code, no decay rate, no mean."""
    shapes = {
        "w": (12, 16), "b": (16,), "stack": (3, 6, 20), "scale": (), "b2": (33,),
        "long": (2100,), "wide": (40, 60), "large": (300, 250),
    }  # fmt: skip
    b1 = {name: 0.5 if name.startswith("b") else 0.9 for name in shapes}
    params = random_tree(shapes, 9)
    params["long"] = params["long"].astype(jnp.bfloat16)
    (grads,) = jax.tree.map(
        lambda g, p: g.astype(p.dtype), [random_tree(shapes, 1, 4)], [params]
    )
    adam = slamb_jax.directions.adam(1e-8)

    def step(names):
        exchange = slamb_jax.Exchange(AXIS, payload=payload)
        own = {name: b1[name] for name in names}
        tx = slamb_jax.mask_momentum(exchange, adam, own, 0.9)
        start, g = ({name: x[name] for name in names} for x in (params, grads))
        # Before the first step the units are 1, whatever the order of a sum.
        return over_workers(lambda g: tx.update(g, tx.init(start), start), "vmap", 4)(g)

    u, state = step(shapes)
    for name in set(shapes) - {"large"}:  # which is by itself in any case
        alone, own = step([name])
        assert_close((u[name], state.mu[name]), (alone[name], own.mu[name]), units=8)
        assert_close(state.nu[name], own.nu[name], units=8)
        if state.nu_mean is not None:
            assert_close(state.nu_mean[name], own.nu_mean[name], units=64)


class Row(NamedTuple):
    leaf: Leaf
    x: jax.Array
    value: jax.Array
    rate: float


def test_leaves_that_share_an_array_keep_their_places_and_sums():
    sizes, unit = (5, 64, 1, 130), 32
    rates = (0.9, 0.5, 0.9, 0.9)
    rows = [
        Row(Leaf(i, (n,)), jnp.arange(1.0, n + 1), jnp.float32(10 * i), rates[i])
        for i, n in enumerate(sizes)
    ]
    joined = join_rows(rows, lambda leaf: unit, same=["rate"], values=["value"])
    assert sorted(joined.places) == [[0, 2, 3], [1]]
    back, nothing = joined.split([row.x for row in joined.rows], [None, None])
    chex.assert_trees_all_equal(back, [row.x for row in rows])
    assert nothing == [None] * 4
    values = joined.split_values([row.value for row in joined.rows])
    assert [float(x) for x in values] == [0, 10, 20, 30]
    row = joined.rows[joined.places.index([0, 2, 3])]
    np.testing.assert_array_equal(sum_parts(row.leaf, row.x), [15, 1, 130 * 131 / 2])
    want = np.repeat([0, 20, 30], [unit, unit, 5 * unit])
    np.testing.assert_array_equal(spread_over(row.leaf, row.value), want)
