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
skip = slamb_jax.skip_not_finite


def gradients(steps, poisoned=(), value=np.nan):
    """Stacked gradients; at the poisoned steps one element of one worker's is bad."""
    grads = [random_tree(SHAPES, 1 + t, N) for t in range(steps)]
    for t in poisoned:
        grads[t] = grads[t] | {"w": grads[t]["w"].at[t % N, 3, 5].set(value)}
    return grads


def without(grads, steps):
    return [g for t, g in enumerate(grads) if t not in steps]


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


ADAMW = slamb_jax.adamw(0.01, DEFAULT)
OUTER = slamb_jax.Exchange(AXIS, sync_every=2, outer=optax.sgd(0.7))
FLOAT32 = slamb_jax.Exchange(AXIS, payload=None)
CLIP = optax.clip_by_global_norm(1.0)
MASK = {"w": True, "b": False, "scale": True}
INJECTED = optax.inject_hyperparams(slamb_jax.adamw, static_args="exchange")
RATE = optax.linear_schedule(0.02, 0.01, 4)
DEAF = optax.GradientTransformation(  # no link of it is told
    ADAMW.init, lambda g, state, params=None: ADAMW.update(g, state, params)
)
AROUND = {
    name: slamb_jax.compress_with_error_feedback(COMPRESSORS[name])
    for name in ("top k", "low rank", "by turns")
} | {
    "AdamW": ADAMW,
    "a deaf one": DEAF,
    "LAMB": slamb_jax.lamb(0.01, DEFAULT),
    "a chain": optax.chain(CLIP, ADAMW),
    "an accumulation": slamb_jax.accumulate(ADAMW, 2),
    "injected": INJECTED(RATE, exchange=DEFAULT),
    "a mask": optax.masked(slamb(), MASK),
    # States that stand in two branches, or are chosen between.
    "a branch": optax.conditionally_mask(ADAMW, every_second),
    "a branch with a selection": optax.conditionally_mask(slamb(), every_second),
    "a branch or the gradient": optax.conditionally_transform(ADAMW, every_second),
    "MultiSteps": optax.MultiSteps(ADAMW, 2).gradient_transformation(),
    "a choice": choosing(ADAMW),
    "a choice with a selection": choosing(slamb()),
    "jit": ADAMW._replace(update=jax.jit(ADAMW.update)),
}
SKIPPING = {name: skip(tx, DEFAULT) for name, tx in AROUND.items()} | {
    "SLAMB": skip(slamb(), EXCHANGE),
    "AdamW, told by a message": skip(ADAMW, EXCHANGE),
    "AdamW with an outer optimizer": skip(slamb_jax.adamw(0.01, OUTER), OUTER),
    "SGD in float32": skip(slamb_jax.sgd(0.01, FLOAT32), FLOAT32),
    "in a chain": optax.chain(CLIP, skip(slamb(), EXCHANGE)),
    "inside injected": optax.inject_hyperparams(
        lambda rate: skip(slamb(rate), EXCHANGE)
    )(0.02),
}


@pytest.mark.usefixtures("standard_promotion")  # optax's schedules need it
@pytest.mark.parametrize(
    ("name", "mapping", "value"),
    [(name, "shard_map", np.nan) for name in SKIPPING]
    + [("AdamW", mapping, np.nan) for mapping in MAPPINGS if mapping != "shard_map"]
    + [("AdamW", "vmap", value) for value in (-np.inf, 1e20)],  # its square is
)
def test_a_skipped_step_might_as_well_not_have_been(name, mapping, value):
    bad, tx = (1, 3, 4), SKIPPING[name]
    grads = gradients(7, bad, value)
    params = random_tree(SHAPES, 0) | {"b": jnp.full(16, -0.0)}  # whose sign is kept
    got = train(tx, params, grads, mapping)
    want, wanted = train(tx, params, without(grads, bad), mapping)[-1]
    states = [optax.tree.get(state, "SkipNotFiniteState") for _, state in got]
    assert_same_bits(got[-1][0], want)
    inner = optax.tree.get(wanted, "SkipNotFiniteState").inner
    assert_same_bits(states[-1].inner, inner)
    counted = [[int(s.notfinite_count[i]) for s in states] for i in range(N)]
    assert counted == [[0, 1, 0, 1, 2, 0, 0]] * N
    assert states[-1].total_notfinite.tolist() == [3] * N
    taken = [s.last_finite.tolist() for s in states]  # a loss scale follows it
    assert taken == [[t not in bad] * N for t in range(7)]
    assert_same_bits(got[0][0], got[1][0])
    assert_same_bits(states[0].inner, states[1].inner)


def test_inside_an_accumulation_a_mini_step_spoils_the_step():
    around = slamb_jax.accumulate(SKIPPING["SLAMB"], 2)
    start = random_tree(SHAPES, 0)
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


MULTI_STEPS = optax.MultiSteps(SLAMB, EVERY)


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_same_numbers_as_multi_steps(mapping):
    got = after_each(ACCUMULATED, mapping)
    with jax.numpy_dtype_promotion("standard"):  # MultiSteps needs it
        want = after_each(MULTI_STEPS, "vmap")
    chex.assert_trees_all_close(got, want, rtol=1e-7, atol=2e-6)
    pairs = itertools.pairwise([stack(START, N), *got])
    moves = [(p["w"] != q["w"]).any() for p, q in pairs]
    assert moves == [t % EVERY == EVERY - 1 for t in range(7)]


def test_multi_steps_around_an_exchange_is_told():
    """Once, by what sees the state first; warnings are errors in the tests."""
    mesh, alone = mesh_of(N), optax.MultiSteps(optax.adam(0.1), EVERY)
    for right in (ACCUMULATED, alone):
        slamb_jax.replicate((START, right.init(START)), mesh, DEFAULT)
    wrong = optax.chain(optax.clip(1.0), MULTI_STEPS.gradient_transformation())
    told = pytest.warns(UserWarning, match="MultiSteps .*jax.accumulate")
    with told as caught:
        slamb_jax.replicate((START, wrong.init(START)), mesh, DEFAULT)
        slamb_jax.on_workers(wrong, mesh, DEFAULT).init(stack(START, N))
    assert [x.filename for x in caught] == [__file__] * 2


def test_nothing_is_communicated_outside_the_conditional():
    def report(tx):
        args = stack((START, tx.init(START), START), N)
        return slamb_jax.wire_report(stepper(tx, "shard_map", N).lower(*args))

    accumulated = report(ACCUMULATED)
    assert accumulated.collectives
    assert all(c.conditional for c in accumulated.collectives)
    assert accumulated.bytes_sent() == 0
    assert report(SLAMB).bytes_sent() > 0
