"""The same numbers under every mapping, and the same bits of the same seed."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slamb_jax
from tests.close import assert_close, assert_same_bits
from tests.optimizers import exchange, random_tree, slamb
from tests.workers import AXIS, MAPPINGS, P, mesh_of, train

SHAPES = {"w": (12, 16), "b": (16,), "odd": (7, 11), "empty": (0, 3), "scale": ()}
N, STEPS = 4, 4
CODES = slamb_jax.payloads.StochasticUniform(8, block_size=32, error_feedback=True)


PLAIN = slamb(b3=0.9)
INJECT = optax.inject_hyperparams(slamb_jax.slamb, static_args="exchange")
MASK = {name: name != "b" for name in SHAPES}
RATE = optax.linear_schedule(0.02, 0.01, 4)
TABLE = {  # each once under another mapping than the simulator's
    "plain": (PLAIN, MAPPINGS[1:]),
    "product, 16 bits": (slamb(form="product", mu_dtype="bfloat16"), ["pmap"]),
    "injected": (optax.masked(INJECT(RATE, exchange()), MASK), ["shard_map"]),
    "permutation": (slamb(selection="permutation"), ["shard_map"]),
    "bernoulli": (slamb(selection="bernoulli", form="product"), ["shard_map"]),
    "schedule": (slamb(compress_ratio={0: 1.0, 1: 0.5, 3: 0.1}), MAPPINGS[1:]),
    "codes": (slamb(payload=CODES, average_payload=CODES), MAPPINGS[1:]),
    "bfloat16": (slamb(payload="bfloat16", average_payload="bfloat16"), ["shard_map"]),
    "overlap": (slamb(overlap=True), ["shard_map"]),
    "rolling": (
        slamb_jax.adamw(
            0.02,
            exchange(rolling=True, payload="uniform4", average_payload="ternary"),
        ),
        MAPPINGS[1:],
    ),
    "outer": (
        slamb_jax.adamw(
            0.02, exchange(compress_ratio=0, outer=optax.sgd(0.7, momentum=0.9))
        ),
        ["shard_map"],
    ),
    "muon": (slamb_jax.muon(0.02, exchange(rolling=True)), ["shard_map", "pmap"]),
    "residual": (
        slamb_jax.randk_compress_with_error_feedback(exchange()),
        ["shard_map"],
    ),
}
QUICK = set(list(TABLE)[:3]) | {"codes", "rolling"}  # the others in CI
ROUNDED = {"product, 16 bits", "codes", "bfloat16", "rolling"}


def gradients(steps=STEPS):
    return [random_tree(SHAPES, 1 + t, N) for t in range(steps)]


@pytest.mark.parametrize(
    ("name", "mapping"),
    [
        pytest.param(name, m, marks=() if name in QUICK else pytest.mark.long)
        for name, (_, on) in TABLE.items()
        for m in on
    ],
)
def test_every_mapping_gives_the_same_numbers(name, mapping):
    tx, _ = TABLE[name]
    with jax.numpy_dtype_promotion("standard"):  # optax's schedules need it
        got, want = (
            train(tx, random_tree(SHAPES, 0), gradients(), m) for m in (mapping, "vmap")
        )
    if name not in ROUNDED:
        # Newton-Schulz multiplies the rounding of small directions by up to 3.4**5.
        assert_close(got, want, units=4096 if name == "muon" else 64)
        return
    off = total = 0
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        # A last bit may tip a rounding: few entries, and by a step of its grid.
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        np.testing.assert_allclose(a, b, rtol=0, atol=0.05)
        off += (np.abs(a - b) > 64 * 2.0**-23 * np.abs(b).max(initial=0)).sum()
        total += a.size
    assert off <= 0.01 * total


def test_the_same_seed_gives_the_same_bits():
    for tx in (PLAIN, TABLE["codes"][0], TABLE["bernoulli"][0]):
        runs = [train(tx, random_tree(SHAPES, 0), gradients(), "vmap") for _ in "ab"]
        assert_same_bits(*runs)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bit_parameters_follow_the_float32_run(dtype):
    def narrow(tree):
        return jax.tree.map(lambda x: x.astype(dtype), tree)

    got = train(PLAIN, narrow(random_tree(SHAPES, 0)), narrow(gradients()), "shard_map")
    want = train(PLAIN, random_tree(SHAPES, 0), gradients(), "vmap")
    for (p, _), (q, _) in zip(got, want, strict=True):
        assert {x.dtype.name for x in p.values()} == {dtype}
        # Per step, a rounding of the parameters, one of the gradients; in ratios, both.
        assert_close(p, q, units=4 * STEPS)


@pytest.mark.parametrize("mapping", ["shard_map", "shard_map_unchecked"])
def test_two_axes_are_one_group_of_workers(mapping):
    axes = ("node", "device")
    tx = slamb(axis_name=axes, b3=0.9)
    got = train(tx, random_tree(SHAPES, 0), gradients(), mapping, axes)
    want = train(PLAIN, random_tree(SHAPES, 0), gradients(), "vmap")
    assert_close(got, want)


def test_without_an_axis_it_is_the_run_of_one_worker():
    alone = slamb(axis_name=None, b3=0.9)
    grads = [random_tree(SHAPES, t, 1) for t in range(STEPS)]
    got = train(alone, random_tree(SHAPES, 0), grads, "vmap")
    want = train(PLAIN, random_tree(SHAPES, 0), grads, "shard_map")
    assert_close(got, want)


def test_replicated_parameters_that_were_cast_are_taken():
    tx = slamb()

    def step(params, x):
        own = jax.tree.map(
            lambda p: p + 0.0 * jax.lax.axis_index(AXIS).astype(p.dtype), params
        )
        grads = jax.grad(lambda p: jnp.sum((x @ p["w"]) ** 2))(own)
        updates, _ = tx.update(grads, tx.init(own), own)
        return optax.apply_updates(own, updates)

    run = jax.shard_map(
        step, mesh=mesh_of(4), in_specs=(P(), P(AXIS)), out_specs=P(AXIS)
    )
    jax.eval_shape(run, {"w": jnp.ones((3, 2))}, jnp.ones((8, 3)))
