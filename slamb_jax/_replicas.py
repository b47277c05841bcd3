"""Replicas that drift apart: laid out on a mesh, stepped, and joined again."""

import functools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from slamb_jax._checks import check_arrays
from slamb_jax._collectives import widened
from slamb_jax._layout import names_of
from slamb_jax._shards import specs_of

_WHOLE = PartitionSpec()


def replicate(
    tree: chex.ArrayTree, mesh: Mesh, axis_name: str, param_specs: Any = None
) -> chex.ArrayTree:
    """Gives every worker on the mesh its own copy of ``tree``, all the same.

    Each leaf gets a leading replica axis, as long as the mesh axis and sharded over
    it. Parameters under SLAMB differ between workers from one average to the next, so
    they are not replicated in jax's sense: they are n arrays in one.

    Args:
      tree: parameters, optimizer state, random keys: a tree of arrays (or numbers).
        With several processes, each passes the same values.
      mesh: the device mesh.
      axis_name: the mesh axis of the workers.
      param_specs: a tree of ``jax.sharding.PartitionSpec``, one for each parameter
        (None: not cut): every part of ``tree`` with the structure of this tree, as
        parameters and moments have, is cut over further axes of the mesh as it says.

    Returns:
      A tree like ``tree`` of arrays of shape ``(n, ...)``.

    Raises:
      ValueError: if the mesh has no axis of that name, for a leaf that is neither
        an array nor a number, and for specs that do not fit.

    Examples:
      >>> import jax, jax.numpy as jnp, slamb_jax
      >>> mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
      >>> slamb_jax.replicate({"w": jnp.ones(3)}, mesh, "data")["w"].shape
      (4, 3)
    """
    n = workers_on(mesh, axis_name)

    def spread(x: Any, spec: PartitionSpec) -> jax.Array:
        if is_key(x):
            return like_key(x, spread(jax.random.key_data(x), spec))
        sharding = NamedSharding(mesh, PartitionSpec(axis_name, *spec))
        if _is_cut(x):
            return _copies(n, sharding)(x)
        one = np.asarray(x, dtype=jnp.result_type(x))
        return put(np.broadcast_to(one, (n, *one.shape)), sharding)

    check_arrays("tree", tree)
    return jax.tree.map(spread, tree, specs_of(tree, param_specs, mesh, axis_name))


def put(x: Any, sharding: NamedSharding) -> jax.Array:
    """``x``, which all processes know, as an array on devices of all of them."""
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    if is_key(x):
        return like_key(x, put(jax.random.key_data(x), sharding))
    known = np.asarray(x)
    return jax.make_array_from_callback(known.shape, sharding, lambda i: known[i])


def is_key(x: Any) -> bool:
    """Whether a leaf is an array of typed random keys."""
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def like_key(key: jax.Array, bits: jax.Array) -> jax.Array:
    """Typed keys of these bits, of the kind of ``key``."""
    return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(key))


def consolidate(tree: chex.ArrayTree) -> chex.ArrayTree:
    """Joins the replicas into one copy, for evaluation and export.

    Floating-point leaves, BatchNorm statistics among them, become the mean over the
    leading replica axis, exactly the common value where all replicas agree; other
    leaves (counts, keys) are those of the first replica.

    Args:
      tree: a tree of arrays of shape ``(n, ...)``, as :func:`replicate` returned them
        or as they came out of ``vmap``.

    Returns:
      A tree of arrays without that axis: on one local device, or, if any leaf is cut
      over further axes of the mesh, all of them on the mesh, cut as they were.

    Raises:
      ValueError: for a leaf without a leading axis.

    Examples:
      >>> import jax.numpy as jnp, slamb_jax
      >>> print(slamb_jax.consolidate({"w": jnp.array([[1.0, 2.0], [3.0, 2.0]])})["w"])
      [2. 2.]
    """
    check_replicas("tree", tree)
    cut = any(_is_cut(x, behind=1) for x in jax.tree.leaves(tree))
    return jax.tree.map(_joined_in_place if cut else _joined_locally, tree)


def _joined_locally(x: Any) -> jax.Array:
    return local(everywhere(_join, x))


def _joined_in_place(x: Any) -> jax.Array:
    own = _mesh_sharding(x)
    if own is None:
        return _joined_locally(x)
    plain = Mesh(own.mesh.devices, own.mesh.axis_names)
    x = jax.device_put(x, NamedSharding(plain, own.spec))
    return _gathered(_join, plain, PartitionSpec(*own.spec[1:]))(x)


def _is_cut(x: Any, behind: int = 0) -> bool:
    """Whether an array is sharded along a dimension behind so many."""
    own = _mesh_sharding(x)
    return own is not None and bool(names_of(own.spec[behind:]))


@functools.lru_cache(maxsize=64)
def _copies(n: int, sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    """N copies of an array that no device has whole."""
    return jax.jit(
        lambda x: jnp.broadcast_to(x[None], (n, *x.shape)), out_shardings=sharding
    )


def everywhere(fun: Callable[[Any], jax.Array], leaves: Any) -> jax.Array:
    """``fun`` of a tree of arrays with replicas, known on all of their devices.

    ``fun`` is jitted, and is to be a function of a module, traced but once.
    """
    meshes = {s.mesh for s in map(_mesh_sharding, jax.tree.leaves(leaves)) if s}
    if not meshes:
        return jax.jit(fun)(leaves)
    (mesh, *others) = meshes
    if others:
        raise ValueError(f"all leaves must lie on one mesh, got {mesh} and {others[0]}")
    # Without sharding in types: the replica axis is about to go.
    plain = Mesh(mesh.devices, mesh.axis_names)

    def placed(x: Any) -> Any:
        own = _mesh_sharding(x)
        return jax.device_put(x, NamedSharding(plain, own.spec)) if own else x

    # Waited for on all devices: on CPU more than 32 programs in flight, as a tree has
    # leaves, end in a deadlock of those that exchange.
    return jax.block_until_ready(_gathered(fun, plain)(jax.tree.map(placed, leaves)))


@functools.lru_cache(maxsize=64)
def _gathered(
    fun: Callable[..., jax.Array], mesh: Mesh, spec: PartitionSpec = _WHOLE
) -> Callable[..., jax.Array]:
    return jax.jit(fun, out_shardings=NamedSharding(mesh, spec))


def _mesh_sharding(x: Any) -> NamedSharding | None:
    sharding = getattr(x, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None


def local(x: jax.Array) -> jax.Array:
    """What each device has of ``x``, from the first of this process."""
    return x.addressable_data(0) if _mesh_sharding(x) else x


def _join(x: jax.Array) -> jax.Array:
    first = x[0]
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return first
    wide = widened(x)
    return (wide[0] + jnp.mean(wide - wide[:1], axis=0)).astype(x.dtype)


def workers_on(mesh: Mesh, axis_name: str, argument: str = "axis_name") -> int:
    """The size of a mesh axis; raises unless there is one of that name."""
    if not isinstance(mesh, Mesh):
        raise ValueError(f"mesh must be a jax.sharding.Mesh, got {mesh!r}")
    if axis_name not in mesh.shape:
        raise ValueError(
            f"{argument}={axis_name!r} is not an axis of the mesh, which has "
            f"{', '.join(map(repr, mesh.axis_names))}"
        )
    return mesh.shape[axis_name]


def check_replicas(name: str, tree: Any) -> int:
    """The number of replicas of ``tree``; raises unless all leaves have as many."""
    sizes = {jnp.shape(x)[0] for x in jax.tree.leaves(tree) if jnp.ndim(x)}
    n = min(sizes, default=0)
    many = f"{n} replicas" if n and len(sizes) == 1 else "the same number of replicas"
    check_leading_sizes(name, tree, lambda size: size == n and size > 0, many)
    return n


def check_leading_sizes(
    name: str, tree: Any, good: Callable[[int], bool], expected: str
) -> None:
    """Raises unless the first dimension of every leaf is as ``expected``."""
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        shape = jnp.shape(x)
        if not shape or not good(shape[0]):
            raise ValueError(
                f"{name}{jax.tree_util.keystr(path)} must have a leading axis of "
                f"{expected}, got shape {shape}"
            )
