"""Replicas that should be the same, and checks that see when they are not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import slamb_jax
from slamb_jax.workers import mesh as meshes
from tests.optimizers import random_tree, step_on_gradients
from tests.shards import mesh_4x2
from tests.workers import AXIS, P, mesh_of, on_mesh, stack, train

N = 4
SHAPES = {"w": (40, 50), "b": (7,), "scale": (), "empty": (0, 3)}


def spread(tree):
    return jax.device_put(tree, NamedSharding(mesh_of(N), P(AXIS)))


PLACES = pytest.mark.parametrize("place", [spread, lambda tree: tree])


def check_differ(tree, said, rtol=0.0):
    with pytest.raises(AssertionError, match=said):
        slamb_jax.assert_replicas_agree(tree, rtol)


FEW_BITS = "int4", "uint4", "int2", "float4_e2m1fn", "bool"


@PLACES
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", *FEW_BITS])
def test_a_single_bit_is_seen(dtype, place):
    cast = functools.partial(jax.tree.map, lambda x: (10 * x).astype(dtype))
    tree = stack(cast(random_tree(SHAPES, 0)), N)
    for rtol in (0.0, 1e-12):
        slamb_jax.assert_replicas_agree(place(tree), rtol)
        for name in ("w", "b", "scale"):
            bits = np.array(tree[name])
            bits.view(np.uint8).reshape(N, -1)[2, 0] ^= 1
            said = rf"differ in 1 of 4 leaves: \['{name}'\] \(of 1 from the first"
            check_differ(place(tree | {name: jnp.asarray(bits)}), said, rtol)


def on_two_devices_each(replicas, spec, parted=None):
    """Replicas on a mesh of (workers, 2); one device's copy may differ in one bit."""
    there = NamedSharding(mesh_4x2(), spec)
    shards = []
    indices = there.addressable_devices_indices_map(replicas.shape)
    for k, (device, index) in enumerate(indices.items()):
        own = np.array(replicas[index])
        if k == parted:
            own.reshape(-1).view(np.uint8)[0] ^= 1
        shards.append(jax.device_put(own, device))
    return jax.make_array_from_single_device_arrays(replicas.shape, there, shards)


@pytest.mark.parametrize("rtol", [0.0, 1e-2])
def test_every_devices_copy_is_looked_at(rtol):
    w = np.random.default_rng(0).normal(size=(1, 6, 8)).astype(np.float32)
    make = functools.partial(on_two_devices_each, np.repeat(w, N, 0))
    sharded, parted = make(P(AXIS, None, "model")), make(P(AXIS, None, "model"), 5)
    slamb_jax.assert_replicas_agree({"a": sharded, "b": make(P(AXIS))}, rtol)
    of_copies = r"different copies .*\['b'\] \(of replica 2"
    check_differ({"a": sharded, "b": make(P(AXIS), 5)}, of_copies, rtol)
    both = r"2 of 2 leaves: \['a'\] \(of 1 from the first\), \['b'\] \(of 1"
    check_differ({"a": parted, "b": parted}, both)
    everywhere = make(P(), 5)  # all replicas on every device
    check_differ(everywhere, r"the tree \(of replica 0", rtol)


def test_keys_nans_and_elements_that_change_places_are_seen():
    w = jnp.arange(6.0).reshape(1, 6)
    check_differ(jnp.concatenate([w, w[:, ::-1]]), "the tree")
    keys = stack(jax.random.key(0), N)
    nan = {"nan": jnp.full((N, 2), jnp.nan)}
    for rtol in (0.0, 0.1):
        slamb_jax.assert_replicas_agree({"key": keys} | nan, rtol)
    check_differ({"key": jax.random.split(keys[0], N)}, r"\['key'\] \(of 3")
    some = {"nan": nan["nan"].at[0].set(1.0)}
    check_differ(some, r"\['nan'\] \(of 3", rtol=0.1)


@PLACES
def test_the_tolerance_is_that_of_the_norm(place):
    """And not of the largest element, nor of a sum."""
    w = np.asarray(random_tree({"w": (60, 70)}, 0)["w"])
    off = np.zeros_like(w)
    off[2, 3] = np.linalg.norm(w)
    for size in (1e-4, 1e-2):
        near = np.stack([w, w, w + size * off, w])
        tree = place({"w": jnp.asarray(near, jnp.float32)})
        slamb_jax.assert_replicas_agree(tree, rtol=1.01 * size)
        check_differ(tree, r"\['w'\] \(of 1", rtol=0.99 * size)


@pytest.mark.parametrize("rtol", [1e-5, 0.1])
@pytest.mark.parametrize(
    ("first", "other", "agree"),
    [
        (1e-24, 9e-24, False),  # squares are 0 in float32, as of second moments
        (0.0, 1e-23, False),
        (3e38, -3e38, False),  # and here infinite
        (1e-24, 1.000001e-24, True),
        (3e38, 3.000001e38, True),
        ((-np.inf, 1.0), (-np.inf, 1.000001), True),  # a mask
        ((-np.inf, 1.0), (-np.inf, 2.0), False),
        ((np.inf, 1.0), (-np.inf, 1.0), False),
        ((np.inf, 1.0), (3.0, 1.0), False),
        ((3.0, 1.0), (np.inf, 1.0), False),
        (np.nan, 1.0, False),
    ],
)
def test_a_tolerance_is_held_at_every_magnitude(first, other, agree, rtol):
    rows = [np.broadcast_to(np.float32(x), 2) for x in (first, first, other)]
    tree = jnp.array(rows)
    if agree:
        slamb_jax.assert_replicas_agree(tree, rtol)
    else:
        check_differ(tree, r"of 1 from the first", rtol)


@pytest.mark.parametrize("dtype", ["int64", "float64", "complex128"])
def test_numpy_arrays_of_64_bits_are_compared_in_all_of_them(dtype):
    for byte in (0, -1):
        x = np.ones(2, dtype)
        slamb_jax.assert_replicas_agree(x)
        x.view(np.uint8)[byte] ^= 1
        check_differ({"x": x}, r"\['x'\] \(of 1")


def test_only_checksums_are_communicated(monkeypatch):
    tree = spread(stack(random_tree({"w": (200, 300), "b": (300,)}, 0), N))
    sent, compute = [], meshes.computed

    def reported(fun, leaves, spec=None):
        there = None if spec is None else NamedSharding(mesh_of(N), spec)
        lowered = jax.jit(fun, out_shardings=there).lower(leaves)
        sent.extend(slamb_jax.wire_report(lowered).collectives)
        return compute(fun, leaves, spec)

    monkeypatch.setattr(meshes, "computed", reported)
    slamb_jax.assert_replicas_agree(tree)
    (gather,) = sent
    assert (gather.kind, gather.payload_bytes) == ("all-gather", 16)  # of 240 kB


@PLACES
def test_momenta_that_oppose_each_other_are_told_from_those_that_do_not(place):
    noise = random_tree(SHAPES, 1, N)
    alike = jax.tree.map(lambda x: np.stack([x[0]] * N), noise)
    opposed = jax.tree.map(lambda x: x - x.mean(0, keepdims=True), noise)
    tx = slamb_jax.sgd(0.1, slamb_jax.Exchange(AXIS, payload=None), momentum=0.9)
    params = random_tree(SHAPES, 0)
    for grads, low, high in ((alike, 2, 2), (noise, 0.9, 1.1), (opposed, 0, 0)):
        state = train(tx, params, [grads], "vmap")[-1]
        found = slamb_jax.momentum_agreement(place(state))
        assert len(found) == 3  # a leaf without elements has no momentum
        (of_matrix,) = (x for name, x in found.items() if name.endswith("['w']"))
        assert low - 1e-3 <= of_matrix <= high + 1e-3, found
    with pytest.raises(ValueError, match="state must hold a momentum"):
        slamb_jax.momentum_agreement({"w": jnp.ones((N, 3))})


@pytest.mark.parametrize("route", ["owners", "all"])
def test_metrics_are_those_of_the_wire_report_and_of_the_state(route):
    mesh, exchange = mesh_of(N), slamb_jax.Exchange(AXIS, route=route)
    tx = slamb_jax.skip_not_finite(slamb_jax.adamw(1e-3, exchange), exchange)
    shapes = {"w": (320, 80), "b": (2560,)}  # whole blocks in each of the slices
    params, grads = random_tree(shapes, 0), stack(random_tree(shapes, 1), N)
    start = params, tx.init(params)
    run, state = on_mesh(step_on_gradients(tx), start, mesh, exchange)
    report = slamb_jax.wire_report(run.lower(state, grads))
    state, _ = run(state, grads)
    state, _ = run(state, grads | {"b": grads["b"].at[1].set(np.nan)})
    metrics = slamb_jax.exchange_metrics(exchange, params)
    share = exchange.share(params) * (N / 2 if route == "all" else 1)
    assert metrics(state) == {
        "exchange/bytes_per_step": report.bytes_sent(),  # no flag is sent
        "exchange/share_of_float32": share,
        "exchange/share_of_bfloat16": 2 * share,
        "exchange/agreement": pytest.approx(np.sqrt(N)),  # equal gradients
        "exchange/skipped_steps": 1,
    }
    with pytest.raises(ValueError, match=r"params must be one copy, got 112640 el"):
        slamb_jax.exchange_metrics(exchange, state[0])(state)
