"""The library against the naive NumPy SLAMB, on random trees, in both forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slamb_jax.selections import Bernoulli, Permutation, Schedule, Strided
from tests.close import assert_close
from tests.forms import FORMS, moments
from tests.masks import masks_of
from tests.naive import NaiveSlamb
from tests.optimizers import plain
from tests.workers import AXIS, train

STEPS = 5


def warmed_up(ratio, min_size, seed):
    """All, then twice the ratio, then the ratio of another round robin."""
    return Schedule(
        {
            0: Strided(1.0, min_size, seed),
            1: Strided(min(1.0, 2 * ratio), min_size, seed),
            3: Permutation(ratio, min_size, seed),
        }
    )


MAKE = {
    "strided": Strided,
    "permutation": Permutation,
    "bernoulli": Bernoulli,
    "schedule": warmed_up,
}
SHAPES = st.lists(
    st.sampled_from(
        [(), (0,), (1,), (7,), (1, 1), (3, 5), (16, 8), (0, 4), (2, 3, 5), (11, 13)]
    ),
    min_size=1,
    max_size=4,
)


def stacked(leaves, j, n):
    return np.stack([leaves[i][j] for i in range(n)])


@pytest.mark.parametrize("make", FORMS)
@given(
    name=st.sampled_from(sorted(MAKE)),
    shapes=SHAPES,
    n=st.sampled_from([1, 2, 3]),
    ratio=st.sampled_from([1.0, 0.5, 0.3, 0.1, 0.02]),
    b3=st.sampled_from([0.0, 0.7, 0.99, 1.0]),
    sync_every=st.sampled_from([None, 1, 3]),
    form=st.sampled_from(["sum", "product", "product, uncorrected"]),
    weight_decay=st.sampled_from([0.0, 0.1]),
    clips=st.sampled_from([(0.01, 1000.0), (0.0, float("inf")), (0.5, 2.0)]),
    min_size=st.sampled_from([0, 10]),
    zero=st.booleans(),
    nu_of=st.sampled_from(["gradient", "momentum"]),
    overlap=st.booleans(),
    seed=st.integers(0, 100),
)
def test_agrees_with_the_naive_version(
    make, name, shapes, n, ratio, sync_every, form, clips, min_size, zero, overlap,
    b3, seed, **moved,
):  # fmt: skip
    rng = np.random.default_rng(seed)
    params = [rng.normal(size=s).astype(np.float32) for s in shapes]
    if zero:
        params[0] = np.zeros_like(params[0])
    grads = [
        [rng.normal(size=(n, *s)).astype(np.float32) for s in shapes]
        for _ in range(STEPS)
    ]
    grads[1][-1][:] = 0  # a leaf without a gradient, for a step
    decays = [i % 2 == 0 for i in range(len(shapes))]
    corrected = "uncorrected" not in form
    common = {
        "b2": 0.99, "c_min": clips[0], "c_max": clips[1],
        "form": form.split(",")[0], "bias_correction": corrected, **moved,
    }  # fmt: skip
    naive = NaiveSlamb(
        params, n, lr=0.01, b1=0.9, b3=b3, eps=1e-6, decays=decays,
        sync_every=sync_every, overlap=overlap, **common,
    )  # fmt: skip
    selection = MAKE[name](ratio, min_size, seed)
    exchange = plain(
        AXIS, selection=selection, b3=b3, sync_every=sync_every, overlap=overlap
    )
    tx = FORMS[make](0.01, exchange, mask=decays, **common)
    masks = masks_of(selection, shapes)
    history = train(tx, params, jax.tree.map(jnp.asarray, grads), "vmap")
    for t, (p, state) in enumerate(history, 1):
        naive.step([[g[i] for g in grads[t - 1]] for i in range(n)], masks(t))
        mu, nu = moments(state)
        for got, want in ((p, naive.p), (mu, naive.m), (nu, naive.v)):
            wanted = [stacked(want, j, n) for j in range(len(shapes))]
            # 1 - 0.99**t in float32 is 6e-6 off, 50 units; sums and roots add some.
            assert_close(jax.tree.map(np.float32, got), wanted, units=512, floor=0.01)
