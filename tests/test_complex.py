"""Complex leaves: their two parts, or an error that says how to give these."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slamb_jax
from slamb_jax.links import directions
from tests.close import assert_close
from tests.optimizers import random_tree, standard_promotion
from tests.test_contract import PAPER, TABLE
from tests.workers import AXIS, over_workers, stack

N = 4
SHAPES = {"w": (12, 16), "b": (16,), "scale": (), "empty": (0, 3)}
EXCHANGE = slamb_jax.Exchange(AXIS)
SELECTED = slamb_jax.Exchange.paper(AXIS, selection=PAPER.selection, sync_every=2)
NETWORK = slamb_jax.Network(N, 1e9)
GROUP = slamb_jax.Exchange("node", local_axis_name=AXIS)
MOMENTUM = optax.sgd(0.1, momentum=0.9)


def joined(re, im):
    return jax.tree.map(jax.lax.complex, re, im)


def parts(tree):
    return jax.tree.map(np.real, tree), jax.tree.map(np.imag, tree)


def drawn(seed, *lead):
    return joined(*(random_tree(SHAPES, s, *lead) for s in (seed, seed + 1)))


def updates_of(tx, mapping, trees):
    """Three updates of each worker, for gradients and parameters of its own."""

    def one(grads, params):
        state, out = tx.init(params), []
        for _ in range(3):
            updates, state = tx.update(grads, state, params)
            out.append(updates)
        return out

    return over_workers(one, mapping, N)(*trees)


average = functools.partial(slamb_jax.average_parameters, axis_name=AXIS)
LINKS = {
    "average_gradients": slamb_jax.average_gradients(GROUP),
    "elementwise_rescale": slamb_jax.elementwise_rescale(SELECTED, b3=0.9),
    "skip_not_finite": slamb_jax.skip_not_finite(MOMENTUM, EXCHANGE),
    "average_parameters": optax.stateless(lambda grads, _: average(grads)),
}
LINEAR = {
    "consolidate": slamb_jax.consolidate,
    "resize": functools.partial(slamb_jax.checkpoint.resize, workers=6),
} | {
    f"{name}, {mapping}": functools.partial(updates_of, tx, mapping)
    for name, tx in LINKS.items()
    for mapping in ("vmap", "shard_map")
}


@pytest.mark.parametrize("name", LINEAR)
def test_what_is_linear_is_that_of_the_two_parts(name):
    fun, trees = LINEAR[name], (drawn(0, N), drawn(2, N))
    got = fun(trees)
    assert all(x.dtype == jnp.complex64 for x in jax.tree.leaves(got))
    for own, part in zip(parts(got), parts(trees), strict=True):
        assert_close(own, fun(part), units=8)


C = {"w": drawn(0)["w"]}
REAL = {"w": C["w"].real}
REFUSED = {name: tx for name, tx in TABLE.items() if name.split()[0] not in LINKS} | {
    "accumulate": slamb_jax.accumulate(MOMENTUM, 2)
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_for_real_numbers_says_how_to_give_it_two(name):
    tx = REFUSED[name]
    with pytest.raises(ValueError, match=r"complex64 at .*\['w'\].* as optax.contrib."):
        tx.update(C, tx.init(C), C)
    with pytest.raises(ValueError, match=r"updates.*complex64"):
        tx.update(C, tx.init(REAL), REAL)
    split = optax.contrib.split_real_and_imaginary(tx)
    with standard_promotion():
        state = jax.eval_shape(split.init, C)
        updates, after = jax.eval_shape(split.update, C, state, C)
    assert (updates, after) == (jax.eval_shape(lambda: C), state)


OTHERS = [
    lambda: directions.adam().update(C, optax.EmptyState(), second_moment=REAL),
    lambda: EXCHANGE.share(C),
    lambda: slamb_jax.advise(C, NETWORK, EXCHANGE, step_seconds=1.0, budget=0.1),
]


@pytest.mark.parametrize("call", OTHERS)
def test_no_imaginary_part_is_dropped(call):
    with pytest.raises(ValueError, match=r"(params|updates).*\['w'\].*(take|make two)"):
        call()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_part_that_is_not_finite_skips_the_step_of_all(value):
    g, p = drawn(0, N), drawn(2, N)
    g["w"] = g["w"].at[1, 2, 3].set(jax.lax.complex(1.0, value))
    for updates in LINEAR["skip_not_finite, vmap"]((g, p)):
        assert not any(x.any() for x in jax.tree.leaves(updates))


def test_replicas_agree_in_both_parts():
    same, momenta = stack(drawn(0), N), {"mu": drawn(2, N)}
    off = same | {"w": same["w"].at[2, 0, 0].add(0.5j)}
    for rtol in (0.0, 1e-3):
        slamb_jax.assert_replicas_agree(same, rtol)
        with pytest.raises(AssertionError, match=r"1 of 4 leaves: \['w'\] \(of 1 from"):
            slamb_jax.assert_replicas_agree(off, rtol)
    slamb_jax.assert_replicas_agree(off, rtol=0.1)
    got = slamb_jax.momentum_agreement(momenta)
    flat = jax.tree.map(lambda x: np.stack(parts(x), -1), momenta)
    want = slamb_jax.momentum_agreement(flat)
    assert got == pytest.approx(want, rel=1e-6)


def test_a_complex_mean_sends_the_bytes_of_its_parts():
    run = over_workers(average, "shard_map", N)
    sent = [
        slamb_jax.wire_report(run.lower(stack(tree, N))).bytes_sent()
        for tree in (C, parts(C))
    ]
    assert sent[0] == sent[1] > 0
