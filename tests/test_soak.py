"""A long run, poisoned and interrupted, ends with the same bits."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slamb_jax
from tests.workers import AXIS

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
