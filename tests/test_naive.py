"""The library against the naive NumPy SLAMB, on random trees."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import slamb_jax
from slamb_jax._selections import rows_at
from tests.naive import NaiveSlamb
from tests.workers import AXIS, train


def warmed_up(ratio, min_size, seed):
    """Whole, then twice the ratio, then the ratio, then the other round robin."""
    phases = {
        0: slamb_jax.Strided(1.0, min_size, seed),
        1: slamb_jax.Strided(min(1.0, 2 * ratio), min_size, seed),
        3: slamb_jax.Strided(ratio, min_size, seed),
        9: slamb_jax.Permutation(ratio, min_size, seed),
    }
    return slamb_jax.Piecewise(phases)


SELECTIONS = {
    "strided": slamb_jax.Strided,
    "permutation": slamb_jax.Permutation,
    "bernoulli": slamb_jax.Bernoulli,
    "piecewise": warmed_up,
}
SHAPES = st.lists(
    st.sampled_from(
        [(), (0,), (1,), (7,), (1, 1), (3, 5), (16, 8), (0, 4), (2, 3, 5), (11, 13)]
    ),
    min_size=1,
    max_size=4,
)


def numbered(shapes):
    sizes = [int(np.prod(s)) for s in shapes]
    return [
        slamb_jax.Leaf(i, sum(sizes[:i]), s, sum(sizes)) for i, s in enumerate(shapes)
    ]


def masks_at(selection, leaves, t):
    """The masks as the naive version takes them: of the leaf's shape."""
    out = []
    for leaf in leaves:
        mask = np.ones(leaf.shape, bool)
        if not selection.whole(leaf):
            rows = np.asarray(selection.mask(jnp.int32(t), leaf))
            each = leaf.size // rows.shape[0]
            mask = np.broadcast_to(rows, (rows.shape[0], each)).reshape(leaf.shape)
        out.append(mask)
    return out


@pytest.mark.parametrize("name", SELECTIONS)
@settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
)
@given(
    shapes=SHAPES,
    n=st.sampled_from([1, 2, 3]),
    ratio=st.sampled_from([1.0, 0.5, 0.3, 0.1, 0.02]),
    b3=st.sampled_from([0.0, 0.7, 0.99, 1.0]),
    sync_every=st.sampled_from([None, 1, 3]),
    form=st.sampled_from(["sum", "product"]),
    weight_decay=st.sampled_from([0.0, 0.1]),
    clips=st.sampled_from([(0.01, 1000.0), (0.0, float("inf")), (0.5, 2.0)]),
    min_size=st.sampled_from([0, 10]),
    zero=st.booleans(),
    nu_of=st.sampled_from(["gradient", "momentum", "larger"]),
    seed=st.integers(0, 100),
)
def test_agrees_with_the_naive_version(
    name,
    shapes,
    n,
    ratio,
    b3,
    sync_every,
    form,
    weight_decay,
    clips,
    min_size,
    zero,
    nu_of,
    seed,
):
    rng = np.random.default_rng(seed)
    params = [rng.normal(size=s).astype(np.float32) for s in shapes]
    if zero:
        params[0] = np.zeros_like(params[0])
    steps = 5
    grads = [
        [rng.normal(size=(n, *s)).astype(np.float32) for s in shapes]
        for _ in range(steps)
    ]
    grads[1][-1][:] = 0  # a leaf without a gradient, for a step
    decays = [i % 2 == 0 for i in range(len(shapes))]
    naive = NaiveSlamb(
        params, n, lr=0.01, b1=0.9, b2=0.99, b3=b3, eps=1e-6, c_min=clips[0],
        c_max=clips[1], weight_decay=weight_decay, decays=decays, form=form,
        sync_every=sync_every, bias_correction=True, nu_of=nu_of,
    )  # fmt: skip
    selection = SELECTIONS[name](ratio, min_size, seed)
    tx = slamb_jax.slamb(
        0.01, axis_name=AXIS, selection=selection, b2=0.99, b3=b3, form=form,
        sync_every=sync_every, weight_decay=weight_decay, mask=decays,
        c_min=clips[0], c_max=clips[1], nu_of=nu_of,
    )  # fmt: skip
    history = train(tx, params, jax.tree.map(jnp.asarray, grads), "vmap")
    leaves = numbered(shapes)
    for t, (p, state) in enumerate(history, 1):
        g = [[leaf[i] for leaf in grads[t - 1]] for i in range(n)]
        naive.step(g, masks_at(selection, leaves, t))
        for got, want in ((p, naive.p), (state[0].mu, naive.m), (state[0].nu, naive.v)):
            for j in range(len(shapes)):
                stacked = np.stack([want[i][j] for i in range(n)])
                np.testing.assert_allclose(got[j], stacked, rtol=3e-4, atol=3e-6)


@pytest.mark.parametrize("name", SELECTIONS)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(
    shape=st.sampled_from([(2, 2), (3, 5), (16, 8), (2, 3, 5), (11, 13), (40, 64)]),
    ratio=st.sampled_from([0.9, 0.5, 0.3, 0.1, 0.02]),
    seed=st.integers(0, 2**31),
    index=st.integers(0, 100),
)
def test_ages_follow_the_recurrence_and_packing_the_mask(
    name, shape, ratio, seed, index
):
    selection = SELECTIONS[name](ratio, 0, seed)
    leaf = slamb_jax.Leaf(index, 0, shape, int(np.prod(shape)))
    if selection.whole(leaf):
        assert ratio > 2 / 3  # one turn
        return
    x = jnp.arange(1, leaf.size + 1, dtype=jnp.float32).reshape(shape)

    @jax.jit
    def at(t):
        rows = rows_at(selection, t, leaf)
        packed = rows.pack(x)
        negated = rows.unpack(-packed, x)
        masks = selection.mask(t, leaf), selection.age(t, leaf)
        return *masks, packed, rows.used, negated

    age = None
    for t in range(1, 15):
        mask, got, packed, used, negated = map(np.asarray, at(jnp.int32(t)))
        age = np.where(mask, 0, (0 if age is None else age) + 1)
        np.testing.assert_array_equal(got, age)
        rows = np.asarray(x).reshape(mask.shape[0], -1)
        np.testing.assert_array_equal(
            negated, np.where(mask, -rows, rows).reshape(shape)
        )
        sent = np.sort(packed[used].reshape(-1))
        np.testing.assert_array_equal(sent, rows[mask[:, 0]].reshape(-1))
