"""The four links, each alone and in chains: what is equal, and what is never lost."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slamb_jax
from slamb_jax import directions
from tests.close import assert_close, assert_workers_agree
from tests.optimizers import descend, exchange, gradients, random_tree, slamb
from tests.test_compressors import ALL as COMPRESSORS
from tests.workers import AXIS, over_workers, train

N = 4
SHAPES = {"w": (12, 16), "b": (16,), "tall": (20, 6)}
ZEROS = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
CODES = ("uniform8", "uniform4", "ternary", "largest_of_7")
AGREE = slamb_jax.Exchange(AXIS, payload=None)
randk = slamb_jax.randk_compress_with_error_feedback


HOW = {
    payload: {"exchange": slamb_jax.Exchange(AXIS, payload=payload)}
    for payload in (*CODES, "sign")
}
HOW |= {
    name: {"exchange": AGREE, "compressor": COMPRESSORS[name]}
    for name in ("top k", "low rank")
}


@pytest.mark.parametrize(
    ("how", "b1"), [(how, 0.9) for how in HOW] + [("uniform4", 0.0), ("top k", 0.0)]
)
def test_what_was_not_sent_is_in_the_momenta_and_all_workers_agree(how, b1):
    """In codes, and by a compressor: what was sent and what waits came in."""
    tx = slamb_jax.mask_momentum(**HOW[how], b1=b1, b2=None, bias_correction=False)
    grads = gradients(12, SHAPES, N)
    sent, state = train(tx, ZEROS, grads, "vmap")[-1]
    assert_workers_agree(sent)
    for name, x in sent.items():
        given = np.sum([np.float64(g[name]).mean(0) for g in grads], 0)
        held = np.float64(state.mu[name]).mean(0) / (1 - b1)
        room = 2.4e-4 * (1 + np.abs(given).max()) / (1 - b1) if how in CODES else 1e-4
        np.testing.assert_allclose(x[0] + held, given, atol=room, rtol=0)


@pytest.mark.parametrize("rule", [{"share": 0.5}, {"nesterov": True}])
def test_with_identity_each_worker_has_a_momentum_of_its_own(rule):
    """So does an exchange that sends nothing between averages of the parameters."""
    own = slamb_jax.mask_momentum(AGREE, compressor=optax.identity(), **rule)
    alone = slamb_jax.mask_momentum(slamb_jax.Exchange(payload=None), **rule)
    local = slamb_jax.Exchange(AXIS, payload=None, sync_every=9)
    between = slamb_jax.mask_momentum(local, **rule)
    grads, runs = gradients(4, SHAPES, N), []
    for tx, axis in ((own, AXIS), (alone, "other"), (between, AXIS)):
        history = train(tx, ZEROS, grads, "vmap", axis)
        runs.append([(p, state.mu, state.nu) for p, state in history])
    chex.assert_trees_all_equal(*runs)


def runs_of(between, *compressors):
    """Of the momentum by itself, with each compressor; None: the exchange's own."""
    txs = (slamb_jax.mask_momentum(between, compressor=x) for x in compressors)
    return [train(tx, ZEROS, gradients(4, SHAPES, N), "vmap") for tx in txs]


def test_a_compressor_may_stand_for_the_selection():
    """One that returns M + e: the worker keeps it, and steps by it."""
    between = exchange()
    ours = slamb_jax.compressors.of_exchange(between)

    def update(updates, state, params=None):
        sent, state = ours.update(updates, state, params)
        return jax.tree.map(jnp.add, *sent), state

    users = optax.GradientTransformation(ours.init, update)
    runs = runs_of(between, None, users)
    assert_close(*([(p, s.mu, s.nu) for p, s in history] for history in runs))


@pytest.mark.parametrize(
    "between", [slamb_jax.Exchange(AXIS), exchange(), exchange(payload="uniform8")]
)
def test_the_compressor_that_is_given_is_called(between):
    """One that counts its calls and wraps ours gives our bits."""
    calls = []

    def counting(make):
        ours = make(between)

        def update(updates, state, params=None, **extra_args):
            calls.append(make)
            return ours.update(updates, state, params, **extra_args)

        return optax.GradientTransformationExtraArgs(ours.init, update)

    makes = randk, slamb_jax.compressors.of_exchange
    chex.assert_trees_all_equal(*runs_of(between, None, *map(counting, makes)))
    assert {*calls} == {*makes}


@pytest.mark.parametrize(
    ("settings", "room"),
    [({"payload": x}, 2**-18) for x in CODES[:2]] + [({"mu_dtype": "bfloat16"}, 2**-4)],
)
def test_the_mean_momentum_is_that_of_dense_adam(settings, room):
    """Exchanged or not, what rounding takes stays in the momentum."""
    tx, grads = slamb(**settings), gradients(8, SHAPES, N)
    dense = dict.fromkeys(SHAPES, 0.0)
    for (_, state), g in zip(train(tx, ZEROS, grads, "vmap"), grads, strict=True):
        for name, mu in state[0].mu.items():
            dense[name] = 0.9 * dense[name] + 0.1 * np.float64(g[name]).mean(0)
            mean = mu.astype(np.float64).mean(0)
            np.testing.assert_allclose(mean, dense[name], atol=room, rtol=0)


def test_a_selection_without_bias_correction_divides_neither_moment():
    selected = slamb_jax.Exchange(
        payload=None, selection=slamb_jax.selections.Strided(1.0)
    )
    tx = slamb_jax.mask_momentum(
        selected, directions.adam(1e-3), 0.9, 0.99, bias_correction=False
    )
    g = np.float32([2.0, -3.0])
    u, _ = tx.update(g, tx.init(g), g)
    assert_close(u, 0.1 * g / (0.1 * np.abs(g) + 1e-3), units=64)


def test_what_is_a_thousand_times_smaller_than_its_block_still_trains():
    scales = np.float32([1.0] * 200 + [1e-3] * 100)
    rate = optax.cosine_decay_schedule(0.02, 2000)
    tx = slamb_jax.adamw(rate, slamb_jax.Exchange(AXIS), weight_decay=0.0)
    gradient = lambda p, own, t: scales * (p - 1)  # noqa: E731
    params = descend(tx, gradient, np.zeros_like(scales), np.zeros(4), 2000)
    assert float(jnp.abs(params - 1).max()) < 0.1, params


@pytest.mark.parametrize("payload", [None, "ternary"])
def test_a_leaf_steps_as_by_itself(payload):
    """Small leaves share arrays, and nothing else: no code, no decay rate, no mean."""
    shapes = {
        "w": (12, 16), "b": (16,), "scale": (), "b2": (33,), "long": (2100,),
        "wide": (40, 60), "large": (300, 250),
    }  # fmt: skip
    b1 = {name: 0.5 if name.startswith("b") else 0.9 for name in shapes}
    params = random_tree(shapes, 9)
    params["long"] = params["long"].astype(jnp.bfloat16)
    (grads,) = jax.tree.map(
        lambda g, p: g.astype(p.dtype), [random_tree(shapes, 1, 4)], [params]
    )
    adam = slamb_jax.directions.adam(1e-8)

    def step(names, g):
        exchange = slamb_jax.Exchange(AXIS, payload=payload)
        own = {name: b1[name] for name in names}
        tx = slamb_jax.mask_momentum(exchange, adam, own, 0.9)
        start, g = ({name: x[name] for name in names} for x in (params, g))
        # Before the first step the units are 1, whatever the order of a sum.
        return tx.update(g, tx.init(start), start)

    def steps_alone(g):  # of all but the one that is by itself in any case
        return {name: step([name], g) for name in shapes if name != "large"}

    u, state = over_workers(functools.partial(step, shapes), "vmap", 4)(grads)
    for name, (alone, own) in over_workers(steps_alone, "vmap", 4)(grads).items():
        assert_close((u[name], state.mu[name]), (alone[name], own.mu[name]), units=8)
        assert_close(state.nu[name], own.nu[name], units=8)
        if state.nu_mean is not None:
            assert_close(state.nu_mean[name], own.nu_mean[name], units=64)
