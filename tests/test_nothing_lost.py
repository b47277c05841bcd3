"""Laws that hold on any tree: what is sent plus what stays is what there was."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import slamb_jax
from tests.workers import AXIS, over_workers, train

SELECTIONS = {
    "strided": slamb_jax.Strided,
    "permutation": slamb_jax.Permutation,
    "bernoulli": slamb_jax.Bernoulli,
}
SHAPE = st.sampled_from(
    [(), (0,), (7,), (1, 1), (3, 5), (16, 8), (0, 4), (2, 3, 5), (11, 13), (24, 64)]
)
SHAPES = st.lists(SHAPE, min_size=1, max_size=4)
RATIOS = st.sampled_from([1.0, 0.9, 0.5, 0.3, 0.1, 0.02])
SEEDS = st.integers(0, 2**31 - 1)


NAMES = ("bernoulli", "permutation", "strided")
LAWS = {}


def law(names, **strategies):
    """A function of random trees that is to hold, by its name in ``LAWS``."""

    def register(function):
        chosen = {"name": st.sampled_from(names)} | strategies
        LAWS[function.__name__] = given(**chosen)(function)
        return function

    return register


def check(name, examples):
    settings(
        max_examples=examples, deadline=None, derandomize=True,
        suppress_health_check=list(HealthCheck), database=None,
    )(LAWS[name])()  # fmt: skip


def trees(shapes, dtypes, n, seed, steps=4):
    """Parameters, and gradients of n workers at each step."""
    rng = np.random.default_rng(seed)

    def new(*lead):
        return [
            jnp.asarray(rng.normal(size=(*lead, *shape)), dtype)
            for shape, dtype in zip(shapes, dtypes, strict=False)
        ]

    return new(), [new(n) for _ in range(steps)]


@law(NAMES,
    shapes=SHAPES, n=st.sampled_from([1, 2, 5]), ratio=RATIOS, seed=SEEDS,
    dtypes=st.lists(
        st.sampled_from(["float32", "bfloat16", "float16"]), min_size=4, max_size=4
    ),
)  # fmt: skip
def sent_and_kept_are_what_there_was(name, shapes, n, ratio, seed, dtypes):
    """Of each worker: x = g + e is what it sends and what it keeps, at every step."""
    params, grads = trees(shapes, dtypes, n, seed)
    tx = slamb_jax.randk_compress_with_error_feedback(
        SELECTIONS[name](ratio, 0, seed % 100), axis_name=AXIS
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
            # What all receive is the mean of what they sent; nothing else moved.
            np.testing.assert_allclose(got, np.broadcast_to(sent.mean(0), got.shape),
                                       atol=2 * eps, rtol=0)  # fmt: skip
            unsent = got == 0
            if dtypes[j] == "float32":
                assert ((kept == 0) | (kept == x)).all()  # an element goes or stays
                np.testing.assert_array_equal(kept[unsent & (x != 0)],
                                              x[unsent & (x != 0)])  # fmt: skip


@law(NAMES,
    shapes=SHAPES, n=st.sampled_from([2, 3, 4]), ratio=RATIOS, seed=SEEDS,
    mu_dtype=st.sampled_from(["float32", "bfloat16"]),
)  # fmt: skip
def the_mean_of_the_momentum_is_that_of_adam(name, shapes, n, ratio, seed, mu_dtype):
    """Sent or not, nothing of a gradient is lost: the mean over workers is dense."""
    params, grads = trees(shapes, ["float32"] * 4, n, seed, steps=6)
    tx = slamb_jax.slamb(
        0.01, axis_name=AXIS, mu_dtype=mu_dtype,
        selection=SELECTIONS[name](ratio, 0, seed % 100),
    )  # fmt: skip
    history = train(tx, params, grads, "vmap")
    eps = float(jnp.finfo(mu_dtype).eps)
    for j in range(len(shapes)):
        dense = np.zeros(shapes[j])
        for (_, state), g in zip(history, grads, strict=True):
            dense = 0.9 * dense + 0.1 * np.asarray(g[j], np.float64).mean(0)
            mean = np.asarray(state[0].mu[j], np.float64).mean(0)
            np.testing.assert_allclose(mean, dense, atol=8 * eps, rtol=0)


@law(NAMES[1:],
    shape=SHAPE.filter(lambda shape: len(shape) > 1 and 0 not in shape),
    ratio=RATIOS, seed=SEEDS, index=st.integers(0, 500), start=st.integers(1, 10**6),
)  # fmt: skip
def a_round_sends_each_coordinate_exactly_once(name, shape, ratio, seed, index, start):
    selection = SELECTIONS[name](ratio, 0, seed)
    leaf = slamb_jax.Leaf(index, 0, shape, int(np.prod(shape)))
    if selection.whole(leaf):
        assert selection.turns == 1
        return
    steps = jnp.arange(start, start + 2 * selection.turns, dtype=jnp.int32)
    sent = np.asarray(jax.jit(jax.vmap(lambda t: selection.mask(t, leaf)))(steps))
    first, second = np.split(sent[..., 0].astype(int), 2)
    np.testing.assert_array_equal(first.sum(0), 1)
    np.testing.assert_array_equal(second, first)  # in the same order
    each = leaf.size // sent.shape[1]
    assert each * sent.shape[1] == leaf.size


@law(NAMES,
    shapes=SHAPES, n=st.sampled_from([1, 2, 4]), ratio=RATIOS, seed=SEEDS,
    form=st.sampled_from(["sum", "product"]),
    sync_every=st.sampled_from([None, 1, 2]),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    mapping=st.sampled_from(["vmap", "shard_map"]),
)  # fmt: skip
def the_same_seed_gives_the_same_bits(
    shapes, n, ratio, seed, name, form, sync_every, dtype, mapping
):
    params, grads = trees(shapes, [dtype] * 4, n, seed)

    def run():
        tx = slamb_jax.slamb(
            0.01, axis_name=AXIS, form=form, sync_every=sync_every, mu_dtype=dtype,
            selection=SELECTIONS[name](ratio, 0, seed % 100),
        )  # fmt: skip
        return train(slamb_jax.skip_not_finite(tx, AXIS), params, grads, mapping)

    for a, b in zip(*(map(jax.tree.leaves, (run(), run()))), strict=True):
        assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("name", LAWS)
def test_law(name):
    check(name, 20 if "round" in name else 3)


@pytest.mark.long
@pytest.mark.parametrize("name", LAWS)
def test_law_on_many_trees(name):
    check(name, 500 if "round" in name else 60)


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
    tx = slamb_jax.skip_not_finite(
        slamb_jax.slamb(rate, axis_name=AXIS, min_size=16, sync_every=10, b3=0.9), AXIS
    )
    truth = jnp.asarray(np.random.default_rng(1).normal(size=(12, 9)), jnp.float32)

    def step(state, batch):
        params, opt_state = state
        loss = lambda p: jnp.mean((batch @ p - batch @ truth) ** 2)  # noqa: E731
        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    run = slamb_jax.simulated_step(step, WORKERS, AXIS)

    def fresh():
        params = jnp.zeros((12, 9))
        return slamb_jax.simulated_replicas((params, tx.init(params)), WORKERS)

    def train_to_end(interruptions):
        state, rng, t, lost = fresh(), np.random.default_rng(2), 0, 0
        with slamb_jax.Checkpoints(tmp_path / str(len(interruptions))) as checkpoints:
            while t < STEPS:
                if t in interruptions:  # all that is in memory is gone
                    interruptions.remove(t)
                    found = checkpoints.restore(fresh())
                    lost += t - (found.step if found else 0)
                    state, rng, t = fresh(), np.random.default_rng(2), 0
                    if found:
                        t, state = found.step, found.state
                        rng.bit_generator.state = found.extra
                state, _ = run(state, batch_at(rng))
                t += 1
                if interruptions and t % SAVE_EVERY == 0:
                    checkpoints.save(t, state, rng.bit_generator.state)
        return state, lost

    started = time.monotonic()
    chosen = np.random.default_rng(3).choice(np.arange(1, STEPS), 100, replace=False)
    with jax.numpy_dtype_promotion("standard"):  # optax's schedules need it
        want, _ = train_to_end(set())
        got, lost = train_to_end(set(chosen.tolist()))
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    skipped = int(got[1].total_notfinite[0])
    assert int(got[1].inner[0].count[0]) == STEPS - skipped
    assert 50 < skipped < 150
    error = float(jnp.abs(slamb_jax.consolidate(got[0]) - truth).max())
    assert error < 0.1
    print(
        f"\n{STEPS} steps, {skipped} skipped, 100 interruptions, {lost} steps taken "
        f"again, largest error {error:.1e}, {time.monotonic() - started:.0f} s"
    )
