"""The same numbers under every mapping, and clear errors for a wrong axis."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slamb_jax
from slamb_jax import Exchange, payloads
from tests.close import assert_close, assert_same_bits
from tests.workers import (
    AXIS,
    MAPPINGS,
    P,
    mesh_of,
    over_workers,
    random_tree,
    stack,
    train,
)

SHAPES = {"w": (12, 16), "b": (16,), "odd": (7, 11), "empty": (0, 3), "scale": ()}
N, STEPS = 4, 4
CODES = payloads.StochasticUniform(8, block_size=32, error_feedback=True)


def exchange(**settings):
    return Exchange(AXIS, **{"min_size": 20, "sync_every": 3} | settings)


PLAIN = slamb_jax.slamb(0.01, exchange(), b3=0.9)
TABLE = {  # each once under another mapping than the simulator's
    "plain": (PLAIN, MAPPINGS[1:]),
    "product, 16 bits": (
        slamb_jax.slamb(0.01, exchange(), form="product", mu_dtype="bfloat16"),
        ["pmap"],
    ),
    "permutation": (
        slamb_jax.slamb(0.01, exchange(selection="permutation")),
        ["shard_map"],
    ),
    "bernoulli": (
        slamb_jax.slamb(0.01, exchange(selection="bernoulli"), form="product"),
        ["shard_map"],
    ),
    "top_k": (slamb_jax.slamb(0.01, exchange(selection="top_k")), MAPPINGS[1:3]),
    "schedule": (
        slamb_jax.slamb(0.01, exchange(compress_ratio={0: 1.0, 1: 0.5, 3: 0.1})),
        MAPPINGS[1:],
    ),
    "codes": (
        slamb_jax.slamb(0.01, exchange(payload=CODES, average_payload=CODES)),
        MAPPINGS[1:],
    ),
    "natural": (
        slamb_jax.slamb(0.01, exchange(payload="natural8")),
        ["shard_map_unchecked"],
    ),
    "float16": (
        slamb_jax.slamb(0.01, exchange(payload="float16", average_payload="bfloat16")),
        ["shard_map"],
    ),
    "overlap": (slamb_jax.slamb(0.01, exchange(overlap=True)), ["shard_map"]),
    "residual": (
        slamb_jax.randk_compress_with_error_feedback(exchange()),
        ["shard_map"],
    ),
}
QUICK = set(list(TABLE)[:2]) | {"codes"}  # the others in CI
ROUNDED = {"product, 16 bits", "codes", "natural", "float16"}


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
    got, want = (
        train(tx, random_tree(SHAPES, 0), gradients(), m) for m in (mapping, "vmap")
    )
    if name not in ROUNDED:
        assert_close(got, want)
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


@pytest.mark.parametrize("check_vma", [True, False])
def test_two_axes_are_one_group_of_workers(check_vma):
    mesh = jax.sharding.Mesh(mesh_of(N).devices.reshape(2, 2), ("node", "device"))
    axes = ("node", "device")
    tx = slamb_jax.slamb(0.01, Exchange(axes, min_size=20, sync_every=3), b3=0.9)

    def step(*args):
        grads, state, params = jax.tree.map(lambda x: jnp.squeeze(x, 0), args)
        updates, state = tx.update(grads, state, params)
        out = optax.apply_updates(params, updates), state
        return jax.tree.map(lambda x: jnp.expand_dims(x, 0), out)

    run = jax.jit(
        jax.shard_map(
            step, mesh=mesh, in_specs=P(axes), out_specs=P(axes), check_vma=check_vma
        )
    )
    params, state = stack((random_tree(SHAPES, 0), tx.init(random_tree(SHAPES, 0))), N)
    for g in gradients():
        params, state = run(g, state, params)
    want = train(PLAIN, random_tree(SHAPES, 0), gradients(), "vmap")
    assert_close(params, want[-1][0])


def test_without_an_axis_it_is_the_run_of_one_worker():
    alone = slamb_jax.slamb(0.01, Exchange(min_size=20, sync_every=3), b3=0.9)
    grads = [random_tree(SHAPES, t, 1) for t in range(STEPS)]
    got = train(alone, random_tree(SHAPES, 0), grads, "vmap")
    want = train(PLAIN, random_tree(SHAPES, 0), grads, "shard_map")
    assert_close(got, want)


def test_a_simulator_may_keep_the_counts_unbatched():
    """Then even vmap leaves a real conditional around the average."""
    params = random_tree(SHAPES, 0)
    single = PLAIN.init(params)
    axes = jax.tree_util.tree_map_with_path(
        lambda path, _: None if path[-1].name == "count" else 0, single,
        is_leaf=lambda x: isinstance(x, dict),
    )  # fmt: skip
    state = jax.tree.map(
        lambda axis, part: part if axis is None else stack(part, N),
        axes, single, is_leaf=lambda x: x is None,
    )  # fmt: skip
    params = stack(params, N)

    def step(grads, state, params):
        updates, state = PLAIN.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    run = jax.jit(
        jax.vmap(step, in_axes=(0, axes, 0), out_axes=(0, axes), axis_name=AXIS)
    )
    assert "cond[" in str(jax.make_jaxpr(run)(gradients()[0], state, params))
    want = train(PLAIN, random_tree(SHAPES, 0), gradients(), "vmap")
    for g, (expected, _) in zip(gradients(), want, strict=True):
        params, state = run(g, state, params)
        assert_close(params, expected)


@pytest.mark.parametrize("axis_name", ["model", ("data", "model")])
def test_an_unbound_axis_is_named(axis_name):
    tx = slamb_jax.slamb(0.01, Exchange(axis_name))
    params = {"w": jnp.ones((2, 3))}
    with pytest.raises(ValueError, match=r"axis_name=.*model.* is not bound here"):
        tx.update(params, tx.init(params), params)

    def update(params):
        return tx.update(params, tx.init(params), params)[0]

    with pytest.raises(ValueError, match=r"axis_name=.*model.* is not bound here"):
        over_workers(update, "shard_map", 2)(stack(params, 2))


@pytest.mark.parametrize("own_state", [True, False])
@pytest.mark.parametrize("accumulated", [True, False])
def test_gradients_that_were_averaged_already_are_refused(own_state, accumulated):
    """The trap: jax.grad of replicated parameters inside shard_map sums them."""
    tx = slamb_jax.slamb(0.01, Exchange(AXIS))
    if accumulated:
        tx = slamb_jax.accumulate(tx, 2)
    params = {"w": jnp.ones((3, 2))}
    state = stack(tx.init(params), 4) if own_state else tx.init(params)

    def step(params, state, x):
        if own_state:
            state = jax.tree.map(lambda s: jnp.squeeze(s, 0), state)
        grads = jax.grad(lambda p: jnp.sum((x @ p["w"]) ** 2))(params)
        return tx.update(grads, state, params)[0]

    specs = P(), P(AXIS) if own_state else P(), P(AXIS)
    run = jax.shard_map(step, mesh=mesh_of(4), in_specs=specs, out_specs=P())
    with pytest.raises(ValueError, match=r"updates\['w'\] does not vary .*averaged"):
        jax.eval_shape(run, params, state, jnp.ones((8, 3)))


def test_replicated_parameters_that_were_cast_are_taken():
    tx = slamb_jax.slamb(0.01, Exchange(AXIS))

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


def test_injected_and_masked():
    make = optax.inject_hyperparams(slamb_jax.slamb, static_args="exchange")
    rate = optax.linear_schedule(0.02, 0.01, 4)
    injected = make(learning_rate=rate, exchange=exchange(), b3=0.9)
    tx = optax.masked(injected, {name: name != "b" for name in SHAPES})
    with jax.numpy_dtype_promotion("standard"):  # optax's schedules need it
        got, want = (
            train(tx, random_tree(SHAPES, 0), gradients(), how)
            for how in ("shard_map", "vmap")
        )
    assert_close(got, want)
