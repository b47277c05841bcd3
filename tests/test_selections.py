"""What is exchanged when: coverage, ages, packing, and what stays dense."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import slamb_jax
from slamb_jax.exchange.selections import AtStep, Leaf, Selection, Strided
from tests.close import assert_close
from tests.optimizers import plain, random_tree
from tests.replay import Replay
from tests.workers import AXIS, train

SMALL = [(1, 1), (2, 2), (3, 5), (16, 8), (2, 3, 5), (11, 13), (24, 64)]
DRAWN = {
    "ratio": st.sampled_from([0.9, 0.5, 0.3, 0.1, 1 / 93, 0.02]),
    "seed": st.integers(0, 2**31 - 1),
    "index": st.integers(0, 500),
}


def ages_at(selection, leaf, steps):
    ages = jax.jit(jax.vmap(lambda t: selection.age(t, leaf)))
    return np.asarray(ages(jnp.asarray(steps, jnp.int32)))[..., 0]


@given(
    shape=st.sampled_from([*SMALL, (97, 101)]), start=st.integers(100, 10**6), **DRAWN
)
def test_each_coordinate_once_in_each_period(shape, ratio, seed, index, start):
    selection, leaf = Strided(ratio, 0, seed), Leaf(index, shape)
    assert selection.period == max(1, round(1 / ratio))
    if selection.dense(leaf):
        assert selection.period == 1
        return
    steps = np.arange(start, start + 2 * selection.period)
    first, second = np.split(ages_at(selection, leaf, steps) == 0, 2)
    np.testing.assert_array_equal(first.sum(0), 1)
    np.testing.assert_array_equal(second, first)  # in the same order
    assert leaf.shape[-1] % selection.block_size(leaf) == 0
    assert leaf.size == selection.block_size(leaf) * first.shape[1]


@given(shape=st.sampled_from(SMALL), **DRAWN)
@example(shape=(2, 256, 1280), ratio=0.3, seed=0, index=0)  # by tiles
@example(shape=(2, 256, 1024), ratio=0.25, seed=0, index=0)
def test_ages_follow_the_recurrence_and_packing_the_ages(shape, ratio, seed, index):
    selection, leaf = Strided(ratio, 0, seed), Leaf(index, shape)
    if selection.dense(leaf):
        return
    x = jnp.arange(1, leaf.size + 1, dtype=jnp.float32).reshape(leaf.shape)

    def packed_at(t):
        at = AtStep(selection, t)
        packed = at.pack(leaf, x)
        return packed, at.unpack(leaf, -packed, x)

    run, age = jax.jit(packed_at), 0
    for t, got in enumerate(ages_at(selection, leaf, np.arange(1, 15)), 1):
        chosen = got == 0
        age = np.where(chosen, 0, age + 1)
        np.testing.assert_array_equal(got, age)
        blocks = np.asarray(x).reshape(len(got), -1)
        want = np.where(chosen[:, None], -blocks, blocks).reshape(leaf.shape)
        packed, put_back = map(np.asarray, run(jnp.int32(t)))
        np.testing.assert_array_equal(put_back, want)
        used = selection.blocks(jnp.int32(t), leaf) < len(got)
        sent = np.sort(packed[used].reshape(-1))
        np.testing.assert_array_equal(sent, blocks[chosen].reshape(-1))


def test_large_leaves_have_blocks_of_neighbours_and_no_constants():
    strided = Strided(0.1, 0)
    assert [strided.block_size(Leaf(0, s)) for s in [(6, 4), (768, 768)]] == [1, 128]
    leaf = Leaf(0, (768, 50257))  # GPT-2's embedding: 38 million blocks of an element

    def both(t):
        return strided.blocks(t, leaf), strided.age(t, leaf)

    assert len(jax.jit(both).lower(jnp.int32(1)).as_text()) < 1e5


def test_leaves_and_seeds_differ():
    chosen = [
        ages_at(Strided(0.1, 0, seed), Leaf(i, (80, 64)), [5])[0] == 0
        for seed, i in [(0, 0), (0, 1), (1, 0)]
    ]
    for a, b in itertools.combinations(chosen, 2):
        assert 0.003 < np.mean(a & b) < 0.02  # 0.01 if they are independent


class OddThenEven(Selection):
    """A selection of a user's own, by the parity of an element's index."""

    def blocks(self, step, leaf):
        odd = 2 * jnp.arange(-(-leaf.size // 2), dtype=jnp.int32) + step % 2
        return jnp.minimum(odd, leaf.size)

    def age(self, step, leaf):
        return (jnp.arange(leaf.size) % 2 != step % 2).astype(jnp.int32)[:, None]


def test_two_methods_make_a_selection():
    shapes = {"b": (4,), "w": (3, 5)}
    odd = np.array([np.arange(15) % 2 == t % 2 for t in (1, 2)])
    recorded = Replay([np.ones((2, 4), bool), odd])
    grads = [random_tree(shapes, t, 3) for t in range(6)]
    runs = []
    for selection in (OddThenEven(), recorded):
        tx = slamb_jax.slamb(0.01, plain(AXIS, selection=selection))
        runs.append([p for p, _ in train(tx, random_tree(shapes, 9), grads, "vmap")])
    assert_close(*runs)


def test_a_layer_is_what_counts_as_small_or_as_a_vector():
    strided = Strided(0.1, min_size=100)
    kinds = {(12, 100): True, (12, 9, 9): True, (12, 10, 10): False, (12,): True}
    for shape, dense in kinds.items():
        assert strided.dense(Leaf(0, shape, stacked=True)) == dense
        assert not strided.dense(Leaf(0, (*shape, 20)))
    shard = Leaf(0, (12, 5, 10), stacked=True, shards=2)
    assert not strided.dense(shard)  # of two, each layer has 100 elements


@pytest.mark.parametrize(
    ("shapes", "min_size"),
    [
        ([(768, 768), (512,)], 9000),  # the authors'
        ([(64, 64), (64,)], 4096),  # one matrix, smaller than theirs
        ([(512, 512), (40, 60), (50, 60)], 3000),  # the second passes 1 %
        ([(300,)], 9000),
        ([], 9000),
    ],
)
def test_the_smallest_size_follows_from_the_parameters(shapes, min_size):
    """Small matrices hold at most 1 % of the parameters, and stay dense."""
    params = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    own = OddThenEven()
    wanted = {Strided(0.1, seed=3): Strided(0.1, min_size, 3), own: own}
    wanted[Strided(0.1, 7)] = Strided(0.1, 7)
    for chosen, want in wanted.items():
        exchange = plain(selection=chosen)
        found = slamb_jax.selections.selection_at(exchange, params, jnp.int32(1))
        assert found.selection == want
