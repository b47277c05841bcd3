"""Replicas that should be the same, and checks that see when they are not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import slamb_jax
from slamb_jax.workers import agreement
from slamb_jax.workers import mesh as meshes
from tests.optimizers import random_tree, step_on_gradients
from tests.shards import mesh_4x2
from tests.workers import AXIS, P, mesh_of, over_workers, stack, train

N = 4
SHAPES = {"w": (40, 50), "b": (7,), "scale": (), "empty": (0, 3)}


def spread(tree):
    return jax.device_put(tree, NamedSharding(mesh_of(N), P(AXIS)))


@pytest.mark.parametrize("place", [spread, lambda tree: tree])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "bool"])
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


def on_two_devices_each(replicas, spec, parted=None):
    """Replicas on a mesh of (workers, 2); one device's copy may differ in one bit."""
    there = NamedSharding(mesh_4x2(), spec)
    shards = []
    for k, (device, index) in enumerate(
        there.addressable_devices_indices_map(replicas.shape).items()
    ):
        own = np.array(replicas[index])
        if k == parted:
            own.reshape(-1).view(np.uint8)[0] ^= 1
        shards.append(jax.device_put(own, device))
    return jax.make_array_from_single_device_arrays(replicas.shape, there, shards)


@pytest.mark.parametrize("rtol", [0.0, 1e-2])
def test_every_devices_copy_is_looked_at(rtol):
    w = np.random.default_rng(0).normal(size=(1, 6, 8)).astype(np.float32)
    make = functools.partial(on_two_devices_each, np.repeat(w, N, 0))
    sharded = make(P(AXIS, None, "model"))
    slamb_jax.assert_replicas_agree({"a": sharded, "b": make(P(AXIS))}, rtol)
    with pytest.raises(
        AssertionError, match=r"different copies .*\['b'\] \(of replica 2"
    ):
        slamb_jax.assert_replicas_agree({"a": sharded, "b": make(P(AXIS), 5)}, rtol)
    with pytest.raises(AssertionError, match=r"\['a'\] \(of 1 from the first\)"):
        slamb_jax.assert_replicas_agree({"a": make(P(AXIS, None, "model"), 5)})
    one = make(P(), 5)  # all replicas on every device
    with pytest.raises(AssertionError, match=r"the tree \(of replica 0"):
        slamb_jax.assert_replicas_agree(one, rtol)


def test_elements_that_change_places_are_seen():
    w = jnp.arange(6.0).reshape(1, 6)
    with pytest.raises(AssertionError, match="the tree"):
        slamb_jax.assert_replicas_agree(jnp.concatenate([w, w[:, ::-1]]))


def test_keys_and_nans():
    keys = stack(jax.random.key(0), N)
    nan = {"nan": jnp.full((N, 2), jnp.nan)}
    slamb_jax.assert_replicas_agree({"key": keys} | nan)
    with pytest.raises(AssertionError, match=r"\['key'\] \(of 3"):
        slamb_jax.assert_replicas_agree({"key": jax.random.split(keys[0], N)})
    with pytest.raises(AssertionError, match=r"\['nan'\] \(of 4"):
        slamb_jax.assert_replicas_agree(nan, rtol=0.1)


@pytest.mark.parametrize("kind", ["all", "one"])
@pytest.mark.parametrize("place", [spread, lambda tree: tree])
def test_the_tolerance_is_that_of_the_norm(kind, place):
    w = np.asarray(random_tree({"w": (60, 70)}, 0)["w"])
    off = np.random.default_rng(1).normal(size=w.shape)
    if kind == "one":
        off = np.zeros_like(w)
        off[2, 3] = 1.0
    off *= np.linalg.norm(w) / np.linalg.norm(off)
    for size in (1e-4, 1e-2):
        near = np.stack([w, w, w + size * off, w])
        tree = place({"w": jnp.asarray(near, jnp.float32)})
        slamb_jax.assert_replicas_agree(tree, rtol=1.01 * size)
        with pytest.raises(AssertionError, match=r"\['w'\] \(of 1"):
            slamb_jax.assert_replicas_agree(tree, rtol=0.99 * size)


@pytest.mark.parametrize("mapping", ["vmap", "shard_map"])
def test_exact_after_the_average_and_to_rounding_after_the_link(mapping):
    tx = slamb_jax.slamb(0.1, slamb_jax.Exchange.paper(AXIS, sync_every=3))
    grads = [random_tree(SHAPES, 1 + t, N) for t in range(4)]
    history = train(tx, random_tree(SHAPES, 0), grads, mapping)
    for t, (params, state) in enumerate(history, 1):
        counts = [x for x in jax.tree.leaves(state) if x.dtype == np.int32]
        slamb_jax.assert_replicas_agree(counts)
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


def test_only_checksums_are_communicated():
    tree = spread(stack(random_tree({"w": (200, 300), "b": (300,)}, 0), N))
    everywhere = NamedSharding(mesh_of(N), P())
    checksums = meshes.of_each(agreement._checksum)
    compute = jax.jit(checksums, out_shardings=everywhere)
    report = slamb_jax.wire_report(compute.lower(jax.tree.leaves(tree)))
    (gather,) = report.collectives
    assert gather.kind == "all-gather"
    assert gather.payload_bytes == 16  # of 240 kB


def momenta(grads):
    exact = slamb_jax.Exchange(AXIS, payload=None)
    tx = slamb_jax.sgd(0.1, exact, momentum=0.9)
    return train(tx, jax.tree.map(lambda g: g[0], grads), [grads], "vmap")[-1]


@pytest.mark.parametrize("place", [spread, lambda tree: tree])
def test_momenta_that_oppose_each_other_are_told_from_those_that_do_not(place):
    noise = random_tree(SHAPES, 1, N)
    alike = jax.tree.map(lambda x: np.stack([x[0]] * N), noise)
    opposed = jax.tree.map(lambda x: x - x.mean(0, keepdims=True), noise)
    for grads, low, high in ((alike, 2, 2), (noise, 0.9, 1.1), (opposed, 0, 0)):
        found = slamb_jax.momentum_agreement(place(momenta(grads)))
        assert len(found) == 3  # a leaf without elements has no momentum
        (of_matrix,) = (x for name, x in found.items() if name.endswith("['w']"))
        assert low - 1e-3 <= of_matrix <= high + 1e-3, found
    with pytest.raises(ValueError, match="state must hold a momentum"):
        slamb_jax.momentum_agreement({"w": jnp.ones((N, 3))})


def test_metrics_are_those_of_the_wire_report_and_of_the_state():
    mesh, exchange = mesh_of(N), slamb_jax.Exchange(AXIS)
    tx = slamb_jax.skip_not_finite(slamb_jax.adamw(1e-3, exchange), exchange)
    shapes = {"w": (320, 80), "b": (2560,)}  # whole blocks in each of the slices
    params = random_tree(shapes, 0)
    run = slamb_jax.per_worker_step(step_on_gradients(tx), mesh, exchange)
    state = slamb_jax.replicate((params, tx.init(params)), mesh, exchange)
    grads = stack(random_tree(shapes, 1), N)
    report = slamb_jax.wire_report(run.lower(state, grads))
    state, _ = run(state, grads)
    state, _ = run(state, grads | {"b": grads["b"].at[1].set(np.nan)})
    found = slamb_jax.exchange_metrics(exchange, params)(state)
    flag = 2 * 4 * (N - 1) / N  # an all-reduce of whether all gradients are finite
    assert found["exchange/bytes_per_step"] == report.bytes_sent() - flag
    share = exchange.share(params)
    assert found["exchange/share_of_float32"] == share
    assert found["exchange/share_of_bfloat16"] == 2 * share
    assert found["exchange/agreement"] == pytest.approx(np.sqrt(N))  # equal gradients
    assert found["exchange/skipped_steps"] == 1
    with pytest.raises(ValueError, match=r"params must be one copy, got 112640 el"):
        slamb_jax.exchange_metrics(exchange, state[0])(state)
    in_a_dict = slamb_jax.exchange_metrics(exchange, params)({"mu": grads})
    assert in_a_dict["exchange/agreement"] == pytest.approx(np.sqrt(N))
