"""The parts of the benchmark of the step."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks import step
from benchmarks.kernels import kernels
from benchmarks.shapes import MODELS

SHAPES = {"w": (40, 300), "b": (300,)}


def test_kernels_are_counted_outside_fusions_and_inside_branches():
    hlo = """HloModule m

%fused (a: f32[4]) -> f32[4] {
  %a = f32[4]{0} parameter(0)
  ROOT %s = f32[4]{0} sine(%a)
}

%branch (b: (f32[4])) -> f32[4] {
  %b = (f32[4]{0}) parameter(0)
  %x = f32[4]{0} get-tuple-element(%b), index=0
  ROOT %f = f32[4]{0} fusion(%x), kind=kLoop, calls=%fused
}

ENTRY %main (p: pred[], x: f32[4]) -> f32[4] {
  %p = pred[] parameter(0)
  %x = f32[4]{0} parameter(1)
  %c = f32[4]{0:T(128)} copy(%x)
  %t = (f32[4]{0}) tuple(%c)
  ROOT %r = f32[4]{0} conditional(%p, %t, %t), branch_computations={%branch, %branch}
}
"""
    assert kernels(hlo) == 2  # the copy, and the fusion in the branch
    compiled = jax.jit(lambda x: jnp.sin(x) * 2).lower(jnp.ones(8)).compile()
    assert kernels(compiled.as_text()) == 1


@pytest.mark.parametrize("name", ["optax.lamb", "slamb", "slamb, bfloat16 momentum"])
def test_optimizers_take_turns_on_the_same_arrays(name):
    """Two turns are two steps of the optimizer."""
    make = step.OPTIMIZERS[name]
    rng = np.random.default_rng(0)
    params, grads = step.draw(SHAPES, rng, 0.02), step.draw(SHAPES, rng, 1.0)
    with jax.numpy_dtype_promotion("standard"):  # optax.lamb needs it
        contestant = step.compile_step(make(), SHAPES)
        want, state = params, make().init(params)
        for _ in range(2):
            updates, state = make().update(grads, state, want)
            want = optax.apply_updates(want, updates)
    leaves = [x + 0 for x in jax.tree.leaves(params)]  # they are donated
    arrays = [*leaves, *(jnp.zeros_like(x) for x in [*leaves, *leaves])]
    for _ in range(2):
        arrays = step.take_turn(contestant, arrays, grads)
    assert len(contestant.times) == 2
    for got, x in zip(arrays[:2], jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(got, x, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "millions"),
    [("swin-b", 87.8), ("bert-base", 108.9), ("bert-large", 334.1)],
)
def test_shapes_are_those_of_the_models(name, millions):
    total = sum(map(math.prod, MODELS[name].values()))
    assert round(total / 1e6, 1) == millions


def test_scanned_layers_are_the_same_parameters():
    flat, stacked = MODELS["bert-base"], MODELS["bert-base-scanned"]
    assert len(stacked) < 30 < len(flat)
    assert len({sum(map(math.prod, s.values())) for s in (flat, stacked)}) == 1
