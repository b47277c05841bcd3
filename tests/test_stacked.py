"""Scanned stacks of layers: the numbers of the same model with its layers apart."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slamb_jax
from slamb_jax import Leaf, Strided
from tests.workers import AXIS, train

LAYERS, N = 3, 4
LAYER = {"kernel": (10, 24), "bias": (24,), "scale": (), "small": (4, 5)}
STEPS = 5


def apart_and_stacked(seed, *lead):
    """The same numbers as a tree of layers, and as a stack of each leaf."""
    rng = np.random.default_rng(seed)
    layers = [
        {k: rng.normal(size=(*lead, *s)).astype(np.float32) for k, s in LAYER.items()}
        for _ in range(LAYERS)
    ]
    for i, layer in enumerate(layers):  # so that their ratios differ
        layer["kernel"] *= 3.0**i
    embed = rng.normal(size=(*lead, 12, 10)).astype(np.float32)
    axis = len(lead)
    stacks = {k: np.stack([x[k] for x in layers], axis) for k in LAYER}
    apart = {"embed": embed, "layers": layers}
    return apart, {"embed": embed, "layers": stacks}


def masks(seed):
    """Recorded masks for both trees, of kernels and the embedding; the rest whole."""
    rng = np.random.default_rng(seed)
    sent = [
        {k: np.ones((STEPS, *s), bool) for k, s in LAYER.items()} for _ in range(LAYERS)
    ]
    for layer in sent:
        layer["kernel"] = rng.random((STEPS, *LAYER["kernel"])) < 0.3
    embed = rng.random((STEPS, 12, 10)) < 0.3
    stacks = {k: np.stack([x[k] for x in sent], 1) for k in LAYER}

    def joined(tree):
        leaves = [x.reshape(STEPS, -1) for x in jax.tree.leaves(tree)]
        return slamb_jax.replay_masks(np.concatenate(leaves, 1))

    trees = {"embed": embed, "layers": sent}, {"embed": embed, "layers": stacks}
    return [joined(tree) for tree in trees]


def chain(selection, stacked, form):
    """The links by hand."""
    compressor = slamb_jax.randk_compress_with_error_feedback(
        selection, axis_name=AXIS, keep_residual=False, stacked=stacked
    )
    return optax.chain(
        slamb_jax.mask_momentum(compressor, form=form),
        slamb_jax.layerwise_trust_ratio(
            selection, 0.6, axis_name=AXIS, form=form, weight_decay=0.1,
            stacked=stacked,
        ),
        slamb_jax.elementwise_rescale(selection, 0.6, axis_name=AXIS, stacked=stacked),
        optax.scale_by_learning_rate(0.1),
    )  # fmt: skip


def fused(selection, stacked, form):
    return slamb_jax.slamb(
        0.1, axis_name=AXIS, b3=0.6, weight_decay=0.1, form=form, stacked=stacked,
        selection=selection, sync_every=None,
    )  # fmt: skip


STACKED = {"embed": False, "layers": True}


@pytest.mark.parametrize(
    ("make", "form", "whole"),
    [
        (fused, "sum", False), (fused, "product", True), (chain, "product", False),
        pytest.param(fused, "sum", True, marks=pytest.mark.long),
        pytest.param(fused, "product", False, marks=pytest.mark.long),
        pytest.param(chain, "sum", False, marks=pytest.mark.long),
        pytest.param(chain, "sum", True, marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_a_stack_follows_its_layers(make, form, whole):
    apart, stacks = apart_and_stacked(0)
    pairs = [apart_and_stacked(t, N) for t in range(1, STEPS + 1)]
    selections = [Strided(1.0)] * 2 if whole else masks(9)
    ends = []
    for i, (params, stacked) in enumerate(((apart, None), (stacks, STACKED))):
        tx = make(selections[i], stacked, form)
        grads = [pair[i] for pair in pairs]
        ends.append(train(tx, params, grads, "shard_map")[-1][0])
    for k in LAYER:
        want = np.stack([layer[k] for layer in ends[0]["layers"]], 1)
        np.testing.assert_allclose(ends[1]["layers"][k], want, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(ends[1]["embed"], ends[0]["embed"], rtol=2e-5)


@pytest.mark.parametrize("selection", ["strided", "permutation", "bernoulli"])
def test_parts_have_ratios_of_their_own_layers(selection):
    """With packed rows of any kind, against norms taken from the mask."""
    rng = np.random.default_rng(0)
    scale = np.array([1.0, 10.0, 100.0], np.float32)[:, None, None]
    p = jnp.asarray(rng.normal(size=(3, 16, 40)).astype(np.float32) * scale)
    u = jnp.asarray(rng.normal(size=(3, 16, 40)).astype(np.float32))
    chosen = {
        "strided": Strided(0.25, 0), "permutation": slamb_jax.Permutation(0.25, 0),
        "bernoulli": slamb_jax.Bernoulli(0.25, 0),
    }[selection]  # fmt: skip
    tx = slamb_jax.layerwise_trust_ratio(
        chosen, 0.5, form="product", stacked=True, c_min=0.0, c_max=np.inf
    )
    state = tx.init(p)
    for _ in range(3):
        got, state = jax.jit(tx.update)(u, state, p)
    leaf = Leaf(0, 0, p.shape, p.size, stacked=True)
    age = chosen.age(jnp.int32(3), leaf)
    age = np.repeat(np.asarray(age), chosen.width(leaf)).reshape(p.shape)
    for i in range(3):
        r, sent = 0.5 ** age[i].astype(float), age[i] == 0
        high, low = (
            np.linalg.norm(p[i][part]) / np.linalg.norm(u[i][part])
            for part in (sent, ~sent)
        )
        want = (r * high + (1 - r) * low) * np.asarray(u[i])
        np.testing.assert_allclose(got[i], want, rtol=2e-5)


def test_a_layer_is_what_counts_as_small_or_as_a_bias():
    strided = Strided(0.1, min_size=100)
    kinds = {(12, 100): True, (12, 9, 9): True, (12, 10, 10): False, (12,): True}
    for shape, whole in kinds.items():
        size = int(np.prod(shape))
        assert strided.whole(Leaf(0, 0, shape, size, stacked=True)) == whole
        assert not strided.whole(Leaf(0, 0, (*shape, 20), 20 * size))
    shard = Leaf(0, 0, (12, 5, 10), 600, stacked=True, shards=2)
    assert not strided.whole(shard)  # of two, each layer has 100 elements


def test_a_function_says_which_are_stacks():
    _, stacks = apart_and_stacked(0)
    ends = []
    for stacked in (STACKED, lambda params: {k: k == "layers" for k in params}):
        tx = slamb_jax.slamb(0.1, stacked=stacked, min_size=50)
        updates, _ = jax.jit(tx.update)(stacks, tx.init(stacks), stacks)
        ends.append(updates)
    jax.tree.map(np.testing.assert_array_equal, *ends)


def test_the_program_does_not_grow_with_the_layers():
    def instructions(layers):
        p = {"w": jnp.ones((layers, 16, 256)), "b": jnp.ones((layers, 256))}
        tx = slamb_jax.slamb(0.1, stacked=True, min_size=0)
        text = jax.jit(tx.update).lower(p, tx.init(p), p).compile().as_text()
        return text.count(" = ")

    assert instructions(24) <= 1.1 * instructions(3)
