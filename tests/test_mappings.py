"""The same bits of the same seed; one worker or axis, two, narrow parameters.

That every mapping gives the same numbers is in the campaign.
"""

import jax
import jax.numpy as jnp
import optax
import pytest

import slamb_jax
from slamb_jax.selections import Strided
from tests.close import assert_close, assert_same_bits
from tests.optimizers import random_tree
from tests.workers import AXIS, P, mesh_of, train

SHAPES = {"w": (12, 16), "b": (16,), "odd": (7, 11), "empty": (0, 3), "scale": ()}
STEPS = 4


def slamb(axis_name=AXIS, make=slamb_jax.slamb, rate=0.01):
    selection = Strided(0.1, min_size=20)
    exchange = slamb_jax.Exchange(
        axis_name, payload=None, selection=selection, sync_every=3
    )
    return make(rate, exchange=exchange, b3=0.9)


SLAMB = slamb()


def run(tx, mapping="vmap", n=4, dtype="float32", axis=AXIS):
    narrow = lambda tree: jax.tree.map(lambda x: x.astype(dtype), tree)  # noqa: E731
    grads = [random_tree(SHAPES, 1 + t, n) for t in range(STEPS)]
    return train(tx, narrow(random_tree(SHAPES, 0)), narrow(grads), mapping, axis)


def test_the_same_seed_gives_the_same_bits():
    random = slamb_jax.Exchange(AXIS, payload="uniform4")
    for tx in (SLAMB, slamb_jax.adamw(0.02, random, nu_dtype="bfloat16")):
        assert_same_bits(run(tx), run(tx))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bit_parameters_follow_the_float32_run(dtype):
    got = run(SLAMB, "shard_map", dtype=dtype)
    for (p, _), (q, _) in zip(got, run(SLAMB), strict=True):
        assert {x.dtype.name for x in p.values()} == {dtype}
        # Per step, a rounding of the parameters, one of the gradients; in ratios, both.
        assert_close(p, q, units=4 * STEPS)


@pytest.mark.parametrize("mapping", ["shard_map", "shard_map_unchecked"])
def test_two_axes_are_one_group_of_workers(mapping):
    axes = ("node", "device")
    assert_close(run(slamb(axes), mapping, axis=axes), run(SLAMB))


def test_without_an_axis_it_is_the_run_of_one_worker():
    assert_close(run(slamb(None), n=1), run(SLAMB, "shard_map", n=1))


def test_injected_and_masked_it_is_the_same_under_another_mapping():
    make = optax.inject_hyperparams(slamb_jax.slamb, static_args="exchange")
    injected = slamb(make=make, rate=optax.linear_schedule(0.02, 0.01, 4))
    tx = optax.masked(injected, {name: name != "b" for name in SHAPES})
    with jax.numpy_dtype_promotion("standard"):  # optax's schedules need it
        assert_close(run(tx, "shard_map"), run(tx))


def test_replicated_parameters_that_were_cast_are_taken():
    def step(params, x):
        own = jax.tree.map(
            lambda p: p + 0.0 * jax.lax.axis_index(AXIS).astype(p.dtype), params
        )
        grads = jax.grad(lambda p: jnp.sum((x @ p["w"]) ** 2))(own)
        updates, _ = SLAMB.update(grads, SLAMB.init(own), own)
        return optax.apply_updates(own, updates)

    split = jax.shard_map(
        step, mesh=mesh_of(4), in_specs=(P(), P(AXIS)), out_specs=P(AXIS)
    )
    jax.eval_shape(split, {"w": jnp.ones((3, 2))}, jnp.ones((8, 3)))
