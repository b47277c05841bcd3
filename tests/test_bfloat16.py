"""Training in bfloat16: what small steps come to, bit by bit and on average."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slamb_jax
from slamb_jax.wrappers.bfloat16 import _nearest, round_at_random, step_salt
from tests.workers import AXIS, over_workers, stack, stepper

BF16 = jnp.bfloat16
N = 4


def bits(x):
    return np.asarray(x).view(np.uint16)


def numbers(seed, count=4000):
    """Of all sizes and signs, with the corners."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=count) * 10.0 ** rng.integers(-30, 30, count)
    corners = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, 3.4e38, -3.4e38]
    return jnp.asarray(np.concatenate([corners, x]), jnp.float32)


def test_nearest_is_the_cast():
    x = numbers(0)
    finite = ~np.isnan(np.asarray(x))
    np.testing.assert_array_equal(
        bits(_nearest(x))[finite], bits(x.astype(BF16))[finite]
    )
    assert np.isnan(np.asarray(_nearest(jnp.float32([np.nan])), np.float32)).all()


def test_rounding_at_random_is_unbiased_and_takes_neighbours():
    x = jnp.float32([1.0, 1.001, -1.0019, 3e-5, -7e20, 255.3])
    draws = jax.vmap(
        lambda t: round_at_random(jnp.broadcast_to(x, (50, 6)), step_salt(t, 5))
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


def test_rounding_at_random_keeps_what_is_no_number():
    x = numbers(0)[:5]
    for t in range(1, 50):
        out = np.asarray(round_at_random(x, step_salt(jnp.int32(t), 0)), np.float32)
        np.testing.assert_array_equal(out, np.asarray(x))


def steps(tx, params, grads, promotion="strict"):
    """All parameters and states on the way."""
    with jax.numpy_dtype_promotion(promotion):
        step = jax.jit(tx.update)
        state, out = tx.init(params), []
        for g in grads:
            updates, state = step(g, state, params)
            assert jax.tree.map(lambda u: u.dtype, updates) == jax.tree.map(
                lambda p: p.dtype, params
            )
            params = optax.apply_updates(params, updates)
            out.append((params, state))
    return out


def random_run(seed, count=12):
    rng = np.random.default_rng(seed)
    params = {"w": jnp.asarray(rng.normal(size=(16, 40)), BF16)}
    params |= {
        "b": jnp.asarray(rng.normal(size=8) * 1e-3, BF16),
        "z": jnp.zeros(3, BF16),
    }
    grads = [
        jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), BF16), params)
        for _ in range(count)
    ]
    return params, grads


def test_the_master_copy_takes_the_steps_of_float32():
    params, grads = random_run(0)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    wide_grads = jax.tree.map(lambda x: x.astype(jnp.float32), grads)
    inner = slamb_jax.slamb(0.02, min_size=0)
    want = steps(inner, wide, wide_grads)
    got = steps(slamb_jax.train_in_bfloat16(inner), params, grads)
    before = wide
    for (p, state), (q, inner_state) in zip(got, want, strict=True):
        close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7)
        jax.tree.map(close, (state.master, state.inner), (q, inner_state))
        for k in p:  # within an ulp, and 1/256 of the distance
            there, now = np.asarray(q[k], float), np.asarray(p[k], float)
            most = np.abs(there) / 128 + np.abs(there - before[k]) / 256
            assert (np.abs(now - there) <= most + 1e-7).all()
        before = {k: np.asarray(x, float) for k, x in p.items()}


@pytest.mark.parametrize("rounding", ["master", "stochastic"])
def test_the_same_bits_under_either_promotion(rounding):
    params, grads = random_run(1)
    tx = slamb_jax.train_in_bfloat16(slamb_jax.slamb(0.02, min_size=0), rounding)
    ends = [steps(tx, params, grads, p)[-1] for p in ("strict", "standard")]
    jax.tree.map(np.testing.assert_array_equal, *ends)


def test_updates_land_on_the_rounded_master():
    """Exactly, unless a sign or a factor of 2 is crossed; then within 1/256."""
    rng = np.random.default_rng(0)
    p = jnp.asarray(rng.normal(size=20000), BF16)
    for size in (1e-4, 1e-2, 0.3, 2.0):
        u = jnp.asarray(rng.normal(size=p.shape) * size, jnp.float32)
        tx = slamb_jax.train_in_bfloat16(optax.identity())
        updates, state = jax.jit(tx.update)(u, tx.init(p), p)
        got = np.asarray(optax.apply_updates(p, updates), np.float64)
        want = np.asarray(state.master.astype(BF16), np.float64)
        old = np.asarray(p, np.float64)
        near = (want * old > 0) & (np.abs(want) <= 2 * np.abs(old))
        near &= 2 * np.abs(want) >= np.abs(old)
        assert near.sum() > 1000
        np.testing.assert_array_equal(got[near], want[near])
        rest = np.abs(got - want)[~near]
        assert (
            rest <= np.abs(want - old)[~near] / 256 + np.abs(want)[~near] / 128
        ).all()


def test_small_steps_are_lost_without_it_and_not_with_it():
    grads = [jnp.full(1000, -1.0, BF16)] * 200  # each moves by 1e-4, 2e-2 in all
    ends = {}
    for name, tx in (
        ("naive", optax.sgd(1e-4)),
        ("master", slamb_jax.train_in_bfloat16(optax.sgd(1e-4))),
        ("stochastic", slamb_jax.train_in_bfloat16(optax.sgd(1e-4), "stochastic")),
    ):
        params = steps(tx, jnp.ones(1000, BF16), grads, "standard")[-1][0]
        ends[name] = float(np.asarray(params, np.float64).mean())
    assert ends["naive"] == 1.0
    assert ends["master"] == pytest.approx(1.02, abs=2**-8)
    assert ends["stochastic"] == pytest.approx(1.02, abs=1e-3)


def test_a_short_second_moment_follows_the_long_one():
    """Rounded to nearest, v stalls as soon as it moves by less than 1/256 of itself."""
    b2, rng = 0.999, np.random.default_rng(0)
    compressor = slamb_jax.randk_compress_with_error_feedback(keep_residual=False)
    p = jnp.zeros(2000)
    size = np.where(np.arange(4000) < 2000, 1.0, 4.0)  # the gradient grows
    grads = jnp.asarray(rng.choice([-1.0, 1.0], (4000, 1)) * size[:, None], jnp.float32)
    ends = {}
    for name, nu_dtype in (("long", None), ("short", "bfloat16")):
        tx = slamb_jax.mask_momentum(compressor, b2=b2, nu_dtype=nu_dtype)

        def one(state, g, tx=tx):
            return tx.update(jnp.broadcast_to(g, p.shape), state, p)[1], None

        state = jax.jit(lambda s, one=one: jax.lax.scan(one, s, grads)[0])(tx.init(p))
        assert state.nu.dtype == (BF16 if nu_dtype else jnp.float32)
        ends[name] = float(np.asarray(state.nu, np.float64).mean())
    stalled = BF16(0.0)
    for g in size:
        stalled = (b2 * stalled.astype(np.float32) + (1 - b2) * g**2).astype(BF16)
    assert ends["short"] == pytest.approx(ends["long"], rel=0.005)
    assert float(stalled) < 0.5 * ends["long"]


@pytest.mark.parametrize("rounding", ["master", "stochastic"])
def test_replicas_that_agree_go_on_agreeing_and_averages_count(rounding):
    """Averaging at every step: the master copies, or what is rounded alike, agree."""
    inner = slamb_jax.slamb(0.02, axis_name=AXIS, min_size=0, sync_every=1)
    tx = slamb_jax.train_in_bfloat16(inner, rounding)
    params, _ = random_run(2)
    rng = np.random.default_rng(0)
    step = stepper(tx, "shard_map", N)
    state, params = stack(tx.init(params), N), stack(params, N)
    for _ in range(4):
        grads = jax.tree.map(
            lambda p: jnp.asarray(rng.normal(size=p.shape), BF16), params
        )
        params, state = step(grads, state, params)
    for x in jax.tree.leaves(params):
        spread = np.ptp(np.asarray(x, np.float64), 0)
        assert (spread <= np.abs(np.asarray(x, np.float64)).max(0) / 128 + 1e-6).all()
        assert (spread == 0).mean() > 0.95
    if rounding == "master":
        slamb_jax.assert_replicas_agree(state.master, rtol=1e-5)


def test_equal_replicas_have_equal_bits():
    tx = slamb_jax.train_in_bfloat16(
        slamb_jax.slamb(0.02, min_size=0, nu_dtype="bfloat16"), "stochastic", seed=4
    )
    params, (grads, *_) = random_run(3)
    one = over_workers(lambda g, p: tx.update(g, tx.init(p), p)[0], "shard_map", N)
    out = one(stack(grads, N), stack(params, N))
    slamb_jax.assert_replicas_agree(out)
    other = slamb_jax.train_in_bfloat16(optax.identity(), "stochastic", seed=5)
    same = slamb_jax.train_in_bfloat16(optax.identity(), "stochastic", seed=4)
    u, v = (t.update(grads, t.init(params), params)[0]["w"] for t in (other, same))
    assert (np.asarray(u) != np.asarray(v)).any()


def test_what_goes_around_it(tmp_path):
    """Injected rates, skipped steps, checkpoints, another number of workers."""
    inner = optax.inject_hyperparams(
        slamb_jax.slamb, static_args=slamb_jax.STATIC_ARGS
    )(0.02, axis_name=AXIS, min_size=0, mu_dtype="bfloat16", nu_dtype="bfloat16")
    tx = slamb_jax.skip_not_finite(slamb_jax.train_in_bfloat16(inner), AXIS)
    params, (grads, *_) = random_run(4)
    mesh = jax.make_mesh((N,), (AXIS,), devices=jax.devices()[:N])

    def step(state, g):
        params, opt_state = state
        g = jax.tree.map(lambda x: jnp.squeeze(x, 0), g)
        updates, opt_state = tx.update(g, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), ()

    run = slamb_jax.per_worker_step(step, mesh, AXIS)
    state = slamb_jax.replicate((params, tx.init(params)), mesh, AXIS)
    state, _ = run(state, stack(grads, N))
    before = jax.device_get(state)
    bad = grads | {"z": grads["z"].at[0].set(jnp.nan)}
    state, _ = run(state, stack(bad, N))
    jax.tree.map(np.testing.assert_array_equal, state[0], before[0])
    jax.tree.map(np.testing.assert_array_equal, state[1].inner, before[1].inner)
    with slamb_jax.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, state)
        back = checkpoints.restore(state).state
    jax.tree.map(np.testing.assert_array_equal, back, state)
    fewer = slamb_jax.resize(state, 2)
    for x, y in zip(
        jax.tree.leaves(fewer[1].inner.master),
        jax.tree.leaves(state[1].inner.master),
        strict=True,
    ):
        np.testing.assert_allclose(x.mean(0), y.mean(0), rtol=1e-6, atol=1e-8)
    pair = slamb_jax.per_worker_step(
        step, jax.make_mesh((2,), (AXIS,), devices=jax.devices()[:2]), AXIS
    )
    (params, _), _ = pair(fewer, stack(grads, 2))
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in params.values())


def test_bytes_of_state():
    params = {"w": jnp.zeros((100, 100), BF16)}
    shortest = slamb_jax.slamb(0.1, mu_dtype="bfloat16", nu_dtype="bfloat16")
    for inner, rounding, want in (
        (slamb_jax.slamb(0.1), "master", 14), (slamb_jax.slamb(0.1), "stochastic", 10),
        (shortest, "master", 10), (shortest, "stochastic", 6),
    ):  # fmt: skip
        state = slamb_jax.train_in_bfloat16(inner, rounding).init(params)
        held = sum(x.nbytes for x in jax.tree.leaves((params, state)))
        assert held / 10_000 == pytest.approx(want, abs=0.01)
