"""Runs an optimizer on n workers under each of jax's mappings."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import slamb_jax

AXIS = "data"
MAPPINGS = ("vmap", "shard_map", "shard_map_unchecked", "pmap")
P = PartitionSpec


def mesh_of(n, axis=AXIS):
    axes = (axis,) if isinstance(axis, str) else axis
    devices = np.array(jax.devices()[:n])
    return Mesh(devices.reshape(*[2] * (len(axes) - 1), -1), axes)


def on_mesh(step, state, mesh, exchange, **settings):
    """The step of all workers on a mesh, and their replicas of a state."""
    run = slamb_jax.per_worker_step(step, mesh, exchange, **settings)
    return run, slamb_jax.replicate(state, mesh, exchange)


def stack(tree, n):
    """The same tree for each of n workers."""

    def copies(x):
        x = jnp.asarray(x)
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jnp.stack([x] * n)
        return jnp.asarray(np.stack([np.asarray(x)] * n))  # compiles nothing

    return jax.tree.map(copies, tree)


def over_workers(fun, mapping, n, axis=AXIS):
    """``fun``, as one worker calls it, as a jitted function of stacked arguments.

    Of two axes, the first has two devices.
    """
    if mapping == "vmap":
        return jax.jit(jax.vmap(fun, axis_name=axis))
    mesh = mesh_of(n, axis)
    if mapping == "pmap":
        run = jax.pmap(fun, axis_name=axis, devices=jax.devices()[:n])
    else:

        def one_of_many(*args):
            own = jax.tree.map(lambda x: jnp.squeeze(x, 0), args)
            return jax.tree.map(lambda x: jnp.expand_dims(x, 0), fun(*own))

        run = jax.shard_map(
            one_of_many, mesh=mesh, in_specs=P(axis), out_specs=P(axis),
            check_vma=mapping == "shard_map",
        )  # fmt: skip
        run = jax.jit(run)

    @functools.wraps(run)
    def placed(*args):
        # Else the first step, whose arguments lie on one device, is another program.
        return run(*jax.device_put(args, NamedSharding(mesh, P(axis))))

    placed.lower = run.lower
    return placed


@functools.lru_cache(maxsize=32)
def stepper(tx, mapping, n, axis=AXIS):
    """``(grads, state, params) -> (params, state)`` of all workers; compiled once."""

    def step(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return over_workers(step, mapping, n, axis)


def train(tx, params, grads, mapping, axis=AXIS):
    """Parameters and state after each step; ``grads`` are stacked over workers."""
    n = len(jax.tree.leaves(grads[0])[0])
    state = stack(jax.jit(tx.init)(params), n)
    params = stack(params, n)
    step = stepper(tx, mapping, n, axis)
    history = []
    for g in grads:
        params, state = step(g, state, params)
        history.append(jax.tree.map(np.asarray, (params, state)))
    return history
