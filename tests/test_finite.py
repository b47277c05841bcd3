"""A gradient that is not finite: skipped by all workers together, and counted."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import slamb_jax
from slamb_jax._tree.axes import tracked_axes, vary_over
from slamb_jax.wrappers import SkipNotFiniteState
from tests.workers import (
    AXIS,
    MAPPINGS,
    P,
    exchange,
    over_workers,
    random_tree,
    stack,
    train,
)

SHAPES = {"w": (12, 16), "b": (16,), "scale": ()}
N = 4
POISON = {"inf": -np.inf, "beyond its square": 1e20}
EXCHANGE, ALONE = exchange(), slamb_jax.Exchange()


@functools.cache
def skipping(learning_rate=0.01):
    tx = slamb_jax.slamb(learning_rate, EXCHANGE)
    return slamb_jax.skip_not_finite(tx, EXCHANGE)


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
    history = train(skipping(), params, grads, mapping)
    want_params, want_state = train(skipping(), params, without(grads, bad), mapping)[
        -1
    ]
    got_params, got_state = history[-1]
    same_bits(got_params, want_params)
    same_bits(got_state.inner, want_state.inner)
    counted = [[int(s.notfinite_count[i]) for _, s in history] for i in range(N)]
    assert counted == [[0, 1, 0, 1, 2, 0, 0]] * N
    assert got_state.total_notfinite.tolist() == [3] * N
    taken = [bool(s.last_finite[0]) for _, s in history]
    assert taken == [t not in bad for t in range(7)]
    same_bits(history[0][0], history[1][0])
    same_bits(history[0][1].inner, history[1][1].inner)


def test_without_it_one_workers_nan_reaches_all():
    tx, start = slamb_jax.slamb(0.01, EXCHANGE), random_tree(SHAPES, 0)
    history = train(tx, start, gradients(2, (0,)), "vmap")
    assert np.isnan(history[-1][0]["w"]).any(axis=(1, 2)).all()


def plain():
    return slamb_jax.slamb(0.01, EXCHANGE)


CLIP = optax.clip_by_global_norm(1.0)
MASK = {"w": True, "b": False, "scale": True}
INJECTED = optax.inject_hyperparams(slamb_jax.slamb, static_args="exchange")
RATE = optax.linear_schedule(0.02, 0.01, 4)
AROUND = {
    "a chain": lambda: optax.chain(CLIP, plain()),
    "an accumulation": lambda: slamb_jax.accumulate(plain(), 2),
    "injected": lambda: INJECTED(RATE, exchange=EXCHANGE),
    "a mask": lambda: optax.masked(plain(), MASK),
}
COMPOSED = {
    "in a chain": lambda: optax.chain(CLIP, skipping()),
    "inside injected": lambda: optax.inject_hyperparams(skipping.__wrapped__)(0.02),
} | {
    f"around {name}": lambda make=make: slamb_jax.skip_not_finite(make(), EXCHANGE)
    for name, make in AROUND.items()
}


@pytest.mark.parametrize("name", COMPOSED)
def test_it_composes(name):
    bad, tx, start = (2, 3), COMPOSED[name](), random_tree(SHAPES, 0)
    grads = gradients(6, bad)
    with jax.numpy_dtype_promotion("standard"):  # optax's schedules need it
        got, got_state = train(tx, start, grads, "shard_map")[-1]
        want, want_state = train(tx, start, without(grads, bad), "shard_map")[-1]
    same_bits(got, want)
    leaves = jax.tree.leaves((got_state, want_state), is_leaf=is_skipper)
    counts = [x.total_notfinite.tolist() for x in leaves if is_skipper(x)]
    assert counts == [[2] * N, [0] * N]


def is_skipper(x):
    return isinstance(x, SkipNotFiniteState)


def test_inside_an_accumulation_a_mini_step_spoils_the_step():
    around, start = slamb_jax.accumulate(skipping(), 2), random_tree(SHAPES, 0)
    grads = gradients(6, (2,))
    got, state = train(around, start, grads, "shard_map")[-1]
    rest = without(grads, (2, 3))
    same_bits(got, train(around, start, rest, "shard_map")[-1][0])
    assert state.inner.total_notfinite.tolist() == [1] * N


@pytest.mark.parametrize("mapping", ["shard_map", "shard_map_unchecked"])
def test_a_skipped_step_sends_one_number(mapping):
    tx, params = skipping(), random_tree(SHAPES, 0)
    run = over_workers(lambda g, s, p: tx.update(g, s, p), mapping, N)
    args = stack(params, N), stack(tx.init(params), N), stack(params, N)
    report = slamb_jax.wire_report(run.lower(*args))
    always = [c for c in report.collectives if not c.conditional]
    assert [(c.kind, c.payload_bytes) for c in always] == [("all-reduce", 4)]
    assert report.bytes_sent(conditional=True) > 300


def test_under_vmap_it_is_a_real_conditional_too():
    tx = slamb_jax.skip_not_finite(optax.sgd(0.1), EXCHANGE)
    params = stack({"w": jnp.ones(3)}, N)
    run = jax.vmap(tx.update, in_axes=(0, 0), axis_name=AXIS)
    assert "cond[" in str(jax.make_jaxpr(run)(params, jax.vmap(tx.init)(params)))


def test_in_a_scan_under_tracked_types():
    """The state's types do not change from one step to the next."""
    tx, params = skipping(), random_tree(SHAPES, 0)

    def train_all(params, grads):
        def step(carry, g):
            params, state = carry
            updates, state = tx.update(g, state, params)
            return (optax.apply_updates(params, updates), state), None

        state, axes = tx.init(params), tracked_axes(AXIS)
        state = jax.tree.map(lambda x: vary_over(x, axes), state)
        return jax.lax.scan(step, (params, state), grads)[0]

    stacked = jax.tree.map(lambda *x: jnp.stack(x, axis=1), *gradients(4))
    run = over_workers(train_all, "shard_map", N)
    new, _ = jax.eval_shape(run, stack(params, N), stacked)
    assert jax.tree.map(jnp.shape, new) == {k: (N, *s) for k, s in SHAPES.items()}


def float16_step(tx, patience):
    """The recipe of the docstring: all workers halve and double the scale alike."""

    def step(params, state, scale, since, x):
        def scaled_loss(p):
            out = x.astype(jnp.float16) @ p["w"].astype(jnp.float16)
            return jnp.mean(jnp.square(out)) * scale.astype(jnp.float16)

        grads = jax.grad(scaled_loss)(params)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32) / scale, grads)
        updates, state = tx.update(grads, state, params)
        since = jnp.where(state.last_finite, since + 1, 0)
        grow = since >= patience
        scale = jnp.where(
            state.last_finite, jnp.where(grow, 2 * scale, scale), scale / 2
        )
        params = optax.apply_updates(params, updates)
        return params, state, scale, jnp.where(grow, 0, since)

    return step


def test_float16_with_a_loss_scale():
    tx = skipping(0.05)
    run = over_workers(float16_step(tx, patience=3), "shard_map", N)
    params = {"w": jnp.ones((8, 8))}
    params, state = stack(params, N), stack(tx.init(params), N)
    scale, since = jnp.full(N, 2.0**15), jnp.zeros(N, jnp.int32)
    rng = np.random.default_rng(0)
    scales, steps = [], 24
    for _ in range(steps):
        x = rng.normal(size=(N, 4, 8)) * [[[1]], [[1]], [[1]], [[5]]]
        x = jnp.asarray(x, jnp.float32)
        params, state, scale, since = run(params, state, scale, since, x)
        scales.append(scale.tolist())
    assert all(len(set(s)) == 1 for s in scales)  # though the data of one are larger
    first = [s[0] for s in scales]
    assert first[0] < 2.0**15  # the first steps overflowed
    assert any(b > a for a, b in itertools.pairwise(first))  # and it grew
    assert jnp.isfinite(params["w"]).all()
    skipped = int(state.total_notfinite[0])
    assert skipped >= 3
    assert state.inner[0].count.tolist() == [steps - skipped] * N


@pytest.mark.parametrize("stacked", [False, True])
def test_it_gives_up_after_too_many_in_a_row(stacked):
    tx = optax.chain(slamb_jax.skip_not_finite(optax.sgd(0.1), ALONE), optax.identity())
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
    tx = slamb_jax.skip_not_finite(optax.sgd(0.1), ALONE)
    grads = jnp.ones(3)
    _, state = jax.jit(tx.update, donate_argnums=1)(grads, tx.init(grads))
    assert int(state.total_notfinite) == 0


@pytest.mark.parametrize("check_vma", [True, False])
def test_shards_of_a_worker_agree_where_their_axis_is_bound(check_vma):
    """A NaN in one shard skips the step on all shards of all workers."""
    specs = {"w": P("model")}
    between = slamb_jax.Exchange(AXIS, param_specs=specs)
    tx = slamb_jax.skip_not_finite(optax.sgd(0.1), between)
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), (AXIS, "model"))

    def step(g):
        updates, state = tx.update(g, tx.init(g), g)
        return updates, state.total_notfinite

    split = P((AXIS, "model"))
    run = jax.shard_map(
        step, mesh=mesh, in_specs=split, out_specs=(split, P()), check_vma=check_vma
    )
    updates, skipped = jax.jit(run)({"w": jnp.ones(8).at[3].set(jnp.nan)})
    assert (updates["w"] == 0).all()
    assert skipped == 1


def test_types_tell_of_an_axis_that_was_left_out():
    tx = slamb_jax.skip_not_finite(optax.sgd(0.1), ALONE)
    run = over_workers(lambda g: tx.update(g, tx.init(g))[0], "shard_map", N)
    with pytest.raises(ValueError, match=r"'data', over which skip_not_finite .*Exch"):
        jax.eval_shape(run, jnp.ones((N, 3)))
