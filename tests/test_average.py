"""The average of parameters: all at once, rolling, in codes, by an outer optimizer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from slamb_jax.payloads import StochasticUniform

import slamb_jax
from tests import naive_rivals
from tests.close import assert_close, assert_same_bits
from tests.compiled import report_of
from tests.optimizers import exchange, plain, random_tree, standard_promotion
from tests.workers import AXIS, MAPPINGS, over_workers, stack, stepper, train

N = 4
SHAPES = {"w": (12, 16), "b": (16,), "stack": (3, 6, 20), "scale": ()}


def steps_of(tx, steps, mapping="vmap", n=N, late=0):
    """Parameters and state of all workers after each of some random updates."""
    params = random_tree(SHAPES, 0)
    state, step = stack(tx.init(params), n), stepper(tx, mapping, n)
    params = stack(params, n)
    for t in range(steps):
        u = random_tree(SHAPES, t + 1 - late, n, scale=0.1 if t >= late else 0.0)
        moved = jax.tree.map(lambda p, u: np.asarray(p) + np.asarray(u), params, u)
        params, state = step(u, state, params)
        yield moved, params, state


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_rolling_averages_each_coordinate_once_in_h_steps(mapping):
    every = 3
    tx = slamb_jax.average_parameters_every(exchange(sync_every=every, rolling=True))
    seen = {name: [] for name in SHAPES}
    for moved, params, _ in steps_of(tx, 2 * every, mapping):
        for name, x in moved.items():
            mean, p = x.mean(0), np.asarray(params[name])
            averaged = np.abs(p - mean).max(0) <= 64 * 2.0**-23 * np.abs(x).max()
            assert_close(p[:, ~averaged], x[:, ~averaged])
            seen[name].append(averaged)
    for name, averaged in seen.items():
        size = np.prod(SHAPES[name])
        if size <= 20:  # dense: at every step
            assert np.all(averaged)
        else:
            for start in (0, every):
                counts = np.sum(averaged[start : start + every], 0)
                np.testing.assert_array_equal(counts, 1)


PAYLOADS = tuple(
    StochasticUniform(bits, block_size, error_feedback=True)
    for bits, block_size in ((8, 256), (4, 256), (4, 16))
)


@pytest.mark.parametrize("payload", PAYLOADS)
@pytest.mark.parametrize("rolling", [False, True])
def test_an_average_in_codes_agrees_and_loses_nothing(payload, rolling):
    """The anchor is the same on all; what rounding took stays with the worker."""
    every = 2
    tx = slamb_jax.average_parameters_every(
        exchange(
            sync_every=every,
            rolling=rolling,
            average_payload=payload,
            average_b2=None,
        )
    )
    anchor = random_tree(SHAPES, 0)
    for t, (moved, params, state) in enumerate(steps_of(tx, 6), 1):
        new = jax.tree.map(lambda a: np.asarray(a[0]), state.anchor)
        for i in range(1, N):
            assert_same_bits(jax.tree.map(lambda a, i=i: a[i], state.anchor), new)
        if not rolling and t % every != 1:
            assert_close(params, moved)
        for name, x in moved.items():
            # What moved the mean is the rounding of the mean: less than a step of the
            # grid, a seventh of the largest difference.
            before = np.abs(x - np.asarray(anchor[name])).max()
            lost = np.asarray(params[name]).mean(0) - x.mean(0)
            assert np.abs(lost).max() <= before / 7 + 1e-6
        anchor = new


@pytest.mark.parametrize("rolling", [False, True])
def test_a_mean_in_codes_is_divided_by_the_root_of_its_second_moment(rolling):
    b2, every = 0.9, 2 if rolling else 1
    tx = slamb_jax.average_parameters_every(
        exchange(
            sync_every=every,
            rolling=rolling,
            average_payload="bfloat16",
            average_b2=b2,
        )
    )
    anchor = random_tree(SHAPES, 0)
    nu = jax.tree.map(np.zeros_like, anchor)
    for moved, params, state in steps_of(tx, 6):
        anchored = params if state.anchor is None else state.anchor
        new = jax.tree.map(lambda a: np.asarray(a[0]), anchored)
        for name, x in moved.items():
            before = np.asarray(anchor[name])
            of_all = np.asarray(state.average_nu[name][0])
            turn = of_all != nu[name] if rolling else np.ones(before.shape, bool)
            mean = x.mean(0) - before
            nu[name] = np.where(turn, b2 * nu[name] + (1 - b2) * mean**2, nu[name])
            root = np.sqrt(nu[name] / nu[name][turn].mean())
            want = np.where(turn, 1.1 * mean / (root + 0.1), 0)
            # The mean is rounded twice, by 2**-8 of a difference, and at most divided
            # by a tenth.
            atol = 11 * 2.0**-7 * np.abs(x - before).max()
            np.testing.assert_allclose(new[name] - before, want, atol=atol, rtol=2e-2)
            np.testing.assert_allclose(of_all, nu[name], rtol=2e-2, atol=atol**2)
            nu[name] = of_all
            if not rolling:  # kept, and not taken again
                whole = state.average_nu_mean[name][0]
                np.testing.assert_allclose(whole, of_all.mean(), rtol=1e-5)
        anchor = new


@pytest.mark.parametrize(
    "settings",
    [
        {"sync_every": 1},
        {"sync_every": 2, "rolling": True},
        {"sync_every": 2, "average_payload": "uniform8"},
        {"sync_every": 1, "average_payload": "ternary"},
        {"sync_every": 2, "outer": optax.sgd(0.7, 0.9, nesterov=True)},
    ],
)
def test_with_overlap_an_update_is_averaged_one_step_late(settings):
    soon, late = (
        slamb_jax.average_parameters_every(exchange(overlap=x, **settings))
        for x in (True, False)
    )
    pairs = zip(steps_of(soon, 5), steps_of(late, 5, late=1), strict=True)
    for t, ((_, params, _), (_, behind, _)) in enumerate(pairs):
        u = random_tree(SHAPES, t + 1, N, scale=0.1)
        assert_close(params, jax.tree.map(jnp.add, behind, u))


@pytest.mark.parametrize("payload", [None, "uniform8"])
def test_rolling_sends_as_much_at_every_step(payload):
    """No conditional; a 1/H share of the matrices, and all of the small leaves."""
    sizes = {}
    for every in (1, 4):
        between = plain(
            AXIS, sync_every=every, rolling=True, average_payload=payload, min_size=20
        )
        tx = slamb_jax.average_parameters_every(between)
        params = {"w": jnp.ones((64, 256)), "b": jnp.ones(256)}
        report = report_of(tx, params, N)
        assert report.bytes_sent(conditional=True) == 0
        sizes[every] = report.bytes_sent()
    dense = 256 / (64 * 256 + 256)
    share = dense + (1 - dense) / 4
    assert sizes[4] / sizes[1] == pytest.approx(share, rel=0.02)


OUTER = optax.sgd(0.7, momentum=0.9, nesterov=True)


@pytest.mark.parametrize("mapping", ["vmap", "shard_map"])
def test_local_adam_under_nesterov_is_diloco(mapping):
    grads = [random_tree(SHAPES, 1 + t, N) for t in range(6)]
    params = random_tree(SHAPES, 0)
    between = plain(AXIS, compress_ratio=0, sync_every=2, outer=OUTER)
    tx = slamb_jax.adamw(0.02, between, weight_decay=0.0, nu_of="gradient")
    with standard_promotion():
        got = train(tx, params, grads, mapping)[-1][0]
    per_worker = [
        [jax.tree.map(lambda x, i=i: np.asarray(x[i]), g) for i in range(N)]
        for g in grads
    ]
    want = naive_rivals.diloco(
        params, per_worker, rate=0.02, every=2, outer_rate=0.7, momentum=0.9
    )
    want = jax.tree.map(lambda *xs: np.stack(xs), *want)
    assert_close(got, want, units=4096)


def test_an_outer_optimizer_of_one_worker_is_a_lookahead():
    """SNOO: every H steps the outer optimizer steps from where it stood."""
    between = plain(compress_ratio=0, sync_every=2, outer=optax.sgd(0.5))
    tx = optax.chain(optax.sgd(0.1), slamb_jax.average_parameters_every(between))
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


def test_an_outer_rate_of_one_is_the_average():
    """Of float32, and of codes: an outer step of the whole difference is none."""
    for payload in (None, "uniform4"):
        plain = exchange(sync_every=1, average_payload=payload, average_b2=None)
        outer = exchange(sync_every=1, average_payload=payload, outer=optax.sgd(1.0))
        runs = [
            [p for _, p, _ in steps_of(slamb_jax.average_parameters_every(e), 3)]
            for e in (plain, outer)
        ]
        assert_close(*runs)


def test_a_missing_gradient_moves_nothing():
    between = exchange(sync_every=1, outer=OUTER, average_payload="uniform8")
    tx = slamb_jax.average_parameters_every(between)
    params = random_tree(SHAPES, 0)
    updates = {name: None if name == "w" else params[name] for name in SHAPES}
    run = over_workers(tx.update, "vmap", 2)
    with standard_promotion():
        u, state = run(*stack((updates, tx.init(params), params), 2))
    assert u["w"] is None
    np.testing.assert_array_equal(state.anchor["w"][0], params["w"])


def test_behind_any_optimizer():
    """Local steps of optax's own, averaged in codes, end at the mean's minimum."""
    between = plain(
        AXIS, sync_every=2, rolling=True, average_payload="uniform4", min_size=0
    )
    tx = optax.chain(
        optax.sgd(optax.linear_schedule(0.1, 0.0, 200), momentum=0.9),
        slamb_jax.average_parameters_every(between),
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


@pytest.mark.parametrize("settings", [{}, {"sync_every": 2}, {"overlap": True}])
def test_a_state_made_on_the_workers_keeps_its_types(settings):
    between = slamb_jax.Exchange(AXIS, **settings)
    tx = slamb_jax.average_parameters_every(between)

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
    one = random_tree(SHAPES, 0)
    params = jax.tree.map(lambda x: jnp.broadcast_to(x, (N, *x.shape)), one)
    spec = jax.sharding.PartitionSpec(AXIS)
    run = jax.shard_map(train, mesh=mesh, in_specs=spec, out_specs=spec)
    for x in jax.tree.leaves(jax.jit(run)(params)):
        assert np.isfinite(np.asarray(x)).all()
