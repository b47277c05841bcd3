"""The average of parameters: of local steps, in codes, by an outer optimizer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slamb_jax
from tests import naive_rivals
from tests.close import assert_close, assert_same_bits
from tests.optimizers import random_tree, standard_promotion
from tests.workers import AXIS, MAPPINGS, over_workers, stack, stepper, train

N = 4
SHAPES = {"w": (12, 16), "b": (16,), "stack": (3, 6, 20), "scale": ()}
NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)


def every(steps, axis_name=AXIS, payload=None, **settings):
    exchange = slamb_jax.Exchange(
        axis_name, payload=payload, sync_every=steps, **settings
    )
    return slamb_jax.average_parameters_every(exchange)


def steps_of(tx, steps, mapping="vmap", late=0):
    """Parameters and state of all workers after each of some random updates."""
    params = random_tree(SHAPES, 0)
    state, step = stack(tx.init(params), N), stepper(tx, mapping, N)
    params = stack(params, N)
    for t in range(steps):
        u = random_tree(SHAPES, t + 1 - late, N, scale=0.1 if t >= late else 0.0)
        moved = jax.tree.map(lambda p, u: np.asarray(p) + np.asarray(u), params, u)
        with standard_promotion():
            params, state = step(u, state, params)
        yield moved, params, state


@pytest.mark.parametrize(("every_", "mapping"), [(3, "shard_map"), (1, "vmap")])
def test_local_sgd_averages_the_parameters_at_its_steps(every_, mapping):
    for t, (moved, params, _) in enumerate(steps_of(every(every_), 7, mapping), 1):
        if t % every_ == 1 % every_:
            moved = jax.tree.map(lambda x: np.stack([x.mean(0)] * N), moved)
        assert_close(params, moved)


def test_an_exchange_that_never_averages_does_not():
    exchange = slamb_jax.Exchange.paper(AXIS, sync_every=None)
    tx = slamb_jax.average_parameters_every(exchange)
    for moved, params, _ in steps_of(tx, 2):
        assert_same_bits(params, moved)


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_average_parameters_gives_all_workers_the_same_bits(mapping):
    n = 8
    large = random_tree({"w": (33, 7)}, 0, n)["w"] * 1e3
    params = {
        dtype: large.astype(dtype) for dtype in ("float32", "bfloat16", "float16")
    }
    others = {"empty": jnp.zeros((n, 0, 2)), "count": jnp.full((n,), 7, jnp.int32)}
    mean = over_workers(lambda p: slamb_jax.average_parameters(p, AXIS), mapping, n)
    out = jax.tree.map(np.asarray, mean(params | others))
    assert_same_bits(out, jax.tree.map(lambda x: np.stack([x[0]] * n), out))
    assert_same_bits(out["count"], others["count"])
    for dtype, x in params.items():
        assert out[dtype].dtype == dtype
        assert_close(out[dtype][0], np.asarray(x, np.float64).mean(0), units=8)


GRIDS = {"bfloat16": 2.0**-8, "uniform8": 1 / 100, "uniform4": 0.2, None: 2.0**-22}


@pytest.mark.parametrize("payload", GRIDS)
@pytest.mark.parametrize("mapping", ["vmap", "shard_map"])
def test_an_outer_rate_of_one_is_the_average_up_to_the_grid(payload, mapping):
    """The anchor has the same bits on all workers, and changes at its steps alone."""
    tx, before = every(2, payload=payload, outer=optax.sgd(1.0)), random_tree(SHAPES, 0)
    for t, (moved, params, state) in enumerate(steps_of(tx, 4, mapping), 1):
        anchor = jax.tree.map(lambda a: np.asarray(a[0]), state.anchor)
        assert_same_bits(state.anchor, stack(anchor, N))
        if t % 2:
            assert_same_bits(anchor, before)
            assert_same_bits(params, moved)
            continue
        for name, x in moved.items():
            room = (
                2 * GRIDS[payload] * np.abs(x - np.asarray(before[name])).max() + 1e-6
            )
            assert_close(params[name], np.stack([anchor[name]] * N), units=2)
            np.testing.assert_allclose(anchor[name], x.mean(0), atol=room, rtol=0)
        before = anchor


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"outer": optax.sgd(1.0), "payload": "uniform8"},
        {"outer": optax.sgd(1.0), "payload": "ternary"},
        {"outer": NESTEROV},
    ],
)
def test_with_overlap_an_update_is_averaged_one_step_late(settings):
    h = 1 if not settings else 2
    soon, late = (every(h, overlap=x, **settings) for x in (True, False))
    pairs = zip(steps_of(soon, 5), steps_of(late, 5, late=1), strict=True)
    for t, ((_, params, _), (_, behind, _)) in enumerate(pairs):
        u = random_tree(SHAPES, t + 1, N, scale=0.1)
        assert_close(params, jax.tree.map(jnp.add, behind, u))


@pytest.mark.parametrize("mapping", ["vmap", "shard_map"])
def test_local_adam_under_nesterov_is_diloco(mapping):
    """Local AdamW of optax's; ours has v of the momentum."""
    grads = [random_tree(SHAPES, 1 + t, N) for t in range(6)]
    params = random_tree(SHAPES, 0)
    tx = optax.chain(optax.adam(0.02), every(2, outer=NESTEROV))
    with standard_promotion():
        got = train(tx, params, grads, mapping)[-1][0]
    per_worker = [
        [jax.tree.map(lambda x, i=i: np.asarray(x[i]), g) for i in range(N)]
        for g in grads
    ]
    want = naive_rivals.diloco(
        params, per_worker, rate=0.02, every=2, outer_rate=0.7, momentum=0.9
    )
    assert_close(got, jax.tree.map(lambda *xs: np.stack(xs), *want), units=4096)


@pytest.mark.parametrize("make", [slamb_jax.adamw, slamb_jax.muon, slamb_jax.slamb])
def test_an_optimizer_under_an_outer_one_is_its_local_steps_and_the_average(make):
    """Each worker takes the steps of a worker alone."""
    exchange = slamb_jax.Exchange(AXIS, sync_every=2, outer=NESTEROV)
    alone = make(0.1, slamb_jax.Exchange())
    parts = optax.chain(alone, slamb_jax.average_parameters_every(exchange))
    grads = [random_tree(SHAPES, t, N) for t in range(4)]
    with standard_promotion():
        runs = [
            [p for p, _ in train(tx, random_tree(SHAPES, 9), grads, "vmap")]
            for tx in (make(0.1, exchange), parts)
        ]
    # Newton-Schulz multiplies the rounding of small directions by up to 3.4**5.
    assert_close(*runs, units=4096 if make is slamb_jax.muon else 64)


def test_an_outer_optimizer_of_one_worker_is_a_lookahead():
    """SNOO: every H steps the outer optimizer steps from where it stood."""
    tx = optax.chain(optax.sgd(0.1), every(2, None, outer=optax.sgd(0.5)))
    p = anchor = np.float32(1.0)
    params, state = jnp.float32(1.0), tx.init(jnp.float32(1.0))
    for t in range(1, 7):
        with standard_promotion():
            u, state = tx.update(jnp.float32(t), state, params)
        params = optax.apply_updates(params, u)
        p = p - np.float32(0.1) * t
        if t % 2 == 0:
            p = anchor = anchor + np.float32(0.5) * (p - anchor)
        np.testing.assert_allclose(params, p, rtol=1e-6)


def test_a_missing_gradient_moves_nothing():
    tx = every(1, payload="uniform8", outer=NESTEROV)
    params = random_tree(SHAPES, 0)
    updates = {name: None if name == "w" else params[name] for name in SHAPES}
    run = over_workers(tx.update, "vmap", 2)
    with standard_promotion():
        u, state = run(*stack((updates, tx.init(params), params), 2))
    assert u["w"] is None
    np.testing.assert_array_equal(state.anchor["w"][0], params["w"])


def test_local_steps_averaged_in_codes_end_at_the_minimum_of_the_mean():
    tx = optax.chain(
        optax.sgd(optax.linear_schedule(0.1, 0.0, 200), momentum=0.9),
        every(2, payload="uniform4", outer=optax.sgd(1.0)),
    )
    targets = jnp.arange(4.0)[:, None, None] * jnp.ones((4, 8, 4))

    def run(target):
        params = jnp.zeros_like(target)

        def step(carry, _):
            params, state = carry
            updates, state = tx.update(params - target, state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, tx.init(params)), length=200)[0][0]

    with standard_promotion():
        params = jax.jit(functools.partial(jax.vmap, axis_name=AXIS)(run))(targets)
    np.testing.assert_allclose(params.mean(0), 1.5, atol=0.02)


@pytest.mark.parametrize(
    "tx",
    [
        every(2),
        every(1, overlap=True),
        every(2, payload="ternary", outer=NESTEROV),
        every(2, payload="bfloat16", outer=NESTEROV, overlap=True),
    ],
)
def test_a_state_made_on_the_workers_keeps_its_types(tx):
    def train(params):
        params = jax.tree.map(lambda p: p[0], params)

        def step(carry, _):
            params, state = carry
            updates = jax.tree.map(jnp.ones_like, params)
            updates, state = tx.update(updates, state, params)
            return (optax.apply_updates(params, updates), state), None

        params, _ = jax.lax.scan(step, (params, tx.init(params)), length=2)[0]
        return jax.tree.map(lambda p: p[None], params)

    mesh = jax.sharding.Mesh(jax.devices()[:N], (AXIS,))
    spec = jax.sharding.PartitionSpec(AXIS)
    run = jax.shard_map(train, mesh=mesh, in_specs=spec, out_specs=spec)
    with standard_promotion():
        params = jax.jit(run)(stack(random_tree(SHAPES, 0), N))
    for x in jax.tree.leaves(params):
        assert np.isfinite(np.asarray(x)).all()
