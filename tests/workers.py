"""Runs an optimizer on n workers under each of jax's mappings."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import slamb_jax

AXIS = "data"
MAPPINGS = ("vmap", "shard_map", "shard_map_unchecked", "pmap")
P = PartitionSpec


def exchange(**settings: Any) -> slamb_jax.Exchange:
    """An exchange between the workers of these tests, of small leaves too."""
    return slamb_jax.Exchange(AXIS, **({"min_size": 20, "sync_every": 3} | settings))


def mesh_of(n: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:n]), (AXIS,))


def stack(tree: Any, n: int) -> Any:
    """The same tree for each of n workers."""

    def copies(x: Any) -> jax.Array:
        x = jnp.asarray(x)
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jnp.stack([x] * n)
        return jnp.asarray(np.stack([np.asarray(x)] * n))  # compiles nothing

    return jax.tree.map(copies, tree)


def over_workers(
    fun: Callable[..., Any],
    mapping: str,
    n: int,
    exchange: slamb_jax.Exchange | None = None,
) -> Callable[..., Any]:
    """``fun``, as one worker calls it, as a jitted function of stacked arguments."""
    axis = AXIS if exchange is None else exchange.axis_name
    if mapping == "vmap":
        return jax.jit(jax.vmap(fun, axis_name=axis))
    mesh = Mesh(np.array(jax.devices()[:n]), (axis,))
    if mapping == "pmap":
        run = jax.pmap(fun, axis_name=axis, devices=jax.devices()[:n])
    else:

        def one_of_many(*args: Any) -> Any:
            own = jax.tree.map(lambda x: jnp.squeeze(x, 0), args)
            return jax.tree.map(lambda x: jnp.expand_dims(x, 0), fun(*own))

        run = jax.jit(
            jax.shard_map(
                one_of_many,
                mesh=mesh,
                in_specs=P(axis),
                out_specs=P(axis),
                check_vma=mapping == "shard_map",
            )
        )

    @functools.wraps(run)
    def placed(*args: Any) -> Any:
        # Else the first step, whose arguments lie on one device, is another program.
        return run(*jax.device_put(args, NamedSharding(mesh, P(axis))))

    placed.lower = run.lower
    return placed


@functools.lru_cache(maxsize=32)
def stepper(
    tx: optax.GradientTransformation,
    mapping: str,
    n: int,
    exchange: slamb_jax.Exchange | None = None,
) -> Callable[..., Any]:
    """``(grads, state, params) -> (params, state)`` of all workers; compiled once."""

    def step(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return over_workers(step, mapping, n, exchange)


def train(
    tx: optax.GradientTransformation,
    params: Any,
    grads: list[Any],
    mapping: str,
    exchange: slamb_jax.Exchange | None = None,
) -> list[tuple[Any, Any]]:
    """Parameters and state after each step; ``grads`` are stacked over workers."""
    n = len(jax.tree.leaves(grads[0])[0])
    state = stack(jax.jit(tx.init)(params), n)
    params = stack(params, n)
    step = stepper(tx, mapping, n, exchange)
    history = []
    for g in grads:
        params, state = step(g, state, params)
        history.append(jax.tree.map(np.asarray, (params, state)))
    return history


def train_step(
    tx: optax.GradientTransformation, loss: Callable[..., jax.Array]
) -> Callable[..., Any]:
    """The step of one worker on ``loss(params, batch)``; it reports the loss."""

    def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        params, opt_state = state
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    return step


def random_tree(
    shapes: dict[str, tuple[int, ...]], seed: int, *lead: int, scale: float = 1.0
) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    return {
        name: jnp.asarray((rng.normal(size=(*lead, *shape)) * scale).astype("float32"))
        for name, shape in shapes.items()
    }
