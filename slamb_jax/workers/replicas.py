"""Replicas, one for each worker: made of one tree, and averaged into one."""

import functools
import numbers
import warnings
from collections.abc import Callable, Hashable
from typing import Any, TypeAlias

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from slamb_jax._core.axes import as_tuple
from slamb_jax._core.checks import check_integer, named_leaves, shown
from slamb_jax._core.layout import spec_axes
from slamb_jax._core.leaves import bool_for_each
from slamb_jax._core.rounding import upcast_f32
from slamb_jax.exchange.collectives import send
from slamb_jax.exchange.settings import Exchange
from slamb_jax.workers import guards
from slamb_jax.workers import mesh as meshes
from slamb_jax.workers.agreement import leaves_in

#: Bools for a tree or a prefix of it, a function of the tree to those, or None.
EqualKeys: TypeAlias = bool | chex.ArrayTree | Callable[[Any], Any] | None


def replicate(
    tree: chex.ArrayTree,
    mesh: Mesh,
    exchange: Exchange,
    *,
    equal_keys: EqualKeys = None,
) -> chex.ArrayTree:
    """Gives every worker on the mesh its own copy of ``tree``.

    Each leaf gets a leading axis of n workers, sharded over their mesh axis. A typed
    random key (``jax.random.key``, as ``flax.nnx.Rngs`` keep it) is folded with each
    worker's number, so that no two draw the same dropout masks. Raw words stay equal,
    and so do the keys of an optimizer, such as that of ``optax.add_noise``: workers
    that must stay equal add the same noise, that of a dense run.

    Args:
      tree: parameters and optimizer state, arrays or numbers; the same values in each
        process.
      mesh: the device mesh.
      exchange: that of the optimizer. With ``param_specs`` every part of ``tree`` with
        the structure of the parameters (as moments have it) is sharded like them.
      equal_keys: which typed random keys begin equal on all workers: True for all,
        False for none, a tree of bools or a prefix of one, such as ``(False, True)``
        for ``(params, opt_state)``, or a function of ``tree`` that returns it. None:
        those in states of optax's transformations and of this library's.

    Returns:
      A tree of arrays of shape ``(n, ...)``, on the mesh with Auto axes, so that they
      may be indexed. Under ``jax.set_mesh`` the axes stay as they are.

    Raises:
      ValueError: if the mesh lacks an axis of the exchange, a leaf is neither an array
        nor a number, or one of 64 bits that 32 do not hold, specs do not fit, or the
        tree is replicated already; for ``optax.apply_if_finite`` around an exchange; if
        processes' values differ; for a key in a named tuple of your own without
        ``equal_keys``.

    Warns:
      UserWarning: for ``optax.MultiSteps`` around an exchange, which then exchanges at
        every mini-step; :func:`accumulate` does not. For parameters that are sharded
        over a further axis of the mesh without ``param_specs``, which become whole. For
        a chain of which two links exchange, or whose :func:`average_parameters_every`
        is not its last link.

    Examples:
      >>> import jax, jax.numpy as jnp, slamb_jax
      >>> mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
      >>> exchange = slamb_jax.Exchange("data")
      >>> slamb_jax.replicate({"w": jnp.ones(3)}, mesh, exchange)["w"].shape
      (4, 3)
    """
    n, mesh = meshes.workers_on(mesh, exchange)

    def copies(x: Any, there: Any) -> jax.Array:
        if _shard_axes(x) or isinstance(x, jax.core.Tracer):  # no host has its values
            copy = jax.jit(jnp.broadcast_to, static_argnums=1, out_shardings=there)
            with meshes.using(mesh):
                return copy(x, (n, *x.shape))
        one = np.asarray(x, dtype=jnp.result_type(x))
        return meshes.device_put_global(np.broadcast_to(one, (n, *one.shape)), there)

    def replicas(x: Any, equal: bool, there: Any) -> jax.Array:
        if equal:
            return meshes.on_raw(functools.partial(copies, there=there), x)
        return meshes.device_put_global(keys_of_workers(x, jnp.arange(n)), there)

    _check_values(tree)
    _check_is_one_copy(tree, n, exchange)
    _warn_of_shards(tree, mesh, exchange)
    guards.check_wrappers(tree, exchange)
    equal = begin_equal(tree, equal_keys)
    there = meshes.state_shardings(tree, mesh, exchange)
    out = jax.tree.map(replicas, tree, equal, there)
    guards.check_same_values(jax.tree.map(lambda x, y: x if y else None, out, equal))
    return out


def simulated_replicas(
    tree: chex.ArrayTree, workers: int, *, equal_keys: EqualKeys = None
) -> chex.ArrayTree:
    """Gives each of n simulated workers its own copy, as :func:`replicate` does.

    Args:
      tree: parameters and optimizer state: a tree of arrays or numbers.
      workers: n, at least 1, or a ValueError is raised.
      equal_keys: as of :func:`replicate`.

    Examples:
      >>> import jax.numpy as jnp, slamb_jax
      >>> slamb_jax.simulated_replicas({"w": jnp.ones(3)}, 128)["w"].shape
      (128, 3)
    """
    check_integer("workers", workers, 1)
    _check_values(tree)

    def copies(x: Any, equal: bool) -> jax.Array:
        if not equal:
            return keys_of_workers(x, jnp.arange(workers))
        one = jnp.asarray(x, jnp.result_type(x))
        return jnp.broadcast_to(one, (workers, *one.shape))

    return jax.tree.map(copies, tree, begin_equal(tree, equal_keys))


def _check_is_one_copy(tree: chex.ArrayTree, n: int, exchange: Exchange) -> None:
    """Raises if every leaf has a leading axis over the workers."""
    names, leaves = as_tuple(exchange.axis_name), jax.tree.leaves(tree)
    specs = [getattr(meshes.mesh_sharding(x), "spec", ()) for x in leaves]
    on_mesh = all(spec and as_tuple(spec[0]) == names for spec in specs)
    # As of a file: the counts of steps show it, which have no axis in one copy.
    counts = leaves_in(tree, "count").values()
    on_host = any(map(jnp.ndim, counts)) and all(
        jnp.shape(x)[:1] == (n,) for x in leaves
    )
    if leaves and (on_mesh or on_host):
        raise ValueError(
            f"tree must be one copy, got replicas over {exchange.axis_name!r}: go on "
            "with them as they are, or take slamb_jax.consolidate(tree) first"
        )


def _check_values(tree: chex.ArrayTree) -> None:
    """Raises for what is no number, or one that jax would cut to 32 bits."""
    for name, x in named_leaves("tree", tree).items():
        if not hasattr(x, "dtype") and not isinstance(x, numbers.Number):
            raise ValueError(f"{name} must be an array or a number, got {shown(x)}")
        if isinstance(x, np.ndarray | np.generic) or type(x) is int:
            given, held = np.asarray(x), jnp.result_type(x)
            with np.errstate(over="ignore"):
                kept = given.astype(held, copy=False)
            lost = given[(kept != given) & (given == given)]  # a NaN stays one
            if lost.size:
                raise ValueError(
                    f"{name} must be what {held} holds, as jax has it, got {lost[0]}: "
                    "convert it, keep it beside the state, or set jax_enable_x64"
                )


def _warn_of_shards(tree: chex.ArrayTree, mesh: Mesh, exchange: Exchange) -> None:
    """Warns where shards of a model become whole."""
    within = {a for a, size in mesh.shape.items() if size > 1}
    within -= {*as_tuple(exchange.axis_name), *as_tuple(exchange.local_axis_name)}
    for name, x in named_leaves("tree", tree).items():
        if exchange.param_specs is None and (axes := within & set(_shard_axes(x))):
            return warnings.warn(
                f"{name} is sharded over {min(axes, key=str)!r}, and each device gets "
                "all of it: give the exchange param_specs, the jax.sharding."
                "PartitionSpec of each parameter, and have it in the optimizer, too",
                stacklevel=3,  # who called replicate
            )


def begin_equal(tree: chex.ArrayTree, equal_keys: EqualKeys) -> chex.ArrayTree:
    """For each leaf, whether it begins equal on all workers: all but some typed keys.

    With None those keys do that are in a state of optax or of this library.
    """
    if equal_keys is None:
        return jax.tree.map(_by_type, tree, is_leaf=_is_named_tuple)
    return jax.tree.map(
        lambda x, equal: bool(equal) or not meshes.is_key(x),
        tree,
        bool_for_each("equal_keys", equal_keys, tree),
    )


def _by_type(part: Any) -> Any:
    if not _is_named_tuple(part):
        return not meshes.is_key(part)
    if type(part).__module__.startswith(("optax.", "slamb_jax.")):
        return jax.tree.map(lambda _: True, part)
    fields = begin_equal(tuple(part), None)
    if not all(jax.tree.leaves(fields)):
        raise ValueError(
            f"equal_keys must be given where a {type(part).__name__} holds a typed "
            "random key, got None: False if each worker is to draw its own numbers, as "
            "for dropout; True for the key of an optimizer; or a tree of bools"
        )
    return type(part)(*fields)


def _is_named_tuple(x: Any) -> bool:
    return isinstance(x, tuple) and hasattr(x, "_fields")


def keys_of_workers(keys: jax.Array, numbers: jax.Array) -> jax.Array:
    """Keys of any shape, folded with the number of each worker: (n, ...)."""
    fold = jax.vmap(jax.vmap(jax.random.fold_in, (0, None)), (None, 0))
    folded = fold(keys.reshape(-1), numbers.astype(jnp.uint32))
    return folded.reshape(len(numbers), *keys.shape)


def consolidate(tree: chex.ArrayTree) -> chex.ArrayTree:
    """Takes one copy of the replicas, or their mean, for evaluation and export.

    Floating-point and complex leaves become the mean over the leading replica axis:
    where all replicas agree, one of them to the bit. Of others the first is taken.

    Args:
      tree: arrays of shape ``(n, ...)``; a single copy is refused where they show it.

    Returns:
      A tree of arrays without that axis, on one local device (or on the mesh of
      ``jax.set_mesh``) and not committed to it. If any leaf is sharded over further
      axes of the mesh, all stay there, and sharded as before.

    Raises:
      ValueError: unless all leaves have a leading axis of the same length, and for
        numbers of 64 bits that 32 do not hold.

    Examples:
      >>> import jax.numpy as jnp, slamb_jax
      >>> print(slamb_jax.consolidate({"w": jnp.array([[1.0, 2.0], [3.0, 2.0]])})["w"])
      [2. 2.]
    """
    meshes.check_replicas("tree", tree)
    _check_values(tree)
    sharded = any(_shard_axes(x, lead=1) for x in jax.tree.leaves(tree))

    def mean(x: Any) -> jax.Array:
        sharding = meshes.mesh_sharding(x)
        if sharded and sharding:
            return meshes.computed(mean_replica, x, PartitionSpec(*sharding.spec[1:]))
        one = np.asarray(meshes.replicated(mean_replica, x))
        return jnp.asarray(one)  # not committed to a device

    return jax.tree.map(functools.partial(meshes.on_raw, mean), tree)


def mean_replica(x: jax.Array) -> jax.Array:
    """The mean of the replicas of a leaf, or the first of them where it is a count."""
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return x[0]
    mean = jnp.sum(upcast_f32(x) / len(x), axis=0)  # divided first: no sum overflows
    # Of equal replicas one is the mean, which infinities and -0.0 have no other.
    return jnp.where(jnp.all(x == x[:1], axis=0), x[0], mean.astype(x.dtype))


def copied_replicas(
    arrays: list[Any], full: list[int], empty: list[int]
) -> list[jax.Array]:
    """The arrays on a mesh, with the empty replicas copied from full ones, in turn."""
    mesh, specs = arrays[0].sharding.mesh, [x.sharding.spec for x in arrays]
    axis = specs[0][0]

    def copy(held: list[jax.Array]) -> list[jax.Array]:
        for i in range(0, len(empty), len(full)):  # a worker sends one at a time
            pairs = list(zip(full, empty[i:], strict=False))
            gets = jnp.isin(lax.axis_index(axis), jnp.array(empty[i : i + len(full)]))
            held = [jnp.where(gets, send(x, axis, pairs), x) for x in held]
        return held

    run = jax.shard_map(copy, mesh=mesh, in_specs=(specs,), out_specs=specs)
    with meshes.using(mesh):
        return jax.block_until_ready(jax.jit(run, donate_argnums=0)(arrays))


def _shard_axes(x: Any, lead: int = 0) -> tuple[Hashable, ...]:
    """The mesh axes along which an array is sharded after its first dimensions."""
    return spec_axes(getattr(meshes.mesh_sharding(x), "spec", ())[lead:])
