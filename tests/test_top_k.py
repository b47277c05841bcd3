"""Top-k of what all workers know: its choice, its bound, its state, its refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import slamb_jax
from slamb_jax import TopK
from tests.naive import NaiveSlamb
from tests.workers import AXIS, MAPPINGS, random_tree, stack, stepper, train

TREE = {"w": (12, 16), "b": (16,), "conv": (2, 3, 4, 5), "scale": ()}
N = 3


def compressor(selection, **settings):
    return slamb_jax.randk_compress_with_error_feedback(
        selection, axis_name=AXIS, **settings
    )


def kept(state):
    """What a TopK keeps of each leaf, from the state of slamb or of the compressor."""
    inner = state if hasattr(state, "chosen") else state[0].compressor
    return inner.chosen


class NaiveTopK:
    """The choice for one leaf, in NumPy; ties to the smaller number of a row."""

    def __init__(self, rows, turns, patience):
        self.age, self.score = np.zeros(rows, int), None
        self.slots, self.late = -(-rows // turns), patience * turns

    def choose(self):
        age = self.age + 1
        late = age > self.late
        order = sorted(
            range(len(age)),
            key=lambda i: (-age[i], i) if late[i] else (0, -self.score[i] * age[i], i),
        )
        order.sort(key=lambda i: not late[i])
        self.sent = np.array(order[: self.slots])
        self.before = age
        self.age = np.where(np.isin(np.arange(len(age)), self.sent), 0, age)
        return self.sent

    def learn(self, agreed, *, added_up):
        score = np.sqrt(np.mean(np.square(agreed, dtype=np.float64), axis=1))
        self.score[self.sent] = score / (self.before[self.sent] if added_up else 1)


@pytest.mark.parametrize("keep_residual", [False, True])
def test_the_choice_is_that_of_the_naive_version(keep_residual):
    selection = TopK(0.25, 20, patience=2)
    params = random_tree(TREE, 9)
    scale = np.exp(2 * np.random.default_rng(0).normal(size=(12, 1)))
    grads = [random_tree(TREE, t, N) for t in range(30)]
    for g in grads:
        g["w"] = g["w"] * jnp.asarray(scale, jnp.float32)[None]
    tx = compressor(selection, keep_residual=keep_residual)
    first = [None if k is None else np.asarray(k.score) for k in kept(tx.init(params))]
    naive = {}
    for j, name in enumerate(sorted(TREE)):
        if first[j] is not None:
            naive[name] = NaiveTopK(len(first[j]), 4, 2)
            naive[name].score = first[j][:, 0].astype(np.float64)
    assert sorted(naive) == ["conv", "w"]
    history = train(optax.with_extra_args_support(tx), params, grads, "vmap")
    waited = 0
    residual = {name: np.zeros((N, *TREE[name])) for name in TREE}
    for (_, state), g in zip(history, grads, strict=True):
        for j, name in enumerate(sorted(TREE)):
            if name not in naive:
                continue
            mine = naive[name]
            x = np.asarray(g[name], np.float64) + residual[name]
            sent = mine.choose()
            waited = max(waited, mine.before.max())
            one = jax.tree.map(lambda x: x[0], kept(state)[j])
            assert set(one.sent.tolist()) == set(sent.tolist())
            np.testing.assert_array_equal(one.age[:, 0], mine.age)
            rows = x.reshape(N, len(mine.age), -1)
            mine.learn(rows[:, sent].mean(0), added_up=keep_residual)
            np.testing.assert_allclose(one.score[:, 0], mine.score, rtol=1e-4)
            if keep_residual:
                rows[:, sent] = 0
                residual[name] = rows.reshape(x.shape)
    assert waited > 4  # not merely a round robin


@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e38, 0.0])
@settings(
    max_examples=4,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
@given(
    shape=st.sampled_from([(2, 2), (11, 13), (40, 6), (3, 5, 8)]),
    ratio=st.sampled_from([0.5, 0.3, 0.1]),
    patience=st.sampled_from([1, 2]),
    seed=st.integers(0, 100),
)
def test_no_row_starves(poison, shape, ratio, patience, seed):
    """Whatever the values: each row at least every (patience + 1) c steps."""
    selection = TopK(ratio, 0, seed, patience)
    leaf = slamb_jax.Leaf(0, 0, shape, int(np.prod(shape)))
    rows = leaf.size // selection.width(leaf)
    turns = selection.strided.turns
    bound = (patience + 1) * turns
    rng = np.random.default_rng(seed)
    scale = np.where(rng.random(rows) < 0.3, 1e6, 1e-6)
    scale = jnp.asarray(np.where(rng.random(rows) < 0.1, poison, scale), jnp.float32)
    tx = slamb_jax.randk_compress_with_error_feedback(selection, keep_residual=False)

    def step(state, _):
        g = jnp.broadcast_to(scale[:, None], (rows, leaf.size // rows)).reshape(shape)
        state = tx.update(g, state)[1]
        return state, (kept(state)[0].sent, kept(state)[0].age)

    length = 4 * bound
    _, (sent, ages) = jax.lax.scan(step, tx.init(jnp.zeros(shape)), length=length)
    last, age = np.zeros(rows, int), np.zeros(rows, int)
    for t, (now, found) in enumerate(zip(*map(np.asarray, (sent, ages)), strict=True)):
        assert len(set(now.tolist())) == len(now) == -(-rows // turns)
        assert now.min() >= 0
        assert now.max() < rows
        age += 1
        assert age.max() <= bound
        age[now] = 0
        np.testing.assert_array_equal(found[:, 0], age)
        last[now] = t + 1
    assert (length - last).max() < bound


@pytest.mark.parametrize("mapping", MAPPINGS)
def test_all_workers_choose_the_same_bits(mapping):
    """Though their gradients differ by orders, and one of them is poisoned."""
    params = random_tree(TREE, 9)
    grads = [random_tree(TREE, t, N) for t in range(12)]
    for t, g in enumerate(grads):
        g["w"] = g["w"] * jnp.asarray([1e-3, 1.0, 1e3])[:, None, None]
        if t == 8:
            g["w"] = g["w"].at[1, 3].set(jnp.nan)
    tx = slamb_jax.slamb(
        0.01, axis_name=AXIS, selection=TopK(0.25, 20), b3=0.7, sync_every=3
    )
    history = train(tx, params, grads, mapping)
    scores = [k.score for k in kept(history[-1][1]) if k is not None]
    assert len(scores) == 2
    assert all(np.isfinite(s).all() for s in scores)
    for _, state in history:
        jax.tree.map(
            lambda x: np.testing.assert_array_equal(x, np.broadcast_to(x[:1], x.shape)),
            kept(state),
        )
    assert np.isnan(history[-1][1][0].mu["w"]).any()  # the poison did arrive


@pytest.mark.parametrize("form", ["sum", "product"])
@pytest.mark.parametrize("overlap", [False, True])
def test_agrees_with_the_naive_slamb(form, overlap):
    """With the masks that it chose."""
    params = random_tree(TREE, 9)
    names = sorted(TREE)
    grads = [random_tree(TREE, t, N) for t in range(14)]
    tx = slamb_jax.slamb(
        0.01, axis_name=AXIS, selection=TopK(0.25, 20), b2=0.99, b3=0.7, form=form,
        sync_every=5, weight_decay=0.1, overlap=overlap,
    )  # fmt: skip
    naive = NaiveSlamb(
        [np.asarray(params[k]) for k in names], N, lr=0.01, b1=0.9, b2=0.99, b3=0.7,
        eps=1e-6, c_min=0.01, c_max=1000.0, weight_decay=0.1, decays=[True] * 4,
        form=form, sync_every=5, bias_correction=True, overlap=overlap,
    )  # fmt: skip
    for g, (p, state) in zip(grads, train(tx, params, grads, "vmap"), strict=True):
        masks = []
        for name, rows in zip(names, kept(state), strict=True):
            mask = np.ones(TREE[name], bool)
            if rows is not None:
                fresh = np.asarray(rows.age[0]) == 0
                each = mask.size // len(fresh)
                mask = np.broadcast_to(fresh, (len(fresh), each)).reshape(mask.shape)
            masks.append(mask)
        naive.step([[np.asarray(g[k][i]) for k in names] for i in range(N)], masks)
        for got, want in ((p, naive.p), (state[0].mu, naive.m)):
            for j, name in enumerate(names):
                stacked = np.stack([want[i][j] for i in range(N)])
                np.testing.assert_allclose(got[name], stacked, rtol=3e-4, atol=3e-6)


def test_nothing_is_lost_in_front_of_an_optimizer():
    params = random_tree(TREE, 9)
    tx = compressor(TopK(0.25, 20))
    step = stepper(tx, "vmap", N)
    state, zeros = (
        stack(tx.init(params), N),
        stack(jax.tree.map(jnp.zeros_like, params), N),
    )
    given = seen = zeros
    for t in range(10):
        g = random_tree(TREE, t, N)
        sent, state = step(g, state, zeros)
        given = jax.tree.map(jnp.add, given, g)
        seen = jax.tree.map(jnp.add, seen, sent)
    for name in TREE:
        total = seen[name].mean(0) + state.residual[name].mean(0)
        np.testing.assert_allclose(total, given[name].mean(0), rtol=1e-4, atol=1e-5)


def test_a_leaf_without_gradient_keeps_its_state():
    tx = compressor(TopK(0.25, 20), keep_residual=False)
    tx = slamb_jax.randk_compress_with_error_feedback(
        TopK(0.25, 20), keep_residual=False
    )
    params = random_tree(TREE, 9)
    state = tx.init(params)
    update = jax.jit(tx.update)
    _, before = update(params, state, params)
    _, after = update(params | {"conv": None}, before, params)
    conv, w = sorted(TREE).index("conv"), sorted(TREE).index("w")
    jax.tree.map(np.testing.assert_array_equal, before.chosen[conv], after.chosen[conv])
    assert (before.chosen[w].sent != after.chosen[w].sent).any()
    with pytest.raises(ValueError, match="params must be given"):
        tx.update(params | {"conv": None}, after)


def test_it_sends_the_bytes_of_strided():
    params = random_tree({"w": (96, 512), "e": (517, 48), "b": (512,)}, 0)
    sent = {}
    for selection in ("strided", "top_k"):
        tx = slamb_jax.slamb(0.01, axis_name=AXIS, selection=selection, sync_every=None)
        step = stepper(tx, "shard_map_unchecked", 8)
        stacked = stack(params, 8)
        report = slamb_jax.wire_report(
            step.lower(stacked, stack(tx.init(params), 8), stacked)
        )
        sent[selection] = report.bytes_sent()
    assert sent["top_k"] == sent["strided"]


def test_it_can_be_resized():
    params = random_tree(TREE, 9)
    tx = slamb_jax.slamb(0.01, axis_name=AXIS, selection=TopK(0.25, 20))
    grads = [random_tree(TREE, t, N) for t in range(3)]
    state = train(tx, params, grads, "vmap")[-1][1]
    jax.tree.map(
        lambda x, y: np.testing.assert_array_equal(x[:1], y[:1]),
        kept(state), kept(slamb_jax.resize(state, 2)),
    )  # fmt: skip
