"""The authors' recorded runs, reproduced at every step, parameters and moments."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slamb_jax
from tests.workers import AXIS, MAPPINGS, train

GOLDEN = Path(__file__).parent / "golden"
SHAPES = [(12, 15), (15,), (4, 5), (3, 3, 4, 8), (10, 12)]
NO_BIAS = [True, False, True, True, True]
TOLERANCE = 2e-5  # of the largest entry; 6e-6 is reached


def unflatten(flat: np.ndarray) -> list[jax.Array]:
    """(..., d) to a list of leaves (..., shape), in the recorded order."""
    ends = np.cumsum([np.prod(shape) for shape in SHAPES])[:-1]
    parts = np.split(flat, ends, axis=-1)
    lead = flat.shape[:-1]
    return [
        jnp.asarray(x.reshape(*lead, *s)) for x, s in zip(parts, SHAPES, strict=True)
    ]


def flatten(leaves: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([x.reshape(len(x), -1) for x in leaves], axis=1)


def assert_close(got: list[np.ndarray], want: np.ndarray) -> None:
    np.testing.assert_allclose(
        flatten(got), want, rtol=0, atol=TOLERANCE * np.abs(want).max()
    )


@pytest.mark.parametrize("mapping", MAPPINGS)
@pytest.mark.parametrize(
    ("name", "form", "weight_decay", "mask"),
    [
        ("slamb_naive", "product", 0.0, None),
        ("slamb_naive_wd", "product", 0.1, NO_BIAS),
        ("slamb_naive_1w", "product", 0.01, None),
        ("slamb_v2", "sum", 0.0, None),
        ("slamb_v2_wd", "sum", 0.1, NO_BIAS),
    ],
)
def test_slamb_follows_the_recorded_run(name, form, weight_decay, mask, mapping):
    run = np.load(GOLDEN / f"{name}.npz")
    tx = slamb_jax.slamb(
        0.01,
        axis_name=AXIS,
        compress_ratio=0.25,
        b3=0.9,
        weight_decay=weight_decay,
        mask=mask,
        sync_every=5,
        form=form,
        selection=slamb_jax.replay_masks(run["mask"]),
        min_size=30,
    )
    grads = [unflatten(g) for g in run["grads"]]
    history = train(tx, unflatten(run["p0"]), grads, mapping)
    assert len(history) == 12
    for t, (params, state) in enumerate(history):
        assert_close(params, run["params"][t])
        assert_close(state[0].mu, run["m"][t])
        assert_close(state[0].nu, run["v"][t])


@pytest.mark.parametrize(
    ("name", "form"), [("slamb_naive", "product"), ("slamb_v2", "sum")]
)
def test_replayed_ages_are_those_recorded(name, form):
    run = np.load(GOLDEN / f"{name}.npz")
    replay = slamb_jax.replay_masks(run["mask"])
    leaf = slamb_jax.Leaf(3, 215, SHAPES[3], 623)
    for t, recorded in enumerate(run["fresh"][:, 215:503], 1):
        age = np.asarray(replay.age(jnp.int32(t), leaf))[:, 0]
        fresh = age if form == "product" else 0.9**age
        np.testing.assert_allclose(fresh, recorded, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "weight_decay", "mask"),
    [("lamb", 0.0, None), ("lamb_wd", 0.1, NO_BIAS)],
)
def test_optax_lamb_follows_the_recorded_lamb(name, weight_decay, mask):
    run = np.load(GOLDEN / f"{name}.npz")
    tx = optax.lamb(0.01, weight_decay=weight_decay, mask=mask)
    mean = run["grads"].mean(1, keepdims=True)
    with jax.numpy_dtype_promotion("standard"):  # optax.lamb needs it
        history = train(tx, unflatten(run["p0"]), [unflatten(g) for g in mean], "vmap")
    for t, (params, _) in enumerate(history):
        assert_close(params, run["params"][t][:1])
