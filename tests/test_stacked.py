"""Scanned stacks of layers: the numbers of the same model with its layers apart."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slamb_jax
from slamb_jax.selections import Bernoulli, Leaf, Permutation, Strided, replay_masks
from tests.close import assert_close
from tests.compiled import compile_optimized
from tests.forms import FORMS
from tests.masks import of_elements
from tests.optimizers import plain
from tests.workers import AXIS, train

LAYERS, N = 3, 4
LAYER = {"kernel": (10, 24), "bias": (24,), "scale": (), "small": (4, 5)}
STEPS = 5
STACKED = {"embed": False, "layers": True}


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
    stacks = {k: np.stack([x[k] for x in layers], len(lead)) for k in LAYER}
    return {"embed": embed, "layers": layers}, {"embed": embed, "layers": stacks}


def masks(seed):
    """Recorded masks for both trees, of kernels and the embedding; the rest dense."""
    rng = np.random.default_rng(seed)
    chosen = [
        {k: np.ones((STEPS, *s), bool) for k, s in LAYER.items()} for _ in range(LAYERS)
    ]
    for layer in chosen:
        layer["kernel"] = rng.random((STEPS, *LAYER["kernel"])) < 0.3
    embed = rng.random((STEPS, 12, 10)) < 0.3
    stacks = {k: np.stack([x[k] for x in chosen], 1) for k in LAYER}
    return [
        replay_masks([x.reshape(STEPS, -1) for x in jax.tree.leaves(tree)])
        for tree in (
            {"embed": embed, "layers": chosen},
            {"embed": embed, "layers": stacks},
        )
    ]


@pytest.mark.parametrize(
    ("make", "form", "dense"),
    [
        ("fused", "sum", False),
        ("fused", "product", True),
        pytest.param("chain", "product", False, marks=pytest.mark.long),
        pytest.param("chain", "sum", True, marks=pytest.mark.long),
    ],
)
def test_a_stack_follows_its_layers(make, form, dense):
    apart, stacks = apart_and_stacked(0)
    pairs = [apart_and_stacked(t, N) for t in range(1, STEPS + 1)]
    selections = [Strided(1.0)] * 2 if dense else masks(9)
    ends = []
    for i, (params, stacked) in enumerate(((apart, None), (stacks, STACKED))):
        exchange = plain(
            AXIS, selection=selections[i], stacked=stacked, sync_every=None
        )
        tx = FORMS[make](0.1, exchange, form=form, weight_decay=0.1)
        grads = [pair[i] for pair in pairs]
        ends.append(train(tx, params, grads, "shard_map")[-1][0])
    for k in LAYER:
        want = np.stack([layer[k] for layer in ends[0]["layers"]], 1)
        assert_close(ends[1]["layers"][k], want)
    assert_close(ends[1]["embed"], ends[0]["embed"])


@pytest.mark.parametrize("kind", [Strided, Permutation, Bernoulli])
def test_parts_have_ratios_of_their_own_layers(kind):
    """With packed blocks of any kind, against norms taken from the mask."""
    rng = np.random.default_rng(0)
    scale = np.array([1.0, 10.0, 100.0], np.float32)[:, None, None]
    p = jnp.asarray(rng.normal(size=(3, 16, 40)).astype(np.float32) * scale)
    u = jnp.asarray(rng.normal(size=(3, 16, 40)).astype(np.float32))
    selection, leaf = kind(0.25, 0), Leaf(0, p.shape, stacked=True)
    tx = slamb_jax.layerwise_trust_ratio(
        plain(selection=selection, stacked=True, b3=0.5), form="product",
        c_min=0.0, c_max=np.inf,
    )  # fmt: skip
    state, update = tx.init(p), jax.jit(tx.update)
    for _ in range(3):
        got, state = update(u, state, p)
    age = np.asarray(jax.jit(lambda t: selection.age(t, leaf))(jnp.int32(3)))
    age = np.repeat(age, selection.block_size(leaf)).reshape(p.shape)
    sent = of_elements(age.reshape(-1, 1), p.shape)
    want = []
    for i in range(3):
        high, low = (
            np.linalg.norm(p[i][part]) / np.linalg.norm(u[i][part])
            for part in (sent[i], ~sent[i])
        )
        r = 0.5 ** age[i].astype(float)
        want.append((r * high + (1 - r) * low) * np.asarray(u[i]))
    assert_close(list(got), want)


def test_a_function_says_which_are_stacks():
    _, stacks = apart_and_stacked(0)
    ends = []
    for stacked in (STACKED, lambda params: {k: k == "layers" for k in params}):
        tx = slamb_jax.slamb(0.1, plain(stacked=stacked, min_size=50))
        updates, _ = jax.jit(tx.update)(stacks, tx.init(stacks), stacks)
        ends.append(updates)
    jax.tree.map(np.testing.assert_array_equal, *ends)


def test_the_program_does_not_grow_with_the_layers():
    def instructions(layers):
        p = {"w": jnp.ones((layers, 16, 256)), "b": jnp.ones((layers, 256))}
        tx = slamb_jax.slamb(0.1, plain(stacked=True, min_size=0))
        lowered = jax.jit(tx.update).lower(p, jax.eval_shape(tx.init, p), p)
        return compile_optimized(lowered).as_text().count(" = ")

    assert instructions(24) <= 1.1 * instructions(3)
