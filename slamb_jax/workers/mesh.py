"""Arrays on a mesh: put there, computed with there, and read from there."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from slamb_jax._axes import as_tuple
from slamb_jax.exchange import Exchange, check_exchange


def device_put_global(x: Any, sharding: NamedSharding) -> jax.Array:
    """Puts ``x``, which every process knows, on devices of all processes."""
    if sharding.is_fully_addressable or isinstance(x, jax.core.Tracer):
        return jax.device_put(x, sharding)

    def put(array: Any) -> jax.Array:
        known = np.asarray(array)
        return jax.make_array_from_callback(known.shape, sharding, lambda i: known[i])

    return on_raw(put, x)


def is_key(x: object) -> bool:
    """Whether a leaf is an array of typed random keys."""
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def raw(x: Any) -> Any:
    """The words of typed random keys; other leaves as they are."""
    return jax.random.key_data(x) if is_key(x) else x


def on_raw(fun: Callable[[Any], Any], x: Any) -> Any:
    """``fun`` of a leaf; of typed random keys, the keys with ``fun`` of their words."""
    out = fun(raw(x))
    if is_key(x):
        return jax.random.wrap_key_data(out, impl=jax.random.key_impl(x))
    return out


def replicated(fun: Callable[[Any], jax.Array], leaves: Any) -> jax.Array:
    """``fun`` of replicas, computed on all of their devices, and got from one of them.

    ``fun`` is jitted, and must be a function of a module, so that it is traced once.
    """
    mesh, leaves = on_one_mesh(leaves)
    if mesh is None:
        return jax.jit(fun)(leaves)
    everywhere = NamedSharding(mesh, PartitionSpec())
    # Waited for on all devices: on CPU more than 32 programs in flight, as a tree has
    # leaves, end in a deadlock of those that communicate.
    found = jax.block_until_ready(jax.jit(fun, out_shardings=everywhere)(leaves))
    return found.addressable_data(0)


def on_one_mesh(leaves: Any) -> tuple[Mesh | None, Any]:
    """The mesh with Auto axes of the leaves that lie on one, and all leaves on it."""
    meshes = {s.mesh for s in map(mesh_sharding, jax.tree.leaves(leaves)) if s}
    if not meshes:
        return None, leaves
    if len(meshes) > 1:
        one, other, *_ = meshes
        raise ValueError(f"all leaves must lie on one mesh, got {one} and {other}")
    mesh = auto_mesh(meshes.pop())

    def moved(x: Any) -> Any:
        own = mesh_sharding(x)
        return jax.device_put(x, NamedSharding(mesh, own.spec)) if own else x

    return mesh, jax.tree.map(moved, leaves)


def auto_mesh(mesh: Any) -> Mesh:
    """The mesh without sharding in types, where the replica axis may be dropped."""
    return Mesh(mesh.devices, mesh.axis_names)


def indexable_mesh(mesh: Mesh) -> Mesh:
    """The mesh with Auto axes, so that users may index arrays on it.

    With Explicit axes ``losses[0]`` is an error. Under ``jax.set_mesh`` the mesh stays.
    """
    return mesh if jax.sharding.get_abstract_mesh().axis_names else auto_mesh(mesh)


def mesh_sharding(x: Any) -> NamedSharding | None:
    """The sharding of an array that lies on a mesh."""
    sharding = getattr(x, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None


def workers_on(mesh: Mesh, exchange: Exchange) -> int:
    """The number of workers on a mesh; raises unless it has the exchange's axes."""
    check_exchange(exchange)
    if not isinstance(mesh, Mesh):
        raise ValueError(f"mesh must be a jax.sharding.Mesh, got {mesh!r}")
    if exchange.axis_name is None:
        raise ValueError(
            "exchange must name the mesh axis of the workers, got axis_name=None: "
            f"slamb_jax.Exchange({mesh.axis_names[0]!r})"
        )
    for argument in ("axis_name", "local_axis_name"):
        axes = getattr(exchange, argument)
        if any(a not in mesh.shape for a in as_tuple(axes)):
            raise ValueError(
                f"{argument}={axes!r} is not an axis of the mesh, which has "
                f"{', '.join(map(repr, mesh.axis_names))}"
            )
    return math.prod(mesh.shape[a] for a in as_tuple(exchange.axis_name))
