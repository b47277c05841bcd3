"""Compression that is warmed up: one program, a branch for each ratio."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slamb_jax
from slamb_jax import Piecewise, Strided
from tests.workers import AXIS, MAPPINGS, random_tree, stack, stepper, train

SHAPES = {"w": (40, 300), "odd": (21, 31), "bias": (300,)}
RATIOS = {0: 1.0, 2: 0.5, 4: 0.1}
N = 4


def warmed_up(**settings):
    settings = {"min_size": 100, "sync_every": None, "b3": 0.7} | settings
    return slamb_jax.slamb(0.01, axis_name=AXIS, **settings)


def gradients(steps):
    return [random_tree(SHAPES, 1 + t, N) for t in range(steps)]


def test_before_the_first_change_it_is_the_first_ratio():
    grads = gradients(4)
    got = train(warmed_up(compress_ratio={0: 0.5, 3: 0.1}), random_tree(SHAPES, 0),
                grads, "vmap")  # fmt: skip
    want = train(warmed_up(compress_ratio=0.5), random_tree(SHAPES, 0), grads, "vmap")
    for t in range(3):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-8),
            got[t][0], want[t][0],
        )  # fmt: skip
    assert not np.allclose(got[3][0]["w"], want[3][0]["w"], rtol=1e-6)


@pytest.mark.parametrize("mapping", MAPPINGS[1:])
def test_every_mapping_gives_the_same_numbers(mapping):
    tx, grads = warmed_up(compress_ratio=RATIOS), gradients(6)
    got = train(tx, random_tree(SHAPES, 0), grads, mapping)
    want = train(tx, random_tree(SHAPES, 0), grads, "vmap")
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("mapping", ["shard_map", "shard_map_unchecked"])
def test_one_program_has_an_exchange_for_each_ratio(mapping):
    tx = warmed_up(compress_ratio=RATIOS)
    params = random_tree(SHAPES, 0)
    state, step = stack(tx.init(params), N), stepper(tx, mapping, N)
    stacked = stack(params, N)
    report = slamb_jax.wire_report(step.lower(stacked, state, stacked))
    assert {c.conditional for c in report.collectives} == {True}
    leaves = [slamb_jax.Leaf(i, 0, s, 0) for i, s in enumerate(sorted(SHAPES.values()))]
    want = []
    for ratio in RATIOS.values():
        selection = Strided(ratio, 100)
        rows = [x.size if selection.whole(x) else
                selection.rows(jnp.int32(1), x).size * selection.width(x)
                for x in leaves]  # fmt: skip
        want.append(sum(rows))
    assert sorted(c.elements for c in report.collectives) == sorted(want)


def test_no_change_recompiles():
    tx = warmed_up(compress_ratio=RATIOS)
    params = stack(random_tree(SHAPES, 0), N)
    state = stack(tx.init(random_tree(SHAPES, 0)), N)
    step = stepper(tx, "vmap", N)
    for g in gradients(6):
        params, state = step(g, state, params)
    assert step._cache_size() == 1


def test_whoever_does_not_branch_sends_enough():
    """The rows of all phases have one length; those that are not needed are marked."""
    leaf = slamb_jax.Leaf(0, 0, (40, 300), 12000)
    selection = Piecewise({0: Strided(0.5, 0), 5: Strided(0.1, 0)})
    count = leaf.size // selection.width(leaf)
    for t in (1, 5, 6, 17):
        step = jnp.int32(t)
        rows = np.asarray(selection.rows(step, leaf))
        sent = np.asarray(selection.mask(step, leaf))[:, 0]
        assert len(rows) >= count // 2
        np.testing.assert_array_equal(np.sort(rows[rows < count]), np.flatnonzero(sent))


def test_residuals_are_kept_across_a_change():
    selection = Piecewise({0: Strided(1.0, 0), 2: Strided(0.25, 0)})
    tx = slamb_jax.randk_compress_with_error_feedback(selection)
    g = random_tree({"w": (16, 24)}, 3)
    state, seen = tx.init(g), jnp.zeros((16, 24))
    for t in range(1, 8):
        u, state = tx.update(g, state)
        seen = seen + u["w"]
        np.testing.assert_allclose(seen + state.residual["w"], t * g["w"], rtol=1e-5)


@pytest.mark.parametrize(
    ("phases", "message"),
    [
        ({}, "phases .*{}"),
        ({1: Strided()}, "phases .*one of them 0"),
        (Strided(), "phases must be a mapping.*Strided"),
        ({0: Strided(), -1: Strided()}, "phases .*-1"),
        ({0: Strided(), 1.5: Strided()}, r"phases .*1\.5"),
        ({0: 0.5}, "phases .*0.5 at 0"),
        ({0: Strided}, "phases .*Strided.* at 0"),
    ],
)
def test_bad_phases(phases, message):
    with pytest.raises(ValueError, match=message):
        Piecewise(phases)


@pytest.mark.parametrize(
    ("ratios", "message"),
    [
        ({}, "compress_ratio .*{}"),
        ({5: 0.1}, "compress_ratio .*{5: 0.1}"),
        ({0: 0.5, -5: 0.1}, "compress_ratio .*-5"),
        ({0: 1.5}, "compress_ratio .*1.5"),
    ],
)
def test_bad_ratios(ratios, message):
    with pytest.raises(ValueError, match=message):
        warmed_up(compress_ratio=ratios)
