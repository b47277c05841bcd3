"""Compression that is warmed up: one program, a branch for each ratio."""

import jax
import jax.numpy as jnp
import numpy as np

import slamb_jax
from slamb_jax import Exchange
from slamb_jax.exchange.selections import elements_sent
from slamb_jax.selections import Leaf, Permutation, Schedule, Strided
from tests.close import assert_close
from tests.workers import AXIS, random_tree, stack, stepper, train

SHAPES = {"w": (40, 300), "odd": (21, 31), "bias": (300,)}
RATIOS = {0: 1.0, 2: 0.5, 4: 0.1}
N = 4


def warmed_up(compress_ratio):
    exchange = Exchange(
        AXIS, compress_ratio=compress_ratio, min_size=100, sync_every=None
    )
    return slamb_jax.slamb(0.01, exchange)


def test_before_the_first_change_it_is_the_first_ratio():
    grads = [random_tree(SHAPES, t, N) for t in range(1, 5)]
    got, want = (
        train(warmed_up(ratio), random_tree(SHAPES, 0), grads, "vmap")
        for ratio in ({0: 0.5, 3: 0.1}, 0.5)
    )
    for t in range(3):
        assert_close(got[t][0], want[t][0])
    assert not np.allclose(got[3][0]["w"], want[3][0]["w"], rtol=1e-4)


def test_one_program_has_an_exchange_for_each_ratio(optimized):
    tx = warmed_up(RATIOS)
    params = random_tree(SHAPES, 0)
    stacked, state = stack(params, N), stack(tx.init(params), N)
    step = stepper(tx, "shard_map", N)
    report = slamb_jax.wire_report(optimized(step.lower(stacked, state, stacked)))
    assert {c.conditional for c in report.collectives} == {True}
    leaves = [Leaf(i, SHAPES[name]) for i, name in enumerate(sorted(SHAPES))]
    want = [
        sum(elements_sent(Strided(ratio, 100), leaf) for leaf in leaves)
        for ratio in RATIOS.values()
    ]
    assert sorted(c.elements for c in report.collectives) == sorted(want)


def test_no_change_recompiles():
    tx, start = warmed_up(RATIOS), random_tree(SHAPES, 0)
    params, state = stack((start, tx.init(start)), N)
    step = stepper(tx, "vmap", N)
    for t in range(6):
        params, state = step(random_tree(SHAPES, t, N), state, params)
    assert step._cache_size() == 1


def test_ages_go_on_across_a_change():
    """Of blocks of another size, too, and of leaves that were dense before."""
    leaf = Leaf(0, (40, 300))
    phases = {0: Strided(1.0), 3: Strided(0.5, 0), 7: Permutation(0.1, 0)}
    schedule = Schedule(phases)
    ages = jax.jit(lambda t: schedule.age(t, leaf))
    age = 0
    for t in range(1, 14):
        start = max(s for s in phases if s < t)
        chosen = True
        if not phases[start].dense(leaf):
            own = np.asarray(phases[start].age(jnp.int32(t), leaf)) == 0
            chosen = np.repeat(own, phases[start].block_size(leaf), 0)
        got = np.asarray(ages(jnp.int32(t)))
        got = np.repeat(got, schedule.block_size(leaf), 0)
        age = np.where(chosen, 0, age + 1)
        np.testing.assert_array_equal(got, np.broadcast_to(age, got.shape))


def test_residuals_are_kept_across_a_change():
    schedule = Schedule({0: Strided(1.0, 0), 2: Strided(0.25, 0)})
    tx = slamb_jax.randk_compress_with_error_feedback(Exchange(selection=schedule))
    g = random_tree({"w": (16, 24)}, 3)
    state, seen, update = tx.init(g), jnp.zeros((16, 24)), jax.jit(tx.update)
    for t in range(1, 8):
        u, state = update(g, state)
        seen = seen + u["w"]
        assert_close(seen + state.residual["w"], t * g["w"])
