"""A gradient that is not finite: skipped by all workers together, and counted."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slamb_jax
from tests.workers import AXIS, MAPPINGS, over_workers, random_tree, stack, train

SHAPES = {"w": (12, 16), "b": (16,), "scale": ()}
N = 4
POISON = {"inf": -np.inf, "beyond its square": 1e20}


def small_slamb(learning_rate=0.01):
    return slamb_jax.slamb(learning_rate, axis_name=AXIS, min_size=20, sync_every=3)


def gradients(steps, poisoned=(), value=np.nan):
    """Stacked gradients; at the poisoned steps one element of one worker's is bad."""
    grads = [random_tree(SHAPES, 1 + t, N) for t in range(steps)]
    for t in poisoned:
        grads[t] = grads[t] | {"w": grads[t]["w"].at[t % N, 3, 5].set(value)}
    return grads


def without(grads, steps):
    return [g for t, g in enumerate(grads) if t not in steps]


def same_bits(got, want):
    def check(a, b):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()

    jax.tree.map(check, got, want)


@pytest.mark.parametrize(
    ("mapping", "kind"),
    [*((m, "nan") for m in MAPPINGS), *(("vmap", k) for k in POISON)],
)
def test_a_skipped_step_might_as_well_not_have_been(mapping, kind):
    bad = (1, 3, 4)
    grads = gradients(7, bad, POISON.get(kind, np.nan))
    params = random_tree(SHAPES, 0) | {"b": jnp.full(16, -0.0)}  # whose sign is kept
    tx = slamb_jax.skip_not_finite(small_slamb(), AXIS)
    history = train(tx, params, grads, mapping)
    want = train(tx, params, without(grads, bad), mapping)
    got_params, got_state = history[-1]
    want_params, want_state = want[-1]
    same_bits(got_params, want_params)
    same_bits(got_state.inner, want_state.inner)
    counted = [[int(s.notfinite_count[i]) for _, s in history] for i in range(N)]
    assert counted == [[0, 1, 0, 1, 2, 0, 0]] * N
    assert got_state.total_notfinite.tolist() == [3] * N
    taken = [bool(s.last_finite[0]) for _, s in history]
    assert taken == [t not in bad for t in range(7)]
    start = history[0], history[1]
    same_bits(start[0][0], start[1][0])
    same_bits(start[0][1].inner, start[1][1].inner)


@pytest.mark.parametrize("mapping", ["vmap", "shard_map"])
def test_without_it_one_workers_nan_reaches_all(mapping):
    history = train(small_slamb(), random_tree(SHAPES, 0), gradients(2, (0,)), mapping)
    assert np.isnan(history[-1][0]["w"]).any(axis=(1, 2)).all()


WRAPPED = {
    "in a chain": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), slamb_jax.skip_not_finite(small_slamb(), AXIS)
    ),
    "around a chain": lambda: slamb_jax.skip_not_finite(
        optax.chain(optax.clip_by_global_norm(1.0), small_slamb()), AXIS
    ),
    "around an accumulation": lambda: slamb_jax.skip_not_finite(
        slamb_jax.accumulate(small_slamb(), 2), AXIS
    ),
    "around injected": lambda: slamb_jax.skip_not_finite(
        optax.inject_hyperparams(slamb_jax.slamb, static_args=slamb_jax.STATIC_ARGS)(
            optax.linear_schedule(0.02, 0.01, 4), axis_name=AXIS, min_size=20
        ),
        AXIS,
    ),
    "around a mask": lambda: slamb_jax.skip_not_finite(
        optax.masked(small_slamb(), {"w": True, "b": False, "scale": True}), AXIS
    ),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_it_composes(name):
    mapping = "shard_map"
    bad = (2, 3)
    grads = gradients(6, bad)
    with jax.numpy_dtype_promotion("standard"):  # optax's schedules need it
        runs = [
            train(WRAPPED[name](), random_tree(SHAPES, 0), g, mapping)
            for g in (grads, without(grads, bad))
        ]
    (got, got_state), (want, want_state) = (run[-1] for run in runs)
    same_bits(got, want)
    counts = [
        x.total_notfinite.tolist()
        for x in jax.tree.leaves((got_state, want_state), is_leaf=is_skipper)
        if is_skipper(x)
    ]
    assert counts == [[2] * N, [0] * N]


def is_skipper(x):
    return isinstance(x, slamb_jax.SkipNotFiniteState)


def injected(learning_rate):
    return slamb_jax.skip_not_finite(small_slamb(learning_rate), AXIS)


@pytest.mark.parametrize("mapping", ["vmap", "shard_map"])
def test_injected_from_outside_and_accumulated_around(mapping):
    bad = (2,)
    grads = gradients(5, bad)
    outside = optax.inject_hyperparams(injected)(learning_rate=0.02)
    got = train(outside, random_tree(SHAPES, 0), grads, mapping)[-1][0]
    want = train(outside, random_tree(SHAPES, 0), without(grads, bad), mapping)[-1][0]
    same_bits(got, want)
    # One poisoned mini-step spoils the mean, and with it the whole step.
    around = slamb_jax.accumulate(injected(0.01), 2)
    got = train(around, random_tree(SHAPES, 0), gradients(6, (2,)), mapping)[-1]
    rest = without(gradients(6, (2,)), (2, 3))
    same_bits(got[0], train(around, random_tree(SHAPES, 0), rest, mapping)[-1][0])
    assert got[1].inner.total_notfinite.tolist() == [1] * N


@pytest.mark.parametrize("mapping", ["shard_map", "shard_map_unchecked"])
def test_a_skipped_step_sends_one_number(mapping):
    tx = slamb_jax.skip_not_finite(small_slamb(), AXIS)
    params = random_tree(SHAPES, 0)
    run = over_workers(lambda g, s, p: tx.update(g, s, p), mapping, N)
    args = stack(params, N), stack(tx.init(params), N), stack(params, N)
    report = slamb_jax.wire_report(run.lower(*args))
    always = [c for c in report.collectives if not c.conditional]
    assert [(c.kind, c.payload_bytes) for c in always] == [("all-reduce", 4)]
    assert report.bytes_sent(conditional=True) > 300
    text = str(jax.make_jaxpr(run)(*args))
    assert "cond[" in text


def test_under_vmap_it_is_a_real_conditional_too():
    tx = slamb_jax.skip_not_finite(optax.sgd(0.1), AXIS)
    params = stack({"w": jnp.ones(3)}, N)
    run = jax.vmap(tx.update, in_axes=(0, 0), axis_name=AXIS)
    assert "cond[" in str(jax.make_jaxpr(run)(params, jax.vmap(tx.init)(params)))


def test_in_a_scan_under_tracked_types():
    """The state's types do not change from one step to the next."""
    tx = slamb_jax.skip_not_finite(small_slamb(), AXIS)
    params = random_tree(SHAPES, 0)
    grads = gradients(4, (1,))

    def train_all(params, grads):
        def step(carry, g):
            params, state = carry
            updates, state = tx.update(g, state, params)
            return (optax.apply_updates(params, updates), state), None

        vary = functools.partial(jax.tree.map, lambda x: x + 0 * first.astype(x.dtype))
        first = grads["scale"][0].astype(jnp.int32)
        state = tx.init(params)
        state = state._replace(
            last_finite=state.last_finite | (first < -(10**6)),
            **{
                k: vary(getattr(state, k))
                for k in ("notfinite_count", "total_notfinite", "inner")
            },
        )
        return jax.lax.scan(step, (params, state), grads)[0]

    stacked = jax.tree.map(lambda *x: jnp.stack(x, axis=1), *grads)
    (got, state) = over_workers(train_all, "shard_map", N)(stack(params, N), stacked)
    assert state.total_notfinite.tolist() == [1] * N
    want = train(tx, params, without(grads, (1,)), "shard_map")[-1][0]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), got, want)


@pytest.mark.parametrize("mapping", ["shard_map"])
def test_float16_with_a_loss_scale(mapping):
    """The recipe of the docstring: all workers halve and double the scale alike."""
    tx = slamb_jax.skip_not_finite(small_slamb(0.05), AXIS)
    patience = 3

    def step(params, state, scale, since, x):
        def scaled_loss(p):
            out = x.astype(jnp.float16) @ p["w"].astype(jnp.float16)
            return jnp.mean(jnp.square(out)) * scale.astype(jnp.float16)

        loss, grads = jax.value_and_grad(scaled_loss)(params)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32) / scale, grads)
        updates, state = tx.update(grads, state, params)
        since = jnp.where(state.last_finite, since + 1, 0)
        grow = since >= patience
        scale = jnp.where(
            state.last_finite, jnp.where(grow, 2 * scale, scale), scale / 2
        )
        params = optax.apply_updates(params, updates)
        return params, state, scale, jnp.where(grow, 0, since), loss / scale

    run = over_workers(step, mapping, N)
    params = {"w": jnp.ones((8, 8))}
    args = (stack(params, N), stack(tx.init(params), N))
    scale, since = jnp.full(N, 2.0**15), jnp.zeros(N, jnp.int32)
    rng = np.random.default_rng(0)
    scales = []
    for _ in range(24):
        x = jnp.asarray(rng.normal(size=(N, 4, 8)) * [[[1]], [[1]], [[1]], [[5]]])
        *args, scale, since, _ = run(*args, scale, since, x.astype(jnp.float32))
        scales.append(scale.tolist())
    assert all(len(set(s)) == 1 for s in scales)  # though the data of one are larger
    first = [s[0] for s in scales]
    assert first[0] < 2.0**15  # the first steps overflowed
    assert any(b > a for a, b in itertools.pairwise(first))  # and it grew
    assert jnp.isfinite(args[0]["w"]).all()
    assert int(args[1].total_notfinite[0]) >= 3
    assert int(args[1].inner[0].count[0]) == 24 - int(args[1].total_notfinite[0])


@pytest.mark.parametrize("stacked", [False, True])
def test_it_gives_up_after_too_many_in_a_row(stacked):
    tx = optax.chain(slamb_jax.skip_not_finite(optax.sgd(0.1), None), optax.identity())
    params = jnp.ones(3)
    state = tx.init(params)
    bad = jnp.array([1.0, jnp.inf, 1.0])
    for _ in range(3):
        _, state = tx.update(bad, state, params)
        slamb_jax.check_finite(state, max_consecutive_errors=3)
    _, state = tx.update(bad, state, params)
    shown = stack(state, N) if stacked else state
    with pytest.raises(
        FloatingPointError,
        match=r"not finite for 4 steps in a row \(4 in all\).*max_consecutive_errors=3",
    ):
        slamb_jax.check_finite({"opt_state": shown}, max_consecutive_errors=3)
    _, state = tx.update(jnp.ones(3), state, params)
    slamb_jax.check_finite(state, 0)  # a finite step forgives


def test_its_first_state_can_be_donated():
    tx = slamb_jax.skip_not_finite(optax.sgd(0.1), None)
    grads = jnp.ones(3)
    _, state = jax.jit(tx.update, donate_argnums=1)(grads, tx.init(grads))
    assert int(state.total_notfinite) == 0


def test_on_a_mesh_through_the_library():
    mesh = jax.make_mesh((N,), (AXIS,), devices=jax.devices()[:N])
    tx = slamb_jax.skip_not_finite(small_slamb(), AXIS)

    def step(state, batch):
        params, opt_state = state
        grads = jax.grad(lambda p: jnp.mean((batch @ p) ** 2))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), None

    params = jnp.ones((6, 5))
    state = slamb_jax.replicate((params, tx.init(params)), mesh, AXIS)
    run = slamb_jax.per_worker_step(step, mesh, AXIS)
    batch = np.ones((8, 6), np.float32)
    state, _ = run(state, batch)
    before = jax.tree.map(np.asarray, state)
    batch[5, 2] = np.nan
    for t in range(2):
        state, _ = run(state, batch)
        same_bits(jax.tree.map(np.asarray, state[0]), before[0])
        if t == 0:
            slamb_jax.check_finite(state, 1)
    with pytest.raises(FloatingPointError, match="2 steps in a row"):
        slamb_jax.check_finite(state, 1)
