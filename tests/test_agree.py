"""Replicas that should be the same, and checks that see when they are not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import slamb_jax
from slamb_jax.workers import agreement as _agree
from tests.workers import AXIS, mesh_of, over_workers, random_tree, stack, train

N = 4
SHAPES = {"w": (40, 50), "b": (7,), "scale": (), "empty": (0, 3)}


def spread(tree):
    split = jax.sharding.NamedSharding(mesh_of(N), jax.sharding.PartitionSpec(AXIS))
    return jax.device_put(tree, split)


@pytest.mark.parametrize("place", [spread, lambda tree: tree])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "bool"])
def test_a_single_bit_is_seen(dtype, place):
    cast = functools.partial(jax.tree.map, lambda x: (10 * x).astype(dtype))
    tree = stack(cast(random_tree(SHAPES, 0)), N)
    slamb_jax.assert_replicas_agree(place(tree))
    bits = np.array(tree["w"])
    words = bits.view(np.uint8).reshape(N, 40, 50, -1)
    words[2, 17, 3, 0] ^= 1
    with pytest.raises(
        AssertionError, match=r"differ in 1 of 4 leaves: \['w'\] \(of 1 from the first"
    ):
        slamb_jax.assert_replicas_agree(place(tree | {"w": jnp.asarray(bits)}))


def test_elements_that_change_places_are_seen():
    w = jnp.arange(6.0).reshape(1, 6)
    with pytest.raises(AssertionError, match="the tree"):
        slamb_jax.assert_replicas_agree(jnp.concatenate([w, w[:, ::-1]]))


def test_keys_and_nans():
    keys = stack(jax.random.key(0), N)
    slamb_jax.assert_replicas_agree({"key": keys, "nan": jnp.full((N, 2), jnp.nan)})
    with pytest.raises(AssertionError, match=r"\['key'\] \(of 3"):
        slamb_jax.assert_replicas_agree({"key": jax.random.split(keys[0], N)})
    with pytest.raises(AssertionError, match=r"\['nan'\] \(of 4"):
        slamb_jax.assert_replicas_agree({"nan": jnp.full((N, 2), jnp.nan)}, rtol=0.1)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", ["all", "one"])
def test_the_tolerance_is_that_of_the_norm(seed, kind):
    w = np.asarray(random_tree({"w": (60, 70)}, seed)["w"])
    off = np.random.default_rng(seed).normal(size=w.shape)
    if kind == "one":
        off = np.zeros_like(w)
        off[seed, 3] = 1.0
    off *= np.linalg.norm(w) / np.linalg.norm(off)
    for size in (1e-4, 1e-2):
        tree = {"w": jnp.asarray(np.stack([w, w, w + size * off]), jnp.float32)}
        slamb_jax.assert_replicas_agree(tree, rtol=2 * size)
        with pytest.raises(AssertionError, match=r"\['w'\] \(of 1"):
            slamb_jax.assert_replicas_agree(tree, rtol=size / 2)


@pytest.mark.parametrize("mapping", ["vmap", "shard_map"])
def test_exact_after_the_average_and_to_rounding_after_the_link(mapping):
    tx = slamb_jax.slamb(0.1, axis_name=AXIS, min_size=20, sync_every=3)
    grads = [random_tree(SHAPES, 1 + t, N) for t in range(4)]
    history = train(tx, random_tree(SHAPES, 0), grads, mapping)
    for t, (params, state) in enumerate(history, 1):
        slamb_jax.assert_replicas_agree([state[i].count for i in (0, 1, 2, -1)])
        if t in (1, 4):
            slamb_jax.assert_replicas_agree(params, rtol=1e-5)
        else:
            with pytest.raises(AssertionError, match=r"\['w'\]"):
                slamb_jax.assert_replicas_agree(params, rtol=1e-3)
    with pytest.raises(AssertionError, match=r"\['w'\]"):  # only to rounding
        slamb_jax.assert_replicas_agree(history[3][0])
    average = functools.partial(slamb_jax.average_parameters, axis_name=AXIS)
    mean = over_workers(average, mapping, N)(history[2][0])
    slamb_jax.assert_replicas_agree(mean)


def test_little_is_gathered():
    tree = spread(stack(random_tree({"w": (200, 300), "b": (300,)}, 0), N))
    leaves = jax.tree.leaves(tree)
    everywhere = jax.sharding.NamedSharding(mesh_of(N), jax.sharding.PartitionSpec())
    for fun, most in ((_agree._checksum_all, 16), (_agree._sketch_all, 136)):
        lowered = jax.jit(fun, out_shardings=everywhere).lower(leaves)
        (gather,) = slamb_jax.wire_report(lowered).collectives
        assert gather.kind == "all-gather"
        assert gather.payload_bytes == most  # of 240 kB


def test_wrong_trees():
    with pytest.raises(ValueError, match=r"rtol must be in .*-1"):
        slamb_jax.assert_replicas_agree({"w": jnp.ones((2, 3))}, rtol=-1.0)
    with pytest.raises(ValueError, match=r"tree\['b'\] must have a leading axis"):
        slamb_jax.assert_replicas_agree({"w": jnp.ones((2, 3)), "b": jnp.ones(3)})
