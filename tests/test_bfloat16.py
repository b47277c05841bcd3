"""Training in bfloat16: small steps, bit by bit and on average."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slamb_jax
from slamb_jax._core.rounding import step_seed, stochastic_round
from tests.close import assert_close
from tests.optimizers import random_tree
from tests.workers import AXIS, train

BF16 = jnp.bfloat16
N = 4
ALONE = slamb_jax.Exchange()
BETWEEN = slamb_jax.Exchange.paper(AXIS, sync_every=3)
EACH_ROUNDING = pytest.mark.parametrize("rounding", ["master", "stochastic"])


def rounded(x, seed, steps):
    draw = jax.vmap(lambda t: stochastic_round(x, step_seed(t, seed)))
    return np.asarray(draw(jnp.arange(1, steps)), np.float32)


def test_stochastic_rounding_is_unbiased_and_keeps_what_it_can():
    """It takes neighbours; zeros, infinities and NaN stay."""
    x = jnp.float32([1.0, 1.001, -1.0019, 3e-5, -7e20, 255.3])
    draws = rounded(jnp.broadcast_to(x, (50, 6)), 5, 401).reshape(-1, 6)
    draws, wide = draws.astype(np.float64), np.asarray(x, np.float64)
    ulp = 2.0 ** (np.floor(np.log2(np.abs(wide))) - 7)
    assert (np.abs(draws - wide) < ulp).all()
    share = wide / ulp - np.floor(wide / ulp)
    deviation = np.sqrt(share * (1 - share) / len(draws)) * ulp
    z = np.abs(draws.mean(0) - wide) / np.maximum(deviation, 1e-12 * ulp)
    assert (z[1:] < 5).all(), z
    assert (draws[:, 0] == 1).all()  # what is exact stays
    x = jnp.float32([0.0, -0.0, np.inf, -np.inf, np.nan])
    draws = rounded(x, 0, 50)
    chex.assert_trees_all_equal(draws, np.broadcast_to(x, draws.shape))


def steps(tx, params, grads, promotion="strict"):
    """Parameters and state after each step."""
    with jax.numpy_dtype_promotion(promotion):
        step = jax.jit(tx.update)
        state, out = tx.init(params), []
        for g in grads:
            updates, state = step(g, state, params)
            chex.assert_trees_all_equal_dtypes(updates, params)
            params = optax.apply_updates(params, updates)
            out.append((params, state))
    return out


def random_run(seed, count=12, *lead):
    shapes = {"w": (16, 40), "b": (8,), "z": (3,)}
    params, *grads = (
        jax.tree.map(lambda x: x.astype(BF16), random_tree(shapes, 20 * seed + t, *n))
        for t, n in enumerate([(), *[lead] * count])
    )
    return params | {"b": params["b"] * BF16(1e-3), "z": jnp.zeros(3, BF16)}, grads


def test_the_master_copy_takes_the_steps_of_float32():
    params, grads = random_run(0)
    wide, wide_grads = jax.tree.map(lambda x: x.astype(jnp.float32), (params, grads))
    inner = slamb_jax.lamb(0.02, ALONE)
    got = steps(slamb_jax.train_in_bfloat16(inner), params, grads)
    ends = [(state.master, state.inner) for _, state in got]
    assert_close(ends, steps(inner, wide, wide_grads), units=128)


@EACH_ROUNDING
def test_the_same_bits_under_either_promotion_and_others_of_another_seed(rounding):
    params, grads = random_run(1, 4)
    make = functools.partial(slamb_jax.train_in_bfloat16, optax.sgd(0.02), rounding)
    ends = [steps(make(), params, grads, p)[-1] for p in ("strict", "standard")]
    chex.assert_trees_all_equal(*ends)
    other, _ = steps(make(seed=1), params, grads)[-1]
    assert (other["w"] != ends[0][0]["w"]).any() == (rounding == "stochastic")


def test_updates_end_on_the_rounded_master():
    """Exactly, unless a sign or a factor of 2 is crossed; then within 1/256."""
    rng = np.random.default_rng(0)
    p = jnp.asarray(rng.normal(size=20000), BF16)
    tx = slamb_jax.train_in_bfloat16(optax.identity())
    update = jax.jit(tx.update)
    for size in (1e-4, 1e-2, 0.3, 2.0):
        u = jnp.asarray(rng.normal(size=p.shape) * size, jnp.float32)
        updates, state = update(u, tx.init(p), p)
        ends = optax.apply_updates(p, updates), state.master.astype(BF16), p
        got, want, old = (np.asarray(x, np.float64) for x in ends)
        near = (want * old > 0) & (np.abs(want) <= 2 * np.abs(old))
        near &= 2 * np.abs(want) >= np.abs(old)
        assert near.sum() > 1000
        chex.assert_trees_all_equal(got[near], want[near])
        most = np.abs(want - old) / 256 + np.abs(want) / 128
        assert (np.abs(got - want) <= most)[~near].all()


def test_small_steps_are_lost_without_it_and_not_with_it():
    grads, sgd = [jnp.full(1000, -1.0, BF16)] * 200, optax.sgd(1e-4)  # 2e-2 in all
    for tx, want in (
        (sgd, 1.0),
        (slamb_jax.train_in_bfloat16(sgd), pytest.approx(1.02, abs=2**-8)),
        (slamb_jax.train_in_bfloat16(sgd, "stochastic"), pytest.approx(1.02, abs=1e-3)),
    ):
        params = steps(tx, jnp.ones(1000, BF16), grads, "standard")[-1][0]
        assert np.asarray(params, np.float64).mean() == want


def test_a_16_bit_second_moment_follows_the_32_bit_one():
    """Rounded to nearest, v stalls as soon as it moves by less than 1/256 of itself."""
    b2, rng, p = 0.999, np.random.default_rng(0), jnp.zeros(2000)
    size = np.where(np.arange(4000) < 2000, 1.0, 4.0)  # the gradient grows
    grads = jnp.asarray(rng.choice([-1.0, 1.0], (4000, 1)) * size[:, None], jnp.float32)

    def end(nu_dtype):
        alone = {"exchange": ALONE, "b1": 0.0, "b2": b2, "nu_dtype": nu_dtype}
        tx = slamb_jax.mask_momentum(**alone)

        def one(state, g):
            return tx.update(jnp.broadcast_to(g, p.shape), state, p)[1], None

        state = jax.jit(lambda s: jax.lax.scan(one, s, grads)[0])(tx.init(p))
        assert state.nu.dtype == (nu_dtype or jnp.float32)
        return np.asarray(state.nu, np.float64).mean()

    wide, stalled = end(None), BF16(0.0)
    for g in size:
        stalled = (b2 * stalled.astype(np.float32) + (1 - b2) * g**2).astype(BF16)
    assert end("bfloat16") == pytest.approx(wide, rel=0.005)
    assert float(stalled) < 0.5 * wide


@EACH_ROUNDING
def test_replicas_that_agree_stay_so_and_averages_count(rounding):
    """Averaging at every step: the master copies, or what is rounded alike, agree."""
    inner = slamb_jax.slamb(0.02, slamb_jax.Exchange.paper(AXIS, sync_every=1))
    tx = slamb_jax.train_in_bfloat16(inner, rounding)
    params, state = train(tx, *random_run(2, 4, N), "shard_map")[-1]
    for x in jax.tree.leaves(params):
        wide = np.asarray(x, np.float64)
        apart = np.ptp(wide, 0)
        assert (apart <= np.abs(wide).max(0) / 128 + 1e-6).all()
        assert (apart == 0).mean() > 0.95
    if rounding == "master":
        slamb_jax.assert_replicas_agree(state.master, rtol=1e-5)


@EACH_ROUNDING
@pytest.mark.parametrize(("dtype", "moments"), [(None, 8), ("bfloat16", 4)])
def test_bytes_of_state(dtype, moments, rounding):
    params = {"w": jnp.zeros((100, 100), BF16)}
    inner = slamb_jax.lamb(0.1, ALONE, mu_dtype=dtype, nu_dtype=dtype)
    state = slamb_jax.train_in_bfloat16(inner, rounding).init(params)
    held = sum(x.nbytes for x in jax.tree.leaves((params, state)))
    want = 2 + moments + (4 if rounding == "master" else 0)
    assert held / 10_000 == pytest.approx(want, abs=0.01)
