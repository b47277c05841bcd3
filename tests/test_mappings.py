"""The same numbers under every mapping, and clear errors for a wrong axis."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import slamb_jax
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
N = 4


def gradients(steps, seed=1):
    return [random_tree(SHAPES, seed + t, N) for t in range(steps)]


def small_slamb(**settings):
    settings = {"min_size": 20, "sync_every": 3, "b3": 0.9} | settings
    return slamb_jax.slamb(0.01, axis_name=AXIS, **settings)


@functools.cache
def reference(selection, form, mu_dtype):
    tx = small_slamb(selection=selection, form=form, mu_dtype=mu_dtype)
    return train(tx, random_tree(SHAPES, 0), gradients(4), "vmap")


@pytest.mark.parametrize("mapping", MAPPINGS[1:])
@pytest.mark.parametrize(
    ("selection", "form", "mu_dtype"),
    [
        ("strided", "sum", None),
        ("strided", "product", "bfloat16"),
        ("permutation", "sum", "float16"),
        ("bernoulli", "product", None),
    ],
)
def test_every_mapping_gives_the_same_numbers(selection, form, mu_dtype, mapping):
    tx = small_slamb(selection=selection, form=form, mu_dtype=mu_dtype)
    history = train(tx, random_tree(SHAPES, 0), gradients(4), mapping)
    want = reference(selection, form, mu_dtype)
    # A last bit of a 16-bit momentum may fall either way.
    tolerance = 1e-6 if mu_dtype is None else 2e-3
    for got_step, want_step in zip(history, want, strict=True):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(
                a.astype(np.float32),
                b.astype(np.float32),
                rtol=tolerance,
                atol=tolerance,
            ),
            got_step,
            want_step,
        )


@pytest.mark.parametrize(
    ("dtype", "mapping"), [*(("bfloat16", m) for m in MAPPINGS), ("float16", "vmap")]
)
def test_sixteen_bit_parameters_follow_the_float32_run(dtype, mapping):
    tx = small_slamb()
    narrow = functools.partial(jax.tree.map, lambda x: x.astype(dtype))
    grads = gradients(4)
    history = train(tx, narrow(random_tree(SHAPES, 0)), narrow(grads), mapping)
    want = train(tx, random_tree(SHAPES, 0), grads, "vmap")
    for (got, _), (params, _) in zip(history, want, strict=True):
        for name in SHAPES:
            assert got[name].dtype == dtype
            np.testing.assert_allclose(
                got[name].astype(np.float32), params[name], rtol=0.02, atol=0.03
            )


@pytest.mark.parametrize("mapping", ["shard_map", "shard_map_unchecked"])
def test_two_axes_are_one_group_of_workers(mapping):
    devices = np.array(jax.devices()[:N]).reshape(2, 2)
    mesh = jax.sharding.Mesh(devices, ("node", "device"))
    tx = slamb_jax.slamb(
        0.01, axis_name=("node", "device"), min_size=20, sync_every=3, b3=0.9
    )
    spec = P(("node", "device"))

    def step(*args):
        grads, state, params = jax.tree.map(lambda x: jnp.squeeze(x, 0), args)
        updates, state = tx.update(grads, state, params)
        out = optax.apply_updates(params, updates), state
        return jax.tree.map(lambda x: jnp.expand_dims(x, 0), out)

    run = jax.jit(
        jax.shard_map(
            step, mesh=mesh, in_specs=spec, out_specs=spec,
            check_vma=mapping == "shard_map",
        )
    )  # fmt: skip
    stacked = jax.tree.map(lambda x: jnp.stack([x] * N), random_tree(SHAPES, 0))
    state = jax.vmap(tx.init)(stacked)
    for g in gradients(4):
        stacked, state = run(g, state, stacked)
    want = reference("strided", "sum", None)[-1][0]
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), stacked, want
    )


def test_without_an_axis_it_is_the_run_of_one_worker():
    alone = slamb_jax.slamb(0.01, min_size=20, sync_every=3, b3=0.9)
    grads = [random_tree(SHAPES, t, 1) for t in range(4)]
    got = train(alone, random_tree(SHAPES, 0), grads, "vmap")
    want = train(small_slamb(), random_tree(SHAPES, 0), grads, "shard_map")
    for (a, _), (b, _) in zip(got, want, strict=True):
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), a, b)


def test_a_simulator_may_keep_the_counts_unbatched():
    """Then even vmap leaves a real conditional around the average."""
    tx = small_slamb()
    params = random_tree(SHAPES, 0)
    single = tx.init(params)
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
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    run = jax.jit(
        jax.vmap(step, in_axes=(0, axes, 0), out_axes=(0, axes), axis_name=AXIS)
    )
    assert "cond[" in str(jax.make_jaxpr(run)(gradients(1)[0], state, params))
    want = reference("strided", "sum", None)
    for g, (expected, _) in zip(gradients(4), want, strict=True):
        params, state = run(g, state, params)
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), params, expected
        )


@pytest.mark.parametrize("axis_name", ["model", ("data", "model")])
def test_an_unbound_axis_is_named(axis_name):
    tx = slamb_jax.slamb(0.01, axis_name=axis_name)
    params = {"w": jnp.ones((2, 3))}
    with pytest.raises(ValueError, match=r"axis_name=.*model.* is not bound here"):
        tx.update(params, tx.init(params), params)
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), params)

    def update(params):
        return tx.update(params, tx.init(params), params)[0]

    with pytest.raises(ValueError, match=r"axis_name=.*model.* is not bound here"):
        over_workers(update, "shard_map", 2)(stacked)


@pytest.mark.parametrize("own_state", [True, False])
@pytest.mark.parametrize("accumulated", [True, False])
def test_gradients_that_were_averaged_already_are_refused(own_state, accumulated):
    """The trap: jax.grad of replicated parameters inside shard_map sums them."""
    tx = slamb_jax.slamb(0.01, axis_name=AXIS)
    if accumulated:
        tx = slamb_jax.accumulate(tx, 2)
    params = {"w": jnp.ones((3, 2))}
    state = tx.init(params)
    state_spec = P()
    if own_state:
        state_spec = P(AXIS)
        state = jax.tree.map(lambda x: jnp.stack([x] * 4), state)

    def step(params, state, x):
        if own_state:
            state = jax.tree.map(lambda s: jnp.squeeze(s, 0), state)
        grads = jax.grad(lambda p: jnp.sum((x @ p["w"]) ** 2))(params)
        return tx.update(grads, state, params)[0]

    run = jax.shard_map(
        step, mesh=mesh_of(4), in_specs=(P(), state_spec, P(AXIS)), out_specs=P()
    )
    with pytest.raises(ValueError, match=r"updates\['w'\] does not vary .*averaged"):
        run(params, state, jnp.ones((8, 3)))


def test_replicated_parameters_that_were_cast_are_taken():
    tx = slamb_jax.slamb(0.01, axis_name=AXIS)
    params = {"w": jnp.ones((3, 2))}

    def step(params, x):
        own = jax.tree.map(
            lambda p: p + 0 * jax.lax.axis_index(AXIS).astype(p.dtype), params
        )
        grads = jax.grad(lambda p: jnp.sum((x @ p["w"]) ** 2))(own)
        updates, _ = tx.update(grads, tx.init(own), own)
        return optax.apply_updates(own, updates)

    run = jax.shard_map(
        step, mesh=mesh_of(4), in_specs=(P(), P(AXIS)), out_specs=P(AXIS)
    )
    assert jnp.isfinite(run(params, jnp.ones((8, 3)))["w"]).all()


@pytest.mark.parametrize("mapping", MAPPINGS[1:])
def test_injected_and_masked_under_every_mapping(mapping):
    injected = optax.inject_hyperparams(
        slamb_jax.slamb, static_args=slamb_jax.STATIC_ARGS
    )(
        learning_rate=optax.linear_schedule(0.02, 0.01, 4), axis_name=AXIS,
        min_size=20, sync_every=3, b3=0.9,
    )  # fmt: skip
    tx = optax.masked(injected, {name: name != "b" for name in SHAPES})
    with jax.numpy_dtype_promotion("standard"):  # optax's schedules need it
        runs = [
            train(tx, random_tree(SHAPES, 0), gradients(4), how)
            for how in (mapping, "vmap")
        ]
    for (got, _), (want, _) in zip(*runs, strict=True):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), got, want
        )
