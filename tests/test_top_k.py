"""Top-k of what all workers know: its choice, its bound, its state."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import slamb_jax
from slamb_jax.exchange.selections import elements_sent
from slamb_jax.selections import Leaf, Strided, TopK
from tests.close import assert_close
from tests.masks import of_elements
from tests.naive import NaiveSlamb
from tests.optimizers import plain, random_tree, slamb
from tests.test_naive import stacked
from tests.workers import AXIS, train

TREE = {"b": (16,), "conv": (2, 3, 4, 5), "scale": (), "w": (12, 16)}
N = 3


def compressor(selection, **settings):
    exchange = plain(AXIS, selection=selection)
    return slamb_jax.randk_compress_with_error_feedback(exchange, **settings)


def kept(state):
    """The states of a TopK, by leaf, from that of slamb or of the compressor."""
    inner = state if hasattr(state, "selection") else state[0]
    return {i: leaf for i, leaf in enumerate(inner.selection) if leaf is not None}


class NaiveTopK:
    """The choice for one leaf, in NumPy; ties to the block with the smaller index."""

    def __init__(self, score, period, patience):
        self.score = score
        self.age = np.zeros(len(score), int)
        self.slots, self.late = -(-len(score) // period), patience * period

    def choose(self):
        self.before = age = self.age + 1
        late = age > self.late
        order = sorted(
            range(len(age)),
            key=lambda i: (-age[i], i) if late[i] else (0, -self.score[i] * age[i], i),
        )
        order.sort(key=lambda i: not late[i])
        self.sent = np.array(order[: self.slots])
        self.age = np.where(np.isin(np.arange(len(age)), self.sent), 0, age)
        return self.sent

    def learn(self, mean, *, accumulated):
        score = np.sqrt(np.mean(np.square(mean, dtype=np.float64), axis=1))
        self.score[self.sent] = score / (self.before[self.sent] if accumulated else 1)


@pytest.mark.parametrize("keep_residual", [False, True])
def test_the_choice_is_that_of_the_naive_version(keep_residual):
    params = random_tree(TREE, 9)
    scale = np.exp(2 * np.random.default_rng(0).normal(size=(12, 1)))
    grads = [random_tree(TREE, t, N) for t in range(30)]
    for g in grads:
        g["w"] = g["w"] * jnp.asarray(scale, jnp.float32)[None]
    tx = compressor(TopK(0.25, 20, patience=2), keep_residual=keep_residual)
    naive = {
        j: NaiveTopK(np.asarray(leaf.score)[:, 0].astype(np.float64), 4, 2)
        for j, leaf in kept(tx.init(params)).items()
    }
    names = sorted(TREE)
    assert [names[j] for j in naive] == ["conv", "w"]
    history = train(tx, params, grads, "vmap")
    waited, residual = 0, {j: np.zeros((N, *TREE[names[j]])) for j in naive}
    for (_, state), g in zip(history, grads, strict=True):
        for j, mine in naive.items():
            x = np.asarray(g[names[j]], np.float64) + residual[j]
            sent = mine.choose()
            waited = max(waited, mine.before.max())
            one = jax.tree.map(lambda x: x[0], kept(state)[j])
            assert set(one.blocks.tolist()) == set(sent.tolist())
            np.testing.assert_array_equal(one.age[:, 0], mine.age)
            blocks = x.reshape(N, len(mine.age), -1)
            mine.learn(blocks[:, sent].mean(0), accumulated=keep_residual)
            np.testing.assert_allclose(one.score[:, 0], mine.score, rtol=1e-4)
            if keep_residual:
                blocks[:, sent] = 0
                residual[j] = blocks.reshape(x.shape)
    assert waited > 4  # not merely a round robin


@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e38, 0.0])
@given(
    shape=st.sampled_from([(2, 2), (11, 13), (40, 6), (3, 5, 8)]),
    ratio=st.sampled_from([0.5, 0.3, 0.1]),
    patience=st.sampled_from([1, 2]),
    seed=st.integers(0, 100),
)
def test_no_block_starves(poison, shape, ratio, patience, seed):
    """Whatever the values: each block at least every (patience + 1) c steps."""
    selection, leaf = TopK(ratio, 0, seed, patience), Leaf(0, shape)
    size, period = selection.block_size(leaf), round(1 / ratio)
    count = leaf.size // size
    bound = (patience + 1) * period
    rng = np.random.default_rng(seed)
    scale = np.where(rng.random(count) < 0.3, 1e6, 1e-6)
    scale = np.where(rng.random(count) < 0.1, poison, scale).astype(np.float32)

    def step(before, _):
        chosen = selection.choose(before, leaf)
        mean = jnp.broadcast_to(jnp.asarray(scale)[chosen.blocks, None], (slots, size))
        after = selection.learn(before, chosen, leaf, mean, accumulated=False)
        return after, (after.blocks, after.age[:, 0])

    start, length = selection.init(leaf), 4 * bound
    slots = len(start.blocks)
    run = jax.jit(lambda state: jax.lax.scan(step, state, length=length)[1])
    last, age = np.zeros(count, int), np.zeros(count, int)
    for t, (now, found) in enumerate(zip(*map(np.asarray, run(start)), strict=True)):
        assert len(set(now.tolist())) == len(now) == -(-count // period)
        assert 0 <= now.min() <= now.max() < count
        age += 1
        assert age.max() <= bound
        age[now] = 0
        np.testing.assert_array_equal(found, age)
        last[now] = t + 1
    assert (length - last).max() < bound


def test_all_workers_choose_the_same_bits():
    """Though their gradients differ by orders, and one of them is poisoned."""
    grads = [random_tree(TREE, t, N) for t in range(12)]
    for t, g in enumerate(grads):
        g["w"] = g["w"] * jnp.asarray([1e-3, 1.0, 1e3])[:, None, None]
        if t == 8:
            g["w"] = g["w"].at[1, 3].set(jnp.nan)
    tx = slamb(selection=TopK(0.25, 20), min_size=None)
    history = train(tx, random_tree(TREE, 9), grads, "shard_map")
    for _, state in history:
        for x in jax.tree.leaves(kept(state)):
            np.testing.assert_array_equal(x, np.broadcast_to(x[:1], x.shape))
    last = history[-1][1]
    assert len(kept(last)) == 2
    assert all(np.isfinite(leaf.score).all() for leaf in kept(last).values())
    assert np.isnan(last[0].mu["w"]).any()  # the poison did arrive


@pytest.mark.parametrize("form", ["sum", "product"])
def test_agrees_with_the_naive_slamb(form):
    """With the masks that it chose."""
    params, names = random_tree(TREE, 9), sorted(TREE)
    grads = [random_tree(TREE, t, N) for t in range(14)]
    overlap = form == "sum"
    settings = {"b2": 0.99, "form": form, "weight_decay": 0.1}
    exchange = plain(
        AXIS, selection=TopK(0.25, 20), b3=0.7, sync_every=5, overlap=overlap
    )
    naive = NaiveSlamb(
        [np.asarray(params[k]) for k in names], N, lr=0.01, b1=0.9, b3=0.7, eps=1e-6,
        c_min=0.01, c_max=1000.0, decays=[True] * 4, sync_every=5,
        bias_correction=True, overlap=overlap, **settings,
    )  # fmt: skip
    tx = slamb_jax.slamb(0.01, exchange, **settings)
    for g, (p, state) in zip(grads, train(tx, params, grads, "vmap"), strict=True):
        masks = [np.ones(TREE[name], bool) for name in names]
        for j, leaf in kept(state).items():
            masks[j] = of_elements(leaf.age[0], TREE[names[j]])
        naive.step([[np.asarray(g[k][i]) for k in names] for i in range(N)], masks)
        for got, want in ((p, naive.p), (state[0].mu, naive.m)):
            wanted = {k: stacked(want, j, N) for j, k in enumerate(names)}
            assert_close(got, wanted, units=512)  # 1 - 0.99**t is 50 units off


def test_a_leaf_without_a_gradient_keeps_its_state():
    tx = slamb_jax.randk_compress_with_error_feedback(
        plain(selection=TopK(0.25, 20)), keep_residual=False
    )
    params = random_tree(TREE, 9)
    update = jax.jit(tx.update)
    _, before = update(params, tx.init(params), params)
    _, after = update(params | {"conv": None}, before, params)
    conv, w = (sorted(TREE).index(name) for name in ("conv", "w"))
    jax.tree.map(np.testing.assert_array_equal, kept(before)[conv], kept(after)[conv])
    assert (kept(before)[w].blocks != kept(after)[w].blocks).any()
    with pytest.raises(ValueError, match="params must be given"):
        tx.update(params | {"conv": None}, after)


def test_it_sends_as_much_as_strided():
    for shape in [(96, 512), (517, 48), (512,), (7, 9)]:
        leaf = Leaf(0, shape)
        assert elements_sent(TopK(), leaf) == elements_sent(Strided(), leaf)
