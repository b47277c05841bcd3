"""Conservation, on any tree: what is sent plus what is kept is what there was."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import slamb_jax
from tests.workers import AXIS, over_workers, train

SELECTION = st.sampled_from(["strided", "permutation", "bernoulli", "top_k"])
SHAPES = st.lists(
    st.sampled_from([(), (0,), (7,), (1, 1), (3, 5), (16, 8), (0, 4), (2, 3, 5),
                     (11, 13), (24, 64)]),
    min_size=1, max_size=4,
)  # fmt: skip
RATIO = st.sampled_from([1.0, 0.9, 0.5, 0.3, 0.1, 0.02])
SEED = st.integers(0, 2**31 - 1)
DTYPE = st.sampled_from(["float32", "bfloat16", "float16"])


def exchange_of(selection, ratio, seed, **settings):
    return slamb_jax.Exchange(
        AXIS, selection=selection, compress_ratio=ratio, seed=seed % 100, min_size=0,
        **settings,
    )  # fmt: skip


def trees(shapes, dtypes, n, seed, steps=4):
    """Parameters, and gradients of n workers at each step."""
    rng = np.random.default_rng(seed)

    def new(*lead):
        return [
            jnp.asarray(rng.normal(size=(*lead, *shape)).astype(dtype))
            for shape, dtype in zip(shapes, dtypes, strict=False)
        ]

    return new(), [new(n) for _ in range(steps)]


@given(
    selection=SELECTION, shapes=SHAPES, n=st.sampled_from([1, 2, 5]), ratio=RATIO,
    seed=SEED, dtypes=st.lists(DTYPE, min_size=4, max_size=4),
)  # fmt: skip
def test_sent_and_kept_are_what_there_was(selection, shapes, n, ratio, seed, dtypes):
    """Of each worker: x = g + e is what it sends and what it keeps, at every step."""
    params, grads = trees(shapes, dtypes, n, seed)
    tx = slamb_jax.randk_compress_with_error_feedback(
        exchange_of(selection, ratio, seed)
    )
    step = over_workers(tx.update, "vmap", n)
    state = jax.vmap(lambda _: tx.init(params))(jnp.arange(n))
    for g in grads:
        before = state
        updates, state = step(g, before)
        for j in range(len(shapes)):
            x = np.asarray(g[j], np.float32) + np.asarray(before.residual[j])
            kept = np.asarray(state.residual[j])
            sent = (x - kept).astype(np.float64)
            got = np.asarray(updates[j], np.float64)
            eps = float(jnp.finfo(dtypes[j]).eps) * (1 + np.abs(x).max(initial=0))
            # All receive the mean of what was sent; nothing else moved.
            want = np.broadcast_to(sent.mean(0), got.shape)
            np.testing.assert_allclose(got, want, atol=2 * eps, rtol=0)
            if dtypes[j] == "float32":  # an element is sent or kept
                assert ((kept == 0) | (kept == x)).all()
                unsent = (got == 0) & (x != 0)
                np.testing.assert_array_equal(kept[unsent], x[unsent])


@given(
    selection=SELECTION, shapes=SHAPES, n=st.sampled_from([2, 3, 4]), ratio=RATIO,
    seed=SEED, mu_dtype=st.sampled_from(["float32", "bfloat16"]),
)  # fmt: skip
def test_the_mean_of_the_momentum_is_that_of_adam(
    selection, shapes, n, ratio, seed, mu_dtype
):
    """Sent or not, nothing of a gradient is lost: the mean over workers is dense."""
    params, grads = trees(shapes, ["float32"] * 4, n, seed, steps=6)
    exchange = exchange_of(selection, ratio, seed)
    tx = slamb_jax.slamb(0.01, exchange, mu_dtype=mu_dtype)
    history = train(tx, params, grads, "vmap")
    eps = float(jnp.finfo(mu_dtype).eps)
    for j in range(len(shapes)):
        dense = np.zeros(shapes[j])
        for (_, state), g in zip(history, grads, strict=True):
            dense = 0.9 * dense + 0.1 * np.asarray(g[j], np.float64).mean(0)
            mean = np.asarray(state[0].mu[j], np.float64).mean(0)
            np.testing.assert_allclose(mean, dense, atol=8 * eps, rtol=0)


@given(
    selection=SELECTION, shapes=SHAPES, n=st.sampled_from([1, 2, 4]), ratio=RATIO,
    seed=SEED, form=st.sampled_from(["sum", "product"]), dtype=DTYPE,
    sync_every=st.sampled_from([None, 1, 2]),
    mapping=st.sampled_from(["vmap", "shard_map"]),
)  # fmt: skip
def test_the_same_seed_gives_the_same_bits(
    selection, shapes, n, ratio, seed, form, dtype, sync_every, mapping
):
    params, grads = trees(shapes, [dtype] * 4, n, seed, steps=3)
    exchange = exchange_of(selection, ratio, seed, sync_every=sync_every)

    def run():  # made anew, so that nothing is left of the first run
        tx = slamb_jax.slamb(0.01, exchange, form=form)
        return train(slamb_jax.skip_not_finite(tx, exchange), params, grads, mapping)

    for a, b in zip(*(map(jax.tree.leaves, (run(), run()))), strict=True):
        assert a.tobytes() == b.tobytes()


WORKERS, STEPS, SAVE_EVERY = 4, 10_000, 97


def batch_at(rng):
    batch = rng.normal(size=(4 * WORKERS, 12)).astype(np.float32)
    if rng.random() < 0.01:  # and it may be that of any worker
        batch[rng.integers(len(batch)), 0] = rng.choice([np.nan, np.inf])
    return batch


@pytest.mark.long
def test_soak(tmp_path):
    """10,000 steps, a hundredth poisoned, interrupted 100 times: the same bits."""
    rate = optax.warmup_cosine_decay_schedule(0.0, 0.02, 500, STEPS)
    exchange = slamb_jax.Exchange(AXIS, min_size=16, sync_every=10)
    tx = slamb_jax.skip_not_finite(slamb_jax.slamb(rate, exchange, b3=0.9), exchange)
    truth = jnp.asarray(np.random.default_rng(1).normal(size=(12, 9)), jnp.float32)

    def step(state, batch):
        params, opt_state = state
        loss = lambda p: jnp.mean((batch @ p - batch @ truth) ** 2)  # noqa: E731
        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    run = slamb_jax.simulated_step(step, WORKERS, exchange)

    def fresh():
        params = jnp.zeros((12, 9))
        return slamb_jax.simulated_replicas((params, tx.init(params)), WORKERS)

    def train_to_end(interruptions):
        state, rng, t = fresh(), np.random.default_rng(2), 0
        with slamb_jax.Checkpoints(tmp_path / str(len(interruptions))) as checkpoints:
            while t < STEPS:
                if t in interruptions:  # all that is in memory is gone
                    interruptions.remove(t)
                    found = checkpoints.restore(fresh())
                    state, rng, t = fresh(), np.random.default_rng(2), 0
                    if found:
                        t, state = found.step, found.state
                        rng.bit_generator.state = found.extra
                state, _ = run(state, batch_at(rng))
                t += 1
                if interruptions and t % SAVE_EVERY == 0:
                    checkpoints.save(t, state, rng.bit_generator.state)
        return state

    chosen = np.random.default_rng(3).choice(np.arange(1, STEPS), 100, replace=False)
    with jax.numpy_dtype_promotion("standard"):  # optax's schedules need it
        want, got = train_to_end(set()), train_to_end(set(chosen.tolist()))
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    skipped = int(got[1].total_notfinite[0])
    assert int(got[1].inner[0].count[0]) == STEPS - skipped
    assert 50 < skipped < 150
    assert float(jnp.abs(slamb_jax.consolidate(got[0]) - truth).max()) < 0.1
