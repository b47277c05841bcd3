"""What is exchanged when: coverage, ages, mixing, overflow, packing, bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from slamb_jax._ex.blocks import SelectionAtStep

import slamb_jax
from slamb_jax.selections import (
    Bernoulli,
    Leaf,
    Permutation,
    Schedule,
    Selection,
    Strided,
    replay_masks,
)
from tests.close import assert_close
from tests.masks import of_elements
from tests.optimizers import plain, random_tree
from tests.workers import AXIS, train

SHAPE = st.sampled_from(
    [(1, 1), (2, 2), (3, 5), (16, 8), (2, 3, 5), (11, 13), (24, 64), (97, 101)]
)
RATIO = st.sampled_from([0.9, 0.5, 0.3, 0.1, 1 / 93, 0.02])
SEED = st.integers(0, 2**31 - 1)


def at(selection, t, leaf):
    """One bool per element."""
    return of_elements(selection.age(jnp.int32(t), leaf), leaf.shape).reshape(-1)


def ages_at(selection, leaf, steps):
    ages = jax.jit(jax.vmap(lambda t: selection.age(t, leaf)))
    return np.asarray(ages(jnp.asarray(steps, jnp.int32)))[..., 0]


def chosen_at(selection, leaf, steps):
    """One bool per element and step, from the blocks; cheaper than ages."""
    blocks = jax.jit(jax.vmap(lambda t: selection.blocks(t, leaf)))
    mask = np.zeros((len(steps), leaf.size + 1), bool)
    np.put_along_axis(mask, np.asarray(blocks(jnp.asarray(steps, jnp.int32))), True, 1)
    return mask[:, :-1]


@given(
    make=st.sampled_from([Strided, Permutation]),
    shape=SHAPE, ratio=RATIO, seed=SEED, index=st.integers(0, 500),
    start=st.integers(100, 10**6),
)  # fmt: skip
def test_each_coordinate_once_in_each_period(make, shape, ratio, seed, index, start):
    selection, leaf = make(ratio, 0, seed), Leaf(index, shape)
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


@given(
    make=st.sampled_from([Strided, Permutation, Bernoulli]),
    shape=SHAPE.filter(lambda shape: shape != (97, 101)),
    ratio=RATIO, seed=SEED, index=st.integers(0, 100),
)  # fmt: skip
@example(make=Strided, shape=(2, 256, 1280), ratio=0.3, seed=0, index=0)  # by tiles
@example(make=Strided, shape=(2, 256, 1024), ratio=0.25, seed=0, index=0)
def test_ages_follow_the_recurrence_and_packing_the_ages(
    make, shape, ratio, seed, index
):
    selection, leaf = make(ratio, 0, seed), Leaf(index, shape)
    if selection.dense(leaf):
        return
    x = jnp.arange(1, leaf.size + 1, dtype=jnp.float32).reshape(shape)

    @jax.jit
    def packed_at(t):
        blocks = SelectionAtStep(selection, t).blocks(leaf)
        packed = blocks.pack(x)
        put_back = [blocks.unpack(-packed, x)]
        if blocks.turns is not None:  # as on GPUs and TPUs
            put_back.append(blocks.fused(-packed, x))
            put_back.append(blocks.unpack(-blocks.summed(x), x))
        return packed, blocks.used, put_back

    age = 0
    for t, got in enumerate(ages_at(selection, leaf, np.arange(1, 15)), 1):
        chosen = got == 0
        age = np.where(chosen, 0, age + 1)
        np.testing.assert_array_equal(got, age)
        packed, used, put_back = jax.tree.map(np.asarray, packed_at(jnp.int32(t)))
        blocks = np.asarray(x).reshape(len(got), -1)
        want = np.where(chosen[:, None], -blocks, blocks).reshape(shape)
        for x_there in put_back:
            np.testing.assert_array_equal(x_there, want)
        sent = np.sort(packed[used].reshape(-1))
        np.testing.assert_array_equal(sent, blocks[chosen].reshape(-1))


def test_blocks_of_neighbours_only_in_large_leaves():
    strided = Strided(0.1, 0)
    assert [strided.block_size(Leaf(0, s)) for s in [(6, 4), (768, 768)]] == [1, 128]


def test_a_large_leaf_of_single_elements_puts_no_constants_into_the_program():
    """An odd last dimension, as of GPT-2's embedding: 38 million blocks."""
    strided, leaf = Strided(0.1), Leaf(0, (768, 50257))

    def both(t):
        return strided.blocks(t, leaf), strided.age(t, leaf)

    assert len(jax.jit(both).lower(jnp.int32(1)).as_text()) < 1e5


@pytest.mark.parametrize("make", [Strided, Permutation])
def test_leaves_and_seeds_differ(make):
    masks = [
        at(make(0.1, 0, seed), 5, Leaf(i, (80, 64)))
        for seed, i in [(0, 0), (0, 1), (1, 0)]
    ]
    for a, b in [(0, 1), (0, 2), (1, 2)]:
        both = np.mean(masks[a] & masks[b])
        assert 0.003 < both < 0.02  # 0.01 if they are independent


def test_a_permutation_has_no_pattern():
    """Neighbours are exchanged together no more often than by chance."""
    mask = at(Permutation(0.1), 3, Leaf(0, (200, 200)))
    for shift in (1, 2, 7, 10, 200):
        assert abs(np.mean(mask[shift:] & mask[:-shift]) - 0.01) < 0.003


def test_bernoulli_draws_with_its_probability():
    counts = chosen_at(Bernoulli(0.1, 0), Leaf(0, (100, 100)), np.arange(1, 201))
    assert abs(counts.mean() - 0.1) < 0.001
    assert abs(counts.sum(1).std() - 30) < 6  # sqrt(d k (1-k))
    each = counts.sum(0)
    assert abs(each.var() - 200 * 0.09) < 2  # coordinates are independent of the past


def test_overflow_waits_and_does_not_always_hit_the_same():
    leaf, steps = Leaf(0, (40, 50)), np.arange(1, 61)
    tight, roomy = (Bernoulli(0.1, 0, slack=s) for s in (0.0, 20.0))
    drawn, kept = (chosen_at(x, leaf, steps) for x in (roomy, tight))
    capacity = tight.capacity(leaf)
    np.testing.assert_array_equal(kept.sum(1), np.minimum(drawn.sum(1), capacity))
    assert not np.any(kept & ~drawn)
    waited = (drawn & ~kept).sum(0)
    assert waited.sum() > 100
    assert min(waited[:1000].sum(), waited[1000:].sum()) > 0.25 * waited.sum()
    assert waited.max() < 10


def test_recorded_masks_replay_round_and_round():
    masks = np.random.default_rng(0).random((3, 6)) < 0.4
    ages = ages_at(replay_masks([masks]), Leaf(0, (2, 3)), np.arange(1, 10))
    age = np.zeros(6, int)
    for t, got in enumerate(ages):
        age = np.where(masks[t % 3], 0, age + 1)
        np.testing.assert_array_equal(got, age)


def test_ages_go_on_across_a_change():
    """Of blocks of another size, too, and of leaves that were dense before."""
    leaf = Leaf(0, (40, 300))
    phases = {0: Strided(1.0), 3: Strided(0.5, 0), 7: Permutation(0.1, 0)}
    schedule = Schedule(phases)
    ages = jax.jit(lambda t: schedule.age(t, leaf))
    age = 0
    for t in range(1, 14):
        start = max(s for s in phases if s < t)
        chosen = True
        if not phases[start].dense(leaf):
            own = np.asarray(phases[start].age(jnp.int32(t), leaf)) == 0
            chosen = np.repeat(own, phases[start].block_size(leaf), 0)
        got = np.asarray(ages(jnp.int32(t)))
        got = np.repeat(got, schedule.block_size(leaf), 0)
        age = np.where(chosen, 0, age + 1)
        np.testing.assert_array_equal(got, np.broadcast_to(age, got.shape))


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
    recorded = replay_masks([np.ones((2, 4), bool), odd])
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


def leaves(*shapes):
    return [Leaf(i, shape) for i, shape in enumerate(shapes)]


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
    selection = plain().selection_for(leaves(*shapes))
    assert selection == Strided(0.1, min_size)
    assert plain(min_size=7).selection_for(leaves(*shapes)) == Strided(0.1, 7)


def test_what_an_exchange_selects():
    some = leaves((100, 100))
    by_name = plain(selection="permutation", compress_ratio=0.5, min_size=3, seed=4)
    assert by_name.selection_for(some) == Permutation(0.5, 3, 4)
    own = OddThenEven()
    assert plain(selection=own).selection_for(some) is own
    changing = plain(compress_ratio={9: 0.1, 0: 0.5}, min_size=3).selection_for(some)
    assert changing == Schedule({0: Strided(0.5, 3), 9: Strided(0.1, 3)})
