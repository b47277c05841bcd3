"""Runs an optimizer on n workers under each of jax's mappings."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec

AXIS = "data"
MAPPINGS = ("vmap", "shard_map", "shard_map_unchecked", "pmap")
P = PartitionSpec


def mesh_of(n: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:n]), (AXIS,))


def stack(tree: Any, n: int) -> Any:
    """The same tree for each of n workers."""
    return jax.tree.map(lambda x: jnp.stack([jnp.asarray(x)] * n), tree)


def over_workers(fun: Callable[..., Any], mapping: str, n: int) -> Callable[..., Any]:
    """``fun``, as one worker calls it, as a jitted function of stacked arguments."""
    if mapping == "vmap":
        return jax.jit(jax.vmap(fun, axis_name=AXIS))
    if mapping == "pmap":
        return jax.pmap(fun, axis_name=AXIS, devices=jax.devices()[:n])

    def one_of_many(*args: Any) -> Any:
        own = jax.tree.map(lambda x: jnp.squeeze(x, 0), args)
        return jax.tree.map(lambda x: jnp.expand_dims(x, 0), fun(*own))

    return jax.jit(
        jax.shard_map(
            one_of_many,
            mesh=mesh_of(n),
            in_specs=P(AXIS),
            out_specs=P(AXIS),
            check_vma=mapping == "shard_map",
        )
    )


def stepper(
    tx: optax.GradientTransformation, mapping: str, n: int
) -> Callable[..., Any]:
    """``(grads, state, params) -> (params, state)`` of all workers."""

    def step(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return over_workers(step, mapping, n)


def train(
    tx: optax.GradientTransformation, params: Any, grads: list[Any], mapping: str
) -> list[tuple[Any, Any]]:
    """Parameters and state after each step; ``grads`` are stacked over workers."""
    n = len(jax.tree.leaves(grads[0])[0])
    state = stack(tx.init(params), n)
    params = stack(params, n)
    step = stepper(tx, mapping, n)
    history = []
    for g in grads:
        params, state = step(g, state, params)
        history.append(jax.tree.map(np.asarray, (params, state)))
    return history


def random_tree(
    shapes: dict[str, tuple[int, ...]], seed: int, *lead: int, scale: float = 1.0
) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    return {
        name: jnp.asarray(rng.normal(size=(*lead, *shape)) * scale, jnp.float32)
        for name, shape in shapes.items()
    }
