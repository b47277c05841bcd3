"""Replicas that differ between workers: laid out on a mesh, and averaged into one."""

import functools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from slamb_jax._tree.checks import check_arrays
from slamb_jax._tree.layout import spec_axes
from slamb_jax._tree.rounding import upcast_f32
from slamb_jax.exchange.settings import Exchange
from slamb_jax.workers.mesh import (
    auto_mesh,
    device_put_global,
    indexable_mesh,
    is_key,
    jitted_onto,
    like_key,
    local,
    mesh_sharding,
    replicated,
    workers_on,
)
from slamb_jax.workers.specs import specs_of


def replicate(tree: chex.ArrayTree, mesh: Mesh, exchange: Exchange) -> chex.ArrayTree:
    """Gives every worker on the mesh its own copy of ``tree``.

    Each leaf gets a leading replica axis of length n, the number of workers, sharded
    over their mesh axis. Under SLAMB the parameters of the workers differ between two
    averages, so they are not replicated in jax's sense: they are n arrays in one.

    A random key in ``tree`` is copied too: all workers would draw the same numbers
    from it. Pass a key to the step instead, which gives each worker its own.

    Args:
      tree: parameters and optimizer state: a tree of arrays or numbers. With several
        processes, each passes the same values.
      mesh: the device mesh.
      exchange: its ``axis_name`` is the mesh axis of the workers. With
        ``param_specs``, one spec for each parameter, every part of ``tree`` with the
        structure of the parameters (as moments have it) is sharded likewise.

    Returns:
      A tree like ``tree`` of arrays of shape ``(n, ...)``, on the mesh with Auto axes,
      so that they may be indexed, unless ``jax.set_mesh`` set another.

    Raises:
      ValueError: if the mesh lacks an axis of the exchange, for a leaf that is neither
        an array nor a number, and for specs that do not fit.

    Examples:
      >>> import jax, jax.numpy as jnp, slamb_jax
      >>> mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
      >>> exchange = slamb_jax.Exchange("data")
      >>> slamb_jax.replicate({"w": jnp.ones(3)}, mesh, exchange)["w"].shape
      (4, 3)
    """
    n = workers_on(mesh, exchange)
    mesh = indexable_mesh(mesh)

    def copies(x: Any, spec: PartitionSpec) -> jax.Array:
        if is_key(x):
            return like_key(x, copies(jax.random.key_data(x), spec))
        sharding = NamedSharding(mesh, PartitionSpec(exchange.axis_name, *spec))
        if _is_sharded(x) or isinstance(x, jax.core.Tracer):
            return _broadcast(n, sharding)(x)
        one = np.asarray(x, dtype=jnp.result_type(x))
        return device_put_global(np.broadcast_to(one, (n, *one.shape)), sharding)

    check_arrays("tree", tree)
    return jax.tree.map(copies, tree, specs_of(tree, exchange.param_specs, mesh))


def consolidate(tree: chex.ArrayTree) -> chex.ArrayTree:
    """Averages the replicas into one copy, for evaluation and export.

    Floating-point leaves, BatchNorm statistics among them, become the mean over the
    leading replica axis, which is exact where all replicas agree. Of other leaves
    (counts, keys) the first replica is taken.

    Args:
      tree: a tree of arrays of shape ``(n, ...)``, as :func:`replicate` returned them
        or as they came out of ``vmap``.

    Returns:
      A tree of arrays without that axis, on one local device and free to be moved to
      others by what uses them; or, if any leaf is sharded over further axes of the
      mesh, all of them on the mesh, sharded as before.

    Raises:
      ValueError: for a leaf without a leading axis.

    Examples:
      >>> import jax.numpy as jnp, slamb_jax
      >>> print(slamb_jax.consolidate({"w": jnp.array([[1.0, 2.0], [3.0, 2.0]])})["w"])
      [2. 2.]
    """
    check_replicas("tree", tree)
    sharded = any(_is_sharded(x, behind=1) for x in jax.tree.leaves(tree))
    return jax.tree.map(_mean_on_mesh if sharded else _mean_on_host, tree)


def _mean_on_host(x: Any) -> jax.Array:
    mean = local(replicated(mean_replica, x))
    if is_key(mean):
        return like_key(mean, jnp.asarray(np.asarray(jax.random.key_data(mean))))
    return jnp.asarray(np.asarray(mean))  # not committed to its device


def _mean_on_mesh(x: Any) -> jax.Array:
    own = mesh_sharding(x)
    if own is None:
        return _mean_on_host(x)
    mesh = auto_mesh(own.mesh)
    x = jax.device_put(x, NamedSharding(mesh, own.spec))
    return jitted_onto(mean_replica, mesh, PartitionSpec(*own.spec[1:]))(x)


def mean_replica(x: jax.Array) -> jax.Array:
    """The mean of the replicas where they are floating point, else the first."""
    first = x[0]
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return first
    wide = upcast_f32(x)
    # From the first, so that the mean of equal replicas is exact.
    return (wide[0] + jnp.mean(wide - wide[:1], axis=0)).astype(x.dtype)


def _is_sharded(x: Any, behind: int = 0) -> bool:
    """Whether an array is sharded along a dimension behind so many."""
    own = mesh_sharding(x)
    return own is not None and bool(spec_axes(own.spec[behind:]))


@functools.lru_cache(maxsize=64)
def _broadcast(n: int, sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    """N copies of an array that no host has."""
    return jax.jit(
        lambda x: jnp.broadcast_to(x[None], (n, *x.shape)), out_shardings=sharding
    )


def check_replicas(name: str, tree: chex.ArrayTree) -> int:
    """The number of replicas of ``tree``; raises unless all leaves have as many."""
    sizes = {jnp.shape(x)[0] for x in jax.tree.leaves(tree) if jnp.ndim(x)}
    n = min(sizes, default=0)
    many = f"{n} replicas" if n and len(sizes) == 1 else "the same number of replicas"
    check_leading_sizes(name, tree, lambda size: size == n and size > 0, many)
    return n


def check_leading_sizes(
    name: str, tree: chex.ArrayTree, good: Callable[[int], bool], expected: str
) -> None:
    """Raises unless the first dimension of every leaf is as ``expected``."""
    way_out = ""
    if name == "state":
        way_out = ": slamb_jax.replicate(state, mesh, exchange) adds it"
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        shape = jnp.shape(x)
        if not shape or not good(shape[0]):
            raise ValueError(
                f"{name}{jax.tree_util.keystr(path)} must have a leading axis of "
                f"{expected}, got shape {shape}{way_out}"
            )
