"""Replicas that differ between workers: laid out on a mesh, and averaged into one."""

import functools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from slamb_jax._checks import check_arrays
from slamb_jax._layout import is_spec, mesh_axes, spec_axes
from slamb_jax._rounding import upcast_f32
from slamb_jax.exchange import Exchange
from slamb_jax.workers.keys import are_alike, keys_of_workers
from slamb_jax.workers.mesh import (
    device_put_global,
    indexable_mesh,
    mesh_sharding,
    on_one_mesh,
    on_raw,
    replicated,
    workers_on,
)
from slamb_jax.workers.processes import check_same_values


def replicate(tree: chex.ArrayTree, mesh: Mesh, exchange: Exchange) -> chex.ArrayTree:
    """Gives every worker on the mesh its own copy of ``tree``.

    Each leaf gets a leading replica axis of length n, the number of workers, sharded
    over their mesh axis: between two averages the workers' parameters differ. Of a
    typed random key (``jax.random.key``, as ``flax.nnx.Rngs`` keep it) each worker gets
    its own, folded with its number, so that no two draw the same dropout masks. Keys
    that must stay equal are kept as words: ``jax.random.key_data(key)``, which
    ``jax.random.wrap_key_data`` makes a key again.

    Args:
      tree: parameters and optimizer state: a tree of arrays or numbers. With several
        processes, each passes the same values.
      mesh: the device mesh.
      exchange: its ``axis_name`` is the mesh axis of the workers. With
        ``param_specs``, one spec for each parameter, every part of ``tree`` with the
        structure of the parameters (as moments have it) is sharded likewise.

    Returns:
      A tree like ``tree`` of arrays of shape ``(n, ...)``, on the mesh with Auto axes
      unless ``jax.set_mesh`` set another, so that they may be indexed.

    Raises:
      ValueError: if the mesh lacks an axis of the exchange, for a leaf that is neither
        an array nor a number, for specs that do not fit, for
        ``optax.apply_if_finite`` around an optimizer that exchanges, and on all
        processes if they pass other values.

    Examples:
      >>> import jax, jax.numpy as jnp, slamb_jax
      >>> mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
      >>> exchange = slamb_jax.Exchange("data")
      >>> slamb_jax.replicate({"w": jnp.ones(3)}, mesh, exchange)["w"].shape
      (4, 3)
    """
    n = workers_on(mesh, exchange)

    def copies(sharding: NamedSharding, x: Any) -> jax.Array:
        if _is_sharded(x) or isinstance(x, jax.core.Tracer):  # no host has its values
            broadcast = jax.jit(_copies, static_argnums=0, out_shardings=sharding)
            return broadcast(n, x)
        one = np.asarray(x, dtype=jnp.result_type(x))
        return device_put_global(np.broadcast_to(one, (n, *one.shape)), sharding)

    def replicas(x: Any, alike: bool, there: NamedSharding) -> jax.Array:
        if alike:
            return on_raw(functools.partial(copies, there), x)
        return device_put_global(keys_of_workers(x, n), there)

    check_arrays("tree", tree)
    _check_steps_are_skipped_together(tree)
    shardings = state_shardings(tree, indexable_mesh(mesh), exchange)
    alike = are_alike(tree)
    out = jax.tree.map(replicas, tree, alike, shardings)
    check_same_values(out, jax.tree.leaves(alike))
    return out


def _check_steps_are_skipped_together(tree: chex.ArrayTree) -> None:
    """Raises for what would leave other workers waiting in an exchange."""

    def skips(x: object) -> bool:
        return isinstance(x, optax.ApplyIfFiniteState)

    def is_own(x: object) -> bool:
        return type(x).__module__.partition(".")[0] == __name__.partition(".")[0]

    for x in filter(skips, jax.tree.leaves(tree, is_leaf=skips)):
        if any(map(is_own, jax.tree.leaves(x.inner_state, is_leaf=is_own))):
            raise ValueError(
                "tree has the state of optax.apply_if_finite around an exchange: a "
                "worker that skips a step would leave the others waiting for ever. "
                "Take slamb_jax.skip_not_finite(tx, exchange)"
            )


def _copies(n: int, x: jax.Array) -> jax.Array:
    return jnp.broadcast_to(x[None], (n, *x.shape))


def state_shardings(
    state: chex.ArrayTree, mesh: Mesh, exchange: Exchange, behind: int = 0
) -> chex.ArrayTree:
    """A sharding for each leaf, its leading replica axis over the workers.

    Behind that axis, a subtree with the structure of the parameters has their specs.
    ``behind``: the dimensions that ``state`` has for the replica axis already, 0 or 1.

    Raises:
      ValueError: for an axis that the mesh has not, or specs that fit no subtree.
    """

    def sharding(spec: PartitionSpec | None = None) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(exchange.axis_name, *spec or ()))

    if exchange.param_specs is None:
        return jax.tree.map(lambda _: sharding(), state)
    unknown = [a for a in mesh_axes(exchange.param_specs) if a not in mesh.shape]
    if unknown:
        raise ValueError(
            f"param_specs names {unknown[0]!r}, which is not an axis of the mesh: it "
            f"has {', '.join(map(repr, mesh.axis_names))}"
        )
    treedef: Any
    specs, treedef = jax.tree.flatten(exchange.param_specs, is_leaf=is_spec)

    def is_params(x: Any) -> bool:
        if jax.tree.structure(x) != treedef:
            return False
        pairs = zip(jax.tree.leaves(x), specs, strict=True)
        return all(jnp.ndim(leaf) - behind >= len(spec or ()) for leaf, spec in pairs)

    outer: Any
    parts, outer = jax.tree.flatten(state, is_leaf=is_params)
    if not any(map(is_params, parts)):
        raise ValueError(
            "param_specs must have one spec for each parameter, got "
            f"{exchange.param_specs}: no part of the state has this structure (unbox "
            "linen's partitioned parameters with flax.linen.unbox)"
        )
    of_params = treedef.unflatten(map(sharding, specs))
    return outer.unflatten([of_params if is_params(x) else sharding() for x in parts])


def consolidate(tree: chex.ArrayTree) -> chex.ArrayTree:
    """Takes one copy of the replicas, or their mean, for evaluation and export.

    Floating-point leaves become the mean over the leading replica axis. Where all
    replicas agree that is each of them, to the bit: of the parameters under the default
    exchange, for one. Of other leaves (counts, keys) the first replica is taken.

    Args:
      tree: a tree of arrays of shape ``(n, ...)``, as :func:`replicate` returns them.

    Returns:
      A tree of arrays without that axis, on one local device and not committed to it;
      or, if any leaf is sharded over further axes of the mesh, all of them on the mesh,
      sharded as before.

    Raises:
      ValueError: for a leaf without a leading axis.

    Examples:
      >>> import jax.numpy as jnp, slamb_jax
      >>> print(slamb_jax.consolidate({"w": jnp.array([[1.0, 2.0], [3.0, 2.0]])})["w"])
      [2. 2.]
    """
    check_replicas("tree", tree)
    sharded = any(_is_sharded(x, behind=1) for x in jax.tree.leaves(tree))

    def mean(x: Any) -> jax.Array:
        if sharded and mesh_sharding(x):
            _, x = on_one_mesh(x)
            there = NamedSharding(x.sharding.mesh, PartitionSpec(*x.sharding.spec[1:]))
            return jax.jit(mean_replica, out_shardings=there)(x)
        return jnp.asarray(np.asarray(replicated(mean_replica, x)))  # uncommitted

    return jax.tree.map(lambda x: on_raw(mean, x), tree)


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
        way_out = (
            ": slamb_jax.replicate(state, mesh, exchange) adds it, and "
            "slamb_jax.checkpoint.resize(state, n) takes that of other workers to n"
        )
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        shape = jnp.shape(x)
        if not shape or not good(shape[0]):
            raise ValueError(
                f"{name}{jax.tree_util.keystr(path)} must have a leading axis of "
                f"{expected}, got shape {shape}{way_out}"
            )
