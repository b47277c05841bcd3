"""SLAMB as published: the recorded runs, the naive version, LAMB, stacks of layers."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import slamb_jax
from slamb_jax import directions
from slamb_jax.exchange.selections import Strided
from tests.campaign.draws import SHAPES
from tests.close import assert_close
from tests.compiled import compile_optimized
from tests.naive import NaiveSlamb
from tests.optimizers import exchange, plain, random_tree, slamb
from tests.replay import Replay, masks_at
from tests.workers import AXIS, MAPPINGS, train

GOLDEN = Path(__file__).parent / "golden"
RECORDED = [(12, 15), (15,), (4, 5), (3, 3, 4, 8), (10, 12)]
DECAYING = {"weight_decay": 0.1, "mask": [True, False, True, True, True]}
TOLERANCE = 2e-5  # of the largest entry; both are float32 runs of 12 steps
RUNS = {
    "slamb_naive": {"form": "product"},
    "slamb_naive_wd": {"form": "product", **DECAYING},
    "slamb_naive_1w": {"form": "product", "weight_decay": 0.01},
    "slamb_v2": {"form": "sum"},
    "slamb_v2_wd": {"form": "sum", **DECAYING},
}


def recorded_leaves(flat):
    """(..., d) to a list of arrays, one for each leaf."""
    parts = np.split(flat, np.cumsum([np.prod(s) for s in RECORDED])[:-1], axis=-1)
    return [
        x.reshape(*flat.shape[:-1], *s) for x, s in zip(parts, RECORDED, strict=True)
    ]


def assert_recorded(got, want):
    flat = np.concatenate([x.reshape(len(x), -1) for x in got], axis=1)
    np.testing.assert_allclose(flat, want, rtol=0, atol=TOLERANCE * np.abs(want).max())


def flat_chain(rate, between, *, b3, form, eps=1e-6, **ratio):
    """SLAMB as the four links in a row, and what every optax chain ends with."""
    return optax.chain(
        slamb_jax.mask_momentum(
            between, directions.adam(eps, eps_before_correction=form == "sum"),
            0.9, 0.999,
            compressor=slamb_jax.randk_compress_with_error_feedback(between),
        ),
        slamb_jax.layerwise_trust_ratio(between, b3=b3, form=form, **ratio),
        slamb_jax.elementwise_rescale(between, b3=b3),
        optax.scale_by_learning_rate(rate),
        slamb_jax.average_parameters_every(between),
    )  # fmt: skip


@pytest.mark.parametrize("make", [slamb_jax.slamb, flat_chain])
@pytest.mark.parametrize(
    ("name", "mapping"),
    [(name, "vmap") for name in RUNS]
    + [(name, m) for name in ("slamb_naive_wd", "slamb_v2_wd") for m in MAPPINGS[1:]],
)
def test_slamb_follows_the_recorded_run(make, name, mapping):
    run = np.load(GOLDEN / f"{name}.npz")
    masks = [x.reshape(len(x), -1) for x in recorded_leaves(run["mask"])]
    between = plain(AXIS, selection=Replay(masks), sync_every=5)
    tx = make(0.01, between, b3=0.9, **RUNS[name])
    grads = [recorded_leaves(g) for g in run["grads"]]
    history = train(tx, recorded_leaves(run["p0"]), grads, mapping)
    assert len(history) == 12
    for t, (params, state) in enumerate(history):
        for got, kept in ((params, "params"), (state[0].mu, "m"), (state[0].nu, "v")):
            assert_recorded(got, run[kept][t])


@pytest.mark.parametrize("name", ["lamb", "lamb_wd"])
def test_optax_lamb_follows_the_recorded_lamb(name):
    """So that what equals ``optax.lamb`` equals the authors' LAMB."""
    run = np.load(GOLDEN / f"{name}.npz")
    with jax.numpy_dtype_promotion("standard"):  # optax.lamb needs it
        tx = optax.lamb(0.01, **(DECAYING if name == "lamb_wd" else {}))
        grads = [recorded_leaves(g) for g in run["grads"].mean(1, keepdims=True)]
        history = train(tx, recorded_leaves(run["p0"]), grads, "vmap")
    for t, (params, _) in enumerate(history):
        assert_recorded(params, run["params"][t][:1])


STEPS = 5


@given(
    shapes=SHAPES,
    n=st.sampled_from([1, 2, 3]),
    ratio=st.sampled_from([1.0, 0.5, 0.3, 0.1, 0.02]),
    drawn=st.booleans(),
    b3=st.sampled_from([0.0, 0.7, 0.99, 1.0]),
    sync_every=st.sampled_from([None, 1, 3]),
    form=st.sampled_from(["sum", "product", "product, uncorrected"]),
    weight_decay=st.sampled_from([0.0, 0.1]),
    clips=st.sampled_from([(0.01, 1000.0), (0.0, float("inf")), (0.5, 2.0)]),
    min_size=st.sampled_from([0, 10]),
    zero=st.booleans(),
    overlap=st.booleans(),
    seed=st.integers(0, 100),
)
def test_agrees_with_the_naive_version(
    shapes, n, ratio, drawn, b3, sync_every, form, weight_decay, clips, min_size, zero,
    overlap, seed,
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
    selection = Strided(ratio, min_size, seed)
    if drawn:  # each coordinate of a matrix by itself, as often as it happens
        odds = [((STEPS, int(np.prod(s))), ratio if len(s) > 1 else 1) for s in shapes]
        selection = Replay([rng.random(shape) < odd for shape, odd in odds])
    decays = [i % 2 == 0 for i in range(len(shapes))]
    common = {
        "b2": 0.99, "b3": b3, "c_min": clips[0], "c_max": clips[1],
        "weight_decay": weight_decay, "form": form.split(",")[0],
        "bias_correction": "uncorrected" not in form,
    }  # fmt: skip
    naive = NaiveSlamb(
        params, n, lr=0.01, b1=0.9, eps=1e-6, decays=decays,
        sync_every=sync_every, overlap=overlap, **common,
    )  # fmt: skip
    between = plain(AXIS, selection=selection, sync_every=sync_every, overlap=overlap)
    tx = slamb_jax.slamb(0.01, between, mask=decays, **common)
    for t, (p, state) in enumerate(train(tx, params, grads, "vmap"), 1):
        naive.step(grads[t - 1], masks_at(selection, shapes, t))
        got = [list(x) for x in (p, state[0].mu, state[0].nu)]
        # 1 - 0.99**t in float32 is 6e-6 off, 50 units; sums and roots add some.
        want = [naive.p, naive.m, naive.v]
        assert_close(jax.tree.map(np.float32, got), want, units=512, floor=0.01)


@pytest.mark.parametrize("axis_name", [None, AXIS])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_one_worker_that_exchanges_all_is_optax_lamb(axis_name, decay):
    shapes = {"w": (12, 16), "b": (16,), "conv": (2, 3, 4, 5), "scale": ()}
    grads = [random_tree(shapes, t, 1) for t in range(8)]
    params = random_tree(shapes, 99) | {"conv": jnp.zeros(shapes["conv"])}
    settings = {"form": "product", "c_min": 0.0, "c_max": np.inf}
    between = plain(axis_name, compress_ratio=1.0)
    tx = slamb_jax.slamb(0.01, between, weight_decay=decay, **settings)
    got = train(tx, params, grads, "vmap")
    with jax.numpy_dtype_promotion("standard"):
        want = train(optax.lamb(0.01, weight_decay=decay), params, grads, "vmap")
    # optax rounds 1 - 0.999**t, which is 6e-5 off at t = 1, of a step of 1/100.
    assert_close([p for p, _ in got], [p for p, _ in want], units=64, floor=0.2)


@pytest.mark.parametrize("overlap", [False, True])
def test_the_mean_momentum_of_16_bits_is_that_of_dense_adam(overlap):
    """Exchanged or not, late or not, nothing of a gradient is lost."""
    grads = [random_tree({"w": (12, 16), "b": (16,)}, t, 4) for t in range(8)]
    tx = slamb(mu_dtype="bfloat16", overlap=overlap)
    history = train(tx, random_tree({"w": (12, 16), "b": (16,)}, 99), grads, "vmap")
    dense = {"w": 0.0, "b": 0.0}
    for (_, state), g in zip(history, grads, strict=True):
        for name, mu in state[0].mu.items():
            dense[name] = 0.9 * dense[name] + 0.1 * np.float64(g[name]).mean(0)
            mean = mu.astype(np.float64).mean(0)
            np.testing.assert_allclose(mean, dense[name], atol=8 * 2**-7, rtol=0)


@pytest.mark.parametrize("large", ["sent", "kept", "only sent", "only kept"])
@pytest.mark.parametrize("form", ["sum", "product"])
def test_ratios_where_one_part_dwarfs_the_other(large, form):
    """The small part must not drown in the rounding of the large one."""
    selection = Strided(0.25, 0)
    (mask,) = masks_at(selection, [(8, 9)], 1)
    rest = 0.0 if large.startswith("only") else 1e-4
    p = np.where(mask == large.endswith("sent"), 1e3, rest).astype(np.float32)
    g = p[::-1, ::-1].copy()
    settings = {"b3": 0.5, "c_max": 1e9, "form": form}
    naive = NaiveSlamb(
        [p], 1, lr=0.5, b1=0.9, b2=0.999, eps=1e-6, c_min=0.01, weight_decay=0.0,
        decays=[True], sync_every=None, bias_correction=True, **settings,
    )  # fmt: skip
    naive.step([g[None]], [mask])
    tx = slamb_jax.slamb(0.5, plain(selection=selection), **settings)
    updates, _ = jax.jit(tx.update)(jnp.asarray(g), tx.init(p), jnp.asarray(p))
    # Entry by entry: 1 - 0.999 in float32 is 6e-5 off.
    np.testing.assert_allclose(updates, naive.p[0][0] - p, rtol=2e-4, atol=1e-7)


@pytest.mark.parametrize("form", ["sum", "product"])
def test_slamb_is_the_flat_chain(form):
    """Which computes the direction once, and keeps it."""
    between = exchange(sync_every=2)
    settings = {"b3": 0.7, "form": form, "weight_decay": 0.1}
    rate = optax.linear_schedule(0.1, 0.0, 10)
    params, *grads = (
        random_tree({"w": (12, 16)}, t, *(3,) * (t > 0)) for t in range(6)
    )
    runs = []
    for make in (slamb_jax.slamb, flat_chain):
        with jax.numpy_dtype_promotion("standard"):  # optax's schedules need it
            history = train(make(rate, between, **settings), params, grads, "vmap")
        runs.append([(p, state[0].mu, state[0].nu) for p, state in history])
    assert_close(*runs)


LAYER = {"kernel": (10, 24), "bias": (24,), "scale": (), "small": (4, 5)}


def apart_and_stacked(make, *lead):
    """The same arrays as a tree of three layers, and as a stack of each leaf."""
    layers = [{k: make(*lead, *s) for k, s in LAYER.items()} for _ in range(3)]
    for i, layer in enumerate(layers):  # so that their ratios differ
        layer["kernel"] = layer["kernel"] * layer["kernel"].dtype.type(3**i)
    stacks = {k: np.stack([x[k] for x in layers], len(lead)) for k in LAYER}
    embed = make(*lead, 12, 10)
    return {"embed": embed, "layers": layers}, {"embed": embed, "layers": stacks}


@pytest.mark.parametrize(
    ("form", "dense", "stacked"),
    [
        ("sum", False, {"embed": False, "layers": True}),
        ("product", True, lambda params: {k: k == "layers" for k in params}),
    ],
)
def test_a_stack_follows_its_layers(form, dense, stacked):
    rng = np.random.default_rng(0)

    def normal(*shape):
        return np.asarray(rng.normal(size=shape), np.float32)

    def mask(*shape):  # vectors are dense
        return np.asarray(rng.random(shape) < 0.3) | (len(shape) < 3)

    masks, params = apart_and_stacked(mask, STEPS), apart_and_stacked(normal)
    grads = [apart_and_stacked(normal, 4) for _ in range(STEPS)]
    ends = []
    for i in range(2):
        flat = [x.reshape(STEPS, -1) for x in jax.tree.leaves(masks[i])]
        selection = Strided(1.0) if dense else Replay(flat)
        stacks = stacked if i else None
        between = plain(AXIS, selection=selection, stacked=stacks, sync_every=None)
        tx = slamb_jax.slamb(0.1, between, form=form, weight_decay=0.1)
        history = train(tx, params[i], [g[i] for g in grads], "shard_map")
        ends.append(history[-1][0])
    for k in LAYER:
        want = np.stack([layer[k] for layer in ends[0]["layers"]], 1)
        assert_close(ends[1]["layers"][k], want)
    assert_close(ends[1]["embed"], ends[0]["embed"])


def test_the_program_does_not_grow_with_the_layers():
    def instructions(layers):
        p = {"w": jnp.ones((layers, 16, 256)), "b": jnp.ones((layers, 256))}
        tx = slamb_jax.slamb(0.1, plain(stacked=True, min_size=0))
        lowered = jax.jit(tx.update).lower(p, jax.eval_shape(tx.init, p), p)
        return compile_optimized(lowered).as_text().count(" = ")

    assert instructions(24) <= 1.1 * instructions(3)
