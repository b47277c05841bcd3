"""The authors' recorded runs, reproduced at every step, parameters and moments."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from slamb_jax import slamb
from slamb_jax.selections import replay_masks
from tests.forms import FORMS, moments
from tests.optimizers import plain
from tests.workers import AXIS, MAPPINGS, train

GOLDEN = Path(__file__).parent / "golden"
SHAPES = [(12, 15), (15,), (4, 5), (3, 3, 4, 8), (10, 12)]
NO_BIAS = [True, False, True, True, True]
TOLERANCE = 2e-5  # of the largest entry; both are float32 runs of 12 steps
RUNS = {
    "slamb_naive": {"form": "product"},
    "slamb_naive_wd": {"form": "product", "weight_decay": 0.1, "mask": NO_BIAS},
    "slamb_naive_1w": {"form": "product", "weight_decay": 0.01},
    "slamb_v2": {"form": "sum"},
    "slamb_v2_wd": {"form": "sum", "weight_decay": 0.1, "mask": NO_BIAS},
}


def split(flat):
    """(..., d) to a list of arrays (..., size), one for each leaf."""
    return np.split(flat, np.cumsum([np.prod(s) for s in SHAPES])[:-1], axis=-1)


def leaves_of(flat):
    return [
        jnp.asarray(x.reshape(*flat.shape[:-1], *shape))
        for x, shape in zip(split(flat), SHAPES, strict=True)
    ]


def assert_recorded(got, want):
    flat = np.concatenate([x.reshape(len(x), -1) for x in got], axis=1)
    np.testing.assert_allclose(flat, want, rtol=0, atol=TOLERANCE * np.abs(want).max())


@pytest.mark.parametrize(
    ("name", "make", "mapping"),
    [(name, make, "vmap") for name in RUNS for make in FORMS]
    + [("slamb_naive_wd", "fused", m) for m in MAPPINGS[1:]]
    + [("slamb_v2_wd", "fused", m) for m in MAPPINGS[1:]]
    + [("slamb_v2", "chain", "shard_map")],
)
def test_slamb_follows_the_recorded_run(name, make, mapping):
    run = np.load(GOLDEN / f"{name}.npz")
    selection = replay_masks(split(run["mask"]))
    exchange = plain(AXIS, selection=selection, b3=0.9, sync_every=5)
    tx = FORMS[make](0.01, exchange, **RUNS[name])
    grads = [leaves_of(g) for g in run["grads"]]
    history = train(tx, leaves_of(run["p0"]), grads, mapping)
    assert len(history) == 12
    for t, (params, state) in enumerate(history):
        assert_recorded(params, run["params"][t])
        mu, nu = moments(state)
        assert_recorded(mu, run["m"][t])
        assert_recorded(nu, run["v"][t])


@pytest.mark.parametrize("name", ["lamb", "lamb_wd"])
def test_optax_lamb_follows_the_recorded_lamb(name):
    """So that what equals ``optax.lamb`` equals the authors' LAMB."""
    run = np.load(GOLDEN / f"{name}.npz")
    decay = {"weight_decay": 0.1, "mask": NO_BIAS} if name == "lamb_wd" else {}
    tx = optax.lamb(0.01, **decay)
    mean = run["grads"].mean(1, keepdims=True)
    with jax.numpy_dtype_promotion("standard"):  # optax.lamb needs it
        grads = [leaves_of(g) for g in mean]
        history = train(tx, leaves_of(run["p0"]), grads, "vmap")
    for t, (params, _) in enumerate(history):
        assert_recorded(params, run["params"][t][:1])


def test_the_state_is_two_moments_and_one_count():
    params = {"a": jnp.zeros((300, 70)), "b": jnp.zeros((70,)), "c": jnp.zeros(())}

    def bytes_of(tree):
        shapes = jax.eval_shape(lambda: tree) if tree is params else tree
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))

    state = jax.eval_shape(slamb(0.01, plain()).init, params)
    assert bytes_of(state) <= 2.01 * bytes_of(params) + 1024
    assert len(jax.tree.leaves(state[0])) == 2 * len(params) + 1
    half = jax.eval_shape(slamb(0.01, plain(), mu_dtype="bfloat16").init, params)
    assert bytes_of(half) <= 1.51 * bytes_of(params) + 1024
