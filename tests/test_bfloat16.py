"""Training in bfloat16: small steps, bit by bit and on average."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slamb_jax
from slamb_jax._core.rounding import step_seed, stochastic_round
from tests.close import assert_close
from tests.optimizers import random_tree
from tests.workers import AXIS, over_workers, stack, train

BF16 = jnp.bfloat16
N = 4
ALONE = slamb_jax.Exchange()
BETWEEN = slamb_jax.Exchange.paper(AXIS, sync_every=3)


def test_stochastic_rounding_is_unbiased_and_takes_neighbours():
    x = jnp.float32([1.0, 1.001, -1.0019, 3e-5, -7e20, 255.3])
    draws = jax.vmap(
        lambda t: stochastic_round(jnp.broadcast_to(x, (50, 6)), step_seed(t, 5))
    )(jnp.arange(1, 401))
    draws = np.asarray(draws, np.float64).reshape(-1, 6)
    wide = np.asarray(x, np.float64)
    ulp = 2.0 ** (np.floor(np.log2(np.abs(wide))) - 7)
    assert (np.abs(draws - wide) < ulp).all()
    below = np.floor(wide / ulp) * ulp
    share = (wide - below) / ulp
    deviation = np.sqrt(share * (1 - share) / len(draws)) * ulp
    z = np.abs(draws.mean(0) - wide) / np.maximum(deviation, 1e-12 * ulp)
    assert (z[1:] < 5).all(), z
    assert (draws[:, 0] == 1).all()  # what is exact stays


def test_stochastic_rounding_keeps_zeros_infinities_and_nan():
    x = jnp.float32([0.0, -0.0, np.inf, -np.inf, np.nan])
    draws = jax.vmap(lambda t: stochastic_round(x, step_seed(t, 0)))(jnp.arange(1, 50))
    for out in np.asarray(draws, np.float32):
        np.testing.assert_array_equal(out, np.asarray(x))


def steps(tx, params, grads, promotion="strict"):
    """Parameters and state after each step."""
    with jax.numpy_dtype_promotion(promotion):
        step = jax.jit(tx.update)
        state, out = tx.init(params), []
        for g in grads:
            updates, state = step(g, state, params)
            dtypes = jax.tree.map(lambda x: x.dtype, (updates, params))
            assert dtypes[0] == dtypes[1]
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
    inner = slamb_jax.slamb(0.02, ALONE)
    want = steps(inner, wide, wide_grads)
    got = steps(slamb_jax.train_in_bfloat16(inner), params, grads)
    for (_, state), (q, inner_state) in zip(got, want, strict=True):
        assert_close((state.master, state.inner), (q, inner_state), units=128)


@pytest.mark.parametrize("rounding", ["master", "stochastic"])
def test_the_same_bits_under_either_promotion(rounding):
    params, grads = random_run(1, 4)
    tx = slamb_jax.train_in_bfloat16(optax.sgd(0.02), rounding)
    ends = [steps(tx, params, grads, p)[-1] for p in ("strict", "standard")]
    jax.tree.map(np.testing.assert_array_equal, *ends)


def test_updates_end_on_the_rounded_master():
    """Exactly, unless a sign or a factor of 2 is crossed; then within 1/256."""
    rng = np.random.default_rng(0)
    p = jnp.asarray(rng.normal(size=20000), BF16)
    tx = slamb_jax.train_in_bfloat16(optax.identity())
    update = jax.jit(tx.update)
    for size in (1e-4, 1e-2, 0.3, 2.0):
        u = jnp.asarray(rng.normal(size=p.shape) * size, jnp.float32)
        updates, state = update(u, tx.init(p), p)
        got = np.asarray(optax.apply_updates(p, updates), np.float64)
        want = np.asarray(state.master.astype(BF16), np.float64)
        old = np.asarray(p, np.float64)
        near = (want * old > 0) & (np.abs(want) <= 2 * np.abs(old))
        near &= 2 * np.abs(want) >= np.abs(old)
        assert near.sum() > 1000
        np.testing.assert_array_equal(got[near], want[near])
        most = np.abs(want - old) / 256 + np.abs(want) / 128
        assert (np.abs(got - want) <= most)[~near].all()


def test_small_steps_are_lost_without_it_and_not_with_it():
    grads = [jnp.full(1000, -1.0, BF16)] * 200  # each moves by 1e-4, 2e-2 in all
    sgd, ends = optax.sgd(1e-4), {}
    for name, tx in (
        ("plain", sgd),
        ("master", slamb_jax.train_in_bfloat16(sgd)),
        ("stochastic", slamb_jax.train_in_bfloat16(sgd, "stochastic")),
    ):
        params = steps(tx, jnp.ones(1000, BF16), grads, "standard")[-1][0]
        ends[name] = float(np.asarray(params, np.float64).mean())
    assert ends["plain"] == 1.0
    assert ends["master"] == pytest.approx(1.02, abs=2**-8)
    assert ends["stochastic"] == pytest.approx(1.02, abs=1e-3)


def test_a_16_bit_second_moment_follows_the_32_bit_one():
    """Rounded to nearest, v stalls as soon as it moves by less than 1/256 of itself."""
    b2, rng = 0.999, np.random.default_rng(0)
    p = jnp.zeros(2000)
    size = np.where(np.arange(4000) < 2000, 1.0, 4.0)  # the gradient grows
    grads = jnp.asarray(rng.choice([-1.0, 1.0], (4000, 1)) * size[:, None], jnp.float32)
    ends = {}
    for nu_dtype in (None, "bfloat16"):
        alone = {"exchange": ALONE, "b1": 0.0, "b2": b2, "nu_dtype": nu_dtype}
        tx = slamb_jax.mask_momentum(**alone)

        def one(state, g, tx=tx):
            return tx.update(jnp.broadcast_to(g, p.shape), state, p)[1], None

        state = jax.jit(lambda s, one=one: jax.lax.scan(one, s, grads)[0])(tx.init(p))
        assert state.nu.dtype == (BF16 if nu_dtype else jnp.float32)
        ends[nu_dtype] = float(np.asarray(state.nu, np.float64).mean())
    stalled = BF16(0.0)
    for g in size:
        stalled = (b2 * stalled.astype(np.float32) + (1 - b2) * g**2).astype(BF16)
    assert ends["bfloat16"] == pytest.approx(ends[None], rel=0.005)
    assert float(stalled) < 0.5 * ends[None]


@pytest.mark.parametrize("rounding", ["master", "stochastic"])
def test_replicas_that_agree_stay_so_and_averages_count(rounding):
    """Averaging at every step: the master copies, or what is rounded alike, agree."""
    inner = slamb_jax.slamb(0.02, slamb_jax.Exchange.paper(AXIS, sync_every=1))
    tx = slamb_jax.train_in_bfloat16(inner, rounding)
    params, state = train(tx, *random_run(2, 4, N), "shard_map")[-1]
    for x in jax.tree.leaves(params):
        apart = np.ptp(np.asarray(x, np.float64), 0)
        assert (apart <= np.abs(np.asarray(x, np.float64)).max(0) / 128 + 1e-6).all()
        assert (apart == 0).mean() > 0.95
    if rounding == "master":
        slamb_jax.assert_replicas_agree(state.master, rtol=1e-5)


def test_equal_replicas_have_equal_bits():
    tx = slamb_jax.train_in_bfloat16(
        slamb_jax.slamb(0.02, BETWEEN, nu_dtype="bfloat16"), "stochastic", seed=4
    )
    params, (grads, *_) = random_run(3)
    one = over_workers(lambda g, p: tx.update(g, tx.init(p), p)[0], "shard_map", N)
    slamb_jax.assert_replicas_agree(one(stack(grads, N), stack(params, N)))
    u, v = (
        slamb_jax.train_in_bfloat16(optax.identity(), "stochastic", seed=seed)
        for seed in (4, 5)
    )
    u, v = (t.update(grads, t.init(params), params)[0]["w"] for t in (u, v))
    assert (np.asarray(u) != np.asarray(v)).any()


def test_bytes_of_state():
    params = {"w": jnp.zeros((100, 100), BF16)}
    wide = slamb_jax.slamb(0.1, ALONE)
    short = slamb_jax.slamb(0.1, ALONE, mu_dtype="bfloat16", nu_dtype="bfloat16")
    for inner, rounding, want in (
        (wide, "master", 14), (wide, "stochastic", 10),
        (short, "master", 10), (short, "stochastic", 6),
    ):  # fmt: skip
        state = slamb_jax.train_in_bfloat16(inner, rounding).init(params)
        held = sum(x.nbytes for x in jax.tree.leaves((params, state)))
        assert held / 10_000 == pytest.approx(want, abs=0.01)
