"""Step benchmark: kernels counted, turns that are two steps, shapes of real models."""

import math
import shutil
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slamb_jax
from benchmarks import race, step
from benchmarks.checkouts import package
from benchmarks.kernels import kernels
from benchmarks.shapes import MODELS
from tests.close import assert_close
from tests.optimizers import standard_promotion

SHAPES = {"w": (40, 300), "b": (300,)}


def test_kernels_are_counted_outside_fusions_and_inside_branches() -> None:
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


@pytest.mark.parametrize("name", step.OPTIMIZERS | step.CHAIN)
def test_a_turn_is_two_steps_of_the_optimizer(name: str) -> None:
    """All take turns on the same arrays; here each alone, against its own steps."""
    make = (step.OPTIMIZERS | step.CHAIN)[name]
    rng = np.random.default_rng(0)
    params, grads = race.draw(SHAPES, rng, 0.02), race.draw(SHAPES, rng, 1.0)
    with standard_promotion():  # optax.lamb needs it
        contestant = race.Contestant(make(), SHAPES)
        want, state = params, make().init(params)
        for _ in range(4):
            updates, state = jax.jit(make().update)(grads, state, want)
            want = optax.apply_updates(want, updates)
    leaves = [x + 0 for x in jax.tree.leaves(params)]  # they are donated
    arrays = [*leaves, *(jnp.zeros_like(x) for x in [*leaves, *leaves])]
    for _ in range(2):
        arrays = contestant.take_turn(arrays, grads)
    assert len(contestant.times) == 2
    assert contestant.kernels > 0
    assert_close(dict(zip("bw", arrays, strict=False)), want)


def test_shapes_are_those_of_the_models() -> None:
    sizes = {"swin-b": 87.8, "bert-base": 108.9, "bert-base-scanned": 108.9}
    for name, millions in sizes.items():
        assert round(sum(map(math.prod, MODELS[name].values())) / 1e6, 1) == millions


def test_another_checkout_is_beside_this_one(tmp_path: Path) -> None:
    shutil.copytree(Path(slamb_jax.__file__).parent, tmp_path / "slamb_jax")
    ours, before = slamb_jax.links.scale_by_slamb, package(tmp_path)
    assert Path(before.__file__ or "").parents[1] == tmp_path
    assert before.Exchange is not slamb_jax.Exchange
    makes, others = step.alone(), step.alone(before)
    assert makes.keys() == others.keys()
    params = {"w": jnp.ones(8)}
    for mine, other in zip(makes.values(), others.values(), strict=True):
        assert_close(mine().init(params), other().init(params))
    assert sys.modules["slamb_jax"] is slamb_jax
    assert sys.modules[ours.__module__].scale_by_slamb is ours


def test_a_directory_that_is_no_checkout_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no checkout"):
        package(tmp_path)
