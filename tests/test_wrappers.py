"""Wrappers: skipped steps, accumulation; and rounding to 16 bits."""

import functools
import itertools
import operator

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slamb_jax
from slamb_jax._core.leaves import unless
from tests.close import assert_same_bits
from tests.optimizers import exchange, random_tree, slamb
from tests.test_compressors import ALL as COMPRESSORS
from tests.workers import AXIS, MAPPINGS, mesh_of, over_workers, stack, stepper, train

SHAPES = {"w": (12, 16), "b": (16,), "scale": ()}
N = 4
EXCHANGE, ALONE = exchange(), slamb_jax.Exchange()
DEFAULT = slamb_jax.Exchange(AXIS)


def skipping(rate=0.01, **settings):
    return slamb_jax.skip_not_finite(slamb(rate, **settings), EXCHANGE)


def gradients(steps, poisoned=(), value=np.nan):
    """Stacked gradients; at the poisoned steps one element of one worker's is bad."""
    grads = [random_tree(SHAPES, 1 + t, N) for t in range(steps)]
    for t in poisoned:
        grads[t] = grads[t] | {"w": grads[t]["w"].at[t % N, 3, 5].set(value)}
    return grads


def without(grads, steps):
    return [g for t, g in enumerate(grads) if t not in steps]


ADAMW = slamb_jax.adamw(0.01, DEFAULT)
OUTER = slamb_jax.Exchange(AXIS, sync_every=2, outer=optax.sgd(0.7))
CASES = [
    *((mapping, np.nan, ADAMW, DEFAULT) for mapping in MAPPINGS),
    *(("vmap", value, ADAMW, DEFAULT) for value in (-np.inf, 1e20)),  # its square is
    *(
        ("shard_map", np.nan, make(0.01, between), between)
        for make in (slamb_jax.lamb, slamb_jax.sgd)
        for between in (DEFAULT, slamb_jax.Exchange(AXIS, payload=None))
    ),
    ("shard_map", np.nan, ADAMW, EXCHANGE),
    ("shard_map", np.nan, slamb(), EXCHANGE),
    ("shard_map", np.nan, slamb_jax.adamw(0.01, OUTER), OUTER),
    *(
        ("vmap", np.nan, slamb_jax.compress_with_error_feedback(x), DEFAULT)
        for x in map(COMPRESSORS.get, ("top k", "low rank", "by turns"))
    ),
]


@pytest.mark.parametrize(("mapping", "value", "tx", "exchange"), CASES)
def test_a_skipped_step_might_as_well_not_have_been(mapping, value, tx, exchange):
    bad, tx = (1, 3, 4), slamb_jax.skip_not_finite(tx, exchange)
    grads = gradients(7, bad, value)
    params = random_tree(SHAPES, 0) | {"b": jnp.full(16, -0.0)}  # whose sign is kept
    history = train(tx, params, grads, mapping)
    want_params, want_state = train(tx, params, without(grads, bad), mapping)[-1]
    got_params, got_state = history[-1]
    assert_same_bits(got_params, want_params)
    assert_same_bits(got_state.inner, want_state.inner)
    counted = [[int(s.notfinite_count[i]) for _, s in history] for i in range(N)]
    assert counted == [[0, 1, 0, 1, 2, 0, 0]] * N
    assert got_state.total_notfinite.tolist() == [3] * N
    taken = [s.last_finite.tolist() for _, s in history]  # a loss scale follows it
    assert taken == [[t not in bad] * N for t in range(7)]
    assert_same_bits(history[0][0], history[1][0])
    assert_same_bits(history[0][1].inner, history[1][1].inner)


def every_second(count, *_, **__):
    return count % 2 == 0


def choosing(tx):
    """Takes every second step, by a choice between two states."""

    def update(updates, state, params=None, **extra_args):
        count, old = state
        u, new = tx.update(updates, old, params, **extra_args)
        takes = functools.partial(jnp.where, every_second(count))
        u = jax.tree.map(lambda x: takes(x, 0.0), u)
        return u, (count + 1, jax.tree.map(takes, new, old))

    def init(params):
        return jnp.int32(0), tx.init(params)

    return optax.GradientTransformationExtraArgs(init, update)


CLIP = optax.clip_by_global_norm(1.0)
MASK = {"w": True, "b": False, "scale": True}
INJECTED = optax.inject_hyperparams(slamb_jax.adamw, static_args="exchange")
RATE = optax.linear_schedule(0.02, 0.01, 4)
AROUND = {
    "a chain": optax.chain(CLIP, ADAMW),
    "an accumulation": slamb_jax.accumulate(ADAMW, 2),
    "injected": INJECTED(RATE, exchange=DEFAULT),
    "a mask": optax.masked(slamb(), MASK),
    "deaf ones": optax.GradientTransformation(  # no link is told
        ADAMW.init, lambda g, state, params=None: ADAMW.update(g, state, params)
    ),
}
SELDOM = {  # states that stand in two branches, or are chosen between
    "a branch": optax.conditionally_mask(ADAMW, every_second),
    "a branch with a selection": optax.conditionally_mask(slamb(), every_second),
    "a branch or the gradient": optax.conditionally_transform(ADAMW, every_second),
    "MultiSteps": optax.MultiSteps(ADAMW, 2).gradient_transformation(),
    "a choice": choosing(ADAMW),
    "a choice with a selection": choosing(slamb()),
    "jit": ADAMW._replace(update=jax.jit(ADAMW.update)),
}
COMPOSED = {
    "in a chain": optax.chain(CLIP, skipping()),
    "inside injected": optax.inject_hyperparams(lambda rate: skipping(rate))(0.02),
} | {
    f"around {name}": slamb_jax.skip_not_finite(tx, exchange)
    for table, exchange in ((AROUND, EXCHANGE), (SELDOM, DEFAULT))
    for name, tx in table.items()
}


@pytest.mark.parametrize("name", COMPOSED)
def test_it_composes(name):
    bad, tx, start = (1, 2, 4), COMPOSED[name], random_tree(SHAPES, 0)
    grads = gradients(7, bad)
    with jax.numpy_dtype_promotion("standard"):  # optax's schedules need it
        got, got_state = train(tx, start, grads, "shard_map")[-1]
        want, want_state = train(tx, start, without(grads, bad), "shard_map")[-1]
    assert_same_bits(got, want)
    for own, total in ((got_state, 3), (want_state, 0)):
        skipper = optax.tree.get(own, "SkipNotFiniteState")
        assert skipper.total_notfinite.tolist() == [total] * N


def test_inside_an_accumulation_a_mini_step_spoils_the_step():
    around, start = slamb_jax.accumulate(skipping(), 2), random_tree(SHAPES, 0)
    grads = gradients(6, (2,))
    got, state = train(around, start, grads, "shard_map")[-1]
    rest = without(grads, (2, 3))
    assert_same_bits(got, train(around, start, rest, "shard_map")[-1][0])
    assert state.inner.total_notfinite.tolist() == [1] * N


@pytest.mark.parametrize(
    ("tx", "exchange", "more", "mapping"),
    [
        (ADAMW, DEFAULT, 0, "shard_map"),  # the mean tells all
        (ADAMW, DEFAULT, 0, "shard_map_unchecked"),
        (slamb_jax.adamw(0.01, OUTER), OUTER, 4, "shard_map_unchecked"),
    ],
)
def test_it_sends_one_number_or_none_and_needs_no_conditional(
    tx, exchange, more, mapping
):
    params, sent = random_tree(SHAPES, 0), []
    for made in (tx, slamb_jax.skip_not_finite(tx, exchange)):
        run = over_workers(lambda *args, made=made: made.update(*args), mapping, N)
        args = stack(params, N), stack(made.init(params), N), stack(params, N)
        report = slamb_jax.wire_report(run.lower(*args))
        sent.append(sum(c.payload_bytes for c in report.collectives))
        averages = exchange.outer is not None
        assert any(c.conditional for c in report.collectives) == averages
    assert sent[1] - sent[0] == more


@pytest.mark.parametrize("name", ["adamw", "lion", "sgd", "lamb"])
def test_a_link_keeps_its_state_by_itself(name):
    """A second choice, around all links, costs a GPU passes over the state."""
    tx, params = getattr(slamb_jax, name)(0.1, ALONE), random_tree(SHAPES, 0)
    old, bad = tx.init(params), jax.tree.map(lambda p: p * jnp.nan, params)
    skip = jnp.array(True)
    _, new = tx.update(bad, old, params, skip=skip)
    assert_same_bits(new[0], old[0])
    again = unless(skip, old[0], new[0])
    assert all(map(operator.is_, jax.tree.leaves(new[0]), jax.tree.leaves(again)))


@pytest.mark.parametrize("stacked", [False, True])
def test_it_gives_up_after_too_many_in_a_row(stacked):
    tx = optax.chain(slamb_jax.skip_not_finite(optax.sgd(0.1), ALONE), optax.identity())
    params = jnp.ones(3)
    state = tx.init(params)
    bad = jnp.array([1.0, jnp.inf, 1.0])
    update = jax.jit(tx.update, donate_argnums=1)  # of the first state, too
    for _ in range(3):
        _, state = update(bad, state, params)
        slamb_jax.check_finite(state, max_consecutive_errors=3)
    _, state = update(bad, state, params)
    shown = stack(state, N) if stacked else state
    with pytest.raises(
        FloatingPointError,
        match=r"not finite for 4 steps in a row \(4 in all\).*max_consecutive_errors=3",
    ):
        slamb_jax.check_finite({"opt_state": shown}, max_consecutive_errors=3)
    _, state = tx.update(jnp.ones(3), state, params)
    slamb_jax.check_finite(state, 0)  # a finite step forgives


EVERY = 3
SLAMB = slamb_jax.slamb(0.01, slamb_jax.Exchange.paper(AXIS, sync_every=2))
ACCUMULATED, START = slamb_jax.accumulate(SLAMB, EVERY), random_tree(SHAPES, 0)


def after_each(tx, mapping):
    """Parameters after each mini-step."""
    grads = [random_tree(SHAPES, 10 + t, N) for t in range(7)]
    return [params for params, _ in train(tx, START, grads, mapping)]


@functools.cache
def with_multi_steps():
    with jax.numpy_dtype_promotion("standard"):  # MultiSteps needs it
        return after_each(optax.MultiSteps(SLAMB, EVERY), "vmap")


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_same_numbers_as_multi_steps(mapping):
    got = after_each(ACCUMULATED, mapping)
    chex.assert_trees_all_close(got, with_multi_steps(), rtol=1e-7, atol=2e-6)
    pairs = itertools.pairwise([stack(START, N), *got])
    moves = [(p["w"] != q["w"]).any() for p, q in pairs]
    assert moves == [t % EVERY == EVERY - 1 for t in range(7)]


def multi_steps(tx):
    return optax.MultiSteps(tx, EVERY).gradient_transformation()


WRAPPED = {
    "around": (multi_steps(SLAMB), True),
    "in a chain": (optax.chain(optax.clip(1.0), multi_steps(SLAMB)), True),
    "ours": (ACCUMULATED, False),
    "without an exchange": (multi_steps(optax.adam(0.1)), False),
}


@pytest.mark.parametrize(("tx", "warns"), WRAPPED.values(), ids=WRAPPED)
def test_multi_steps_around_an_exchange_is_told(tx, warns):
    """Once, by what sees the state first; warnings are errors in the tests."""
    mesh, exchange = mesh_of(N), slamb_jax.Exchange(AXIS)
    one, of_all = tx.init(START), stack(START, N)
    ways = [
        lambda: slamb_jax.replicate((START, one), mesh, exchange),
        lambda: slamb_jax.on_workers(tx, mesh, exchange).init(of_all),
    ]
    for way in ways:
        if not warns:
            way()
            continue
        with pytest.warns(UserWarning, match="MultiSteps .*jax.accumulate") as caught:
            way()
        assert [x.filename for x in caught] == [__file__]


def test_nothing_is_communicated_outside_the_conditional():
    def report(tx):
        args = stack((START, tx.init(START), START), N)
        return slamb_jax.wire_report(stepper(tx, "shard_map", N).lower(*args))

    accumulated = report(ACCUMULATED)
    assert accumulated.collectives
    assert all(c.conditional for c in accumulated.collectives)
    assert accumulated.bytes_sent() == 0
    assert report(SLAMB).bytes_sent() > 0
