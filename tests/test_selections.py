"""Coverage, mixing and overflow of the selections."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slamb_jax
from slamb_jax._selections import rows_at
from tests.workers import AXIS, random_tree, train


def leaf_of(*shape, index=0):
    return slamb_jax.Leaf(index, 0, shape, int(np.prod(shape)))


def elements(rows, leaf):
    """One bool per element from one per row."""
    rows = np.asarray(rows)
    return np.broadcast_to(rows, (len(rows), leaf.size // len(rows))).reshape(-1)


@pytest.mark.parametrize("make", [slamb_jax.Strided, slamb_jax.Permutation])
@pytest.mark.parametrize("shape", [(100, 96), (97, 101), (3, 3, 64, 64)])
@pytest.mark.parametrize("ratio", [0.1, 1 / 93, 0.3])
def test_a_round_sends_each_coordinate_exactly_once(make, shape, ratio):
    selection, leaf = make(ratio, 0), leaf_of(*shape)
    turns = max(1, round(1 / ratio))
    mask = jax.jit(lambda t: selection.mask(t, leaf))
    for first in (1, 1000003):
        sent = sum(
            elements(mask(jnp.int32(t)), leaf).astype(int)
            for t in range(first, first + turns)
        )
        np.testing.assert_array_equal(sent, 1)


@pytest.mark.parametrize("make", [slamb_jax.Strided, slamb_jax.Permutation])
def test_what_travels_is_no_more_than_its_share(make):
    for shape in [(100, 90), (96, 512), (97, 101), (768, 768)]:
        leaf = leaf_of(*shape)
        packed = jax.eval_shape(
            lambda x, leaf=leaf: rows_at(make(0.1), jnp.int32(3), leaf).pack(x),
            jnp.zeros(shape),
        )
        assert packed.size <= 1.02 * leaf.size / 10


def test_strided_moves_rows_of_neighbours_only_in_large_leaves():
    strided = slamb_jax.Strided(0.1, 0)
    rows = [
        strided.mask(jnp.int32(1), leaf_of(*s)).shape[0] for s in [(6, 4), (768, 768)]
    ]
    assert rows == [24, 768 * 6]


@pytest.mark.parametrize("make", [slamb_jax.Strided, slamb_jax.Permutation])
def test_leaves_and_seeds_differ(make):
    masks = [
        elements(
            make(0.1, 0, seed).mask(jnp.int32(5), leaf_of(80, 64, index=i)),
            leaf_of(80, 64),
        )
        for seed, i in [(0, 0), (0, 1), (1, 0)]
    ]
    for a, b in [(0, 1), (0, 2), (1, 2)]:
        both = np.mean(masks[a] & masks[b])
        assert 0.003 < both < 0.02  # 0.01 if they are independent


def test_permutation_has_no_pattern():
    """Neighbours travel together no more often than chance would have it."""
    leaf = leaf_of(200, 200)
    mask = elements(slamb_jax.Permutation(0.1).mask(jnp.int32(3), leaf), leaf)
    for shift in (1, 2, 7, 10, 200):
        assert abs(np.mean(mask[shift:] & mask[:-shift]) - 0.01) < 0.003


def test_bernoulli_draws_with_its_probability():
    leaf = leaf_of(100, 100)
    selection = slamb_jax.Bernoulli(0.1, 0)
    mask = jax.jit(lambda t: selection.mask(t, leaf))
    counts = np.stack([np.asarray(mask(jnp.int32(t)))[:, 0] for t in range(1, 201)])
    assert abs(counts.mean() - 0.1) < 0.001
    assert abs(counts.sum(1).std() - 30) < 6  # sqrt(d k (1-k))
    each = counts.sum(0)
    assert abs(each.var() - 200 * 0.09) < 2  # coordinates are independent of the past


def test_overflow_waits_and_does_not_always_hit_the_same():
    leaf = leaf_of(40, 50)
    tight = slamb_jax.Bernoulli(0.1, 0, slack=0.0)
    roomy = slamb_jax.Bernoulli(0.1, 0, slack=20.0)
    masks = jax.jit(lambda t: (roomy.mask(t, leaf), tight.mask(t, leaf)))
    waited = np.zeros(leaf.size, int)
    for t in range(1, 61):
        drawn, kept = (np.asarray(m)[:, 0] for m in masks(jnp.int32(t)))
        assert kept.sum() == min(drawn.sum(), tight.capacity(leaf))
        assert not np.any(kept & ~drawn)
        waited += drawn & ~kept
    assert waited.sum() > 100
    halves = waited[:1000].sum(), waited[1000:].sum()
    assert min(halves) > 0.25 * waited.sum()
    assert waited.max() < 10


def test_masks_replay_round_and_round():
    masks = np.random.default_rng(0).random((3, 6)) < 0.4
    replay = slamb_jax.replay_masks(masks)
    leaf = leaf_of(2, 3)
    age = np.zeros(6, int)
    for t in range(1, 10):
        mask = np.asarray(replay.mask(jnp.int32(t), leaf))[:, 0]
        np.testing.assert_array_equal(mask, masks[(t - 1) % 3])
        age = np.where(mask, 0, age + 1)
        np.testing.assert_array_equal(replay.age(jnp.int32(t), leaf)[:, 0], age)


class OddThenEven:
    """A selection of a user's own: elements take turns by the parity of their index."""

    def whole(self, leaf):
        return leaf.size < 2

    def width(self, leaf):
        return 1

    def rows(self, step, leaf):
        odd = 2 * jnp.arange(-(-leaf.size // 2), dtype=jnp.int32) + step % 2
        return jnp.minimum(odd, leaf.size)

    def age(self, step, leaf):
        return (jnp.arange(leaf.size) % 2 != step % 2).astype(jnp.int32)[:, None]


def test_an_object_with_the_protocol_serves():
    shapes = {"w": (3, 5), "b": (4,)}
    masks = [
        np.concatenate([np.arange(4) % 2 == t % 2, np.arange(15) % 2 == t % 2])
        for t in range(1, 7)
    ]
    grads = [random_tree(shapes, t, 3) for t in range(6)]
    params = random_tree(shapes, 9)
    runs = [
        train(slamb_jax.slamb(0.01, axis_name=AXIS, selection=s), params, grads, "vmap")
        for s in (OddThenEven(), slamb_jax.replay_masks(np.stack(masks)))
    ]
    for (a, _), (b, _) in zip(*runs, strict=True):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), a, b)
