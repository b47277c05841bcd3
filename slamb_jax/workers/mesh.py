"""Arrays on a mesh: put there, computed with there, and read from there."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from slamb_jax._tree.axes import AxisName, as_tuple
from slamb_jax.exchange.settings import Exchange, check_exchange

_REPLICATED = PartitionSpec()


def device_put_global(x: Any, sharding: NamedSharding) -> jax.Array:
    """Puts ``x``, which every process knows, on devices of all processes."""
    if sharding.is_fully_addressable:
        return jax.device_put(x, sharding)
    if is_key(x):
        return like_key(x, device_put_global(jax.random.key_data(x), sharding))
    known = np.asarray(x)
    return jax.make_array_from_callback(known.shape, sharding, lambda i: known[i])


def is_key(x: object) -> bool:
    """Whether a leaf is an array of typed random keys."""
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def like_key(key: jax.Array, bits: jax.Array) -> jax.Array:
    """Typed keys with these bits and the implementation of ``key``."""
    return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(key))


def replicated(fun: Callable[[Any], jax.Array], leaves: Any) -> jax.Array:
    """Computes ``fun`` of replicas, with the result on all of their devices.

    ``fun`` is jitted, and must be a function of a module, so that it is traced once.
    """
    mesh = common_mesh(jax.tree.leaves(leaves))
    if mesh is None:
        return jax.jit(fun)(leaves)
    # Waited for on all devices: on CPU more than 32 programs in flight, as a tree has
    # leaves, end in a deadlock of those that communicate.
    return jax.block_until_ready(jitted_onto(fun, mesh)(onto(mesh, leaves)))


def common_mesh(leaves: list[Any]) -> Mesh | None:
    """The mesh of all leaves that lie on one, with Auto axes; None without any."""
    meshes = {s.mesh for s in map(mesh_sharding, leaves) if s}
    if len(meshes) > 1:
        one, other, *_ = meshes
        raise ValueError(f"all leaves must lie on one mesh, got {one} and {other}")
    return auto_mesh(meshes.pop()) if meshes else None


def auto_mesh(mesh: Any) -> Mesh:
    """The mesh without sharding in types, where the replica axis may be dropped."""
    return Mesh(mesh.devices, mesh.axis_names)


def indexable_mesh(mesh: Mesh) -> Mesh:
    """The mesh with Auto axes, so that users may index arrays on it.

    With Explicit axes ``losses[0]`` is an error. Under ``jax.set_mesh`` the mesh stays.
    """
    return mesh if jax.sharding.get_abstract_mesh().axis_names else auto_mesh(mesh)


def onto(mesh: Mesh, leaves: Any) -> Any:
    """The leaves that lie on a mesh, on this one, which differs in axis types only."""

    def moved(x: Any) -> Any:
        own = mesh_sharding(x)
        return jax.device_put(x, NamedSharding(mesh, own.spec)) if own else x

    return jax.tree.map(moved, leaves)


def mesh_sharding(x: Any) -> NamedSharding | None:
    """The sharding of an array that lies on a mesh."""
    sharding = getattr(x, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None


def local(x: jax.Array) -> jax.Array:
    """The part of ``x`` on the first device of this process."""
    return x.addressable_data(0) if mesh_sharding(x) else x


@functools.lru_cache(maxsize=64)
def jitted_onto(
    fun: Callable[..., jax.Array], mesh: Mesh, spec: PartitionSpec = _REPLICATED
) -> Callable[..., jax.Array]:
    """``fun``, jitted, with its result sharded over the mesh."""
    return jax.jit(fun, out_shardings=NamedSharding(mesh, spec))


def size_on(mesh: Mesh, axis_name: AxisName | None) -> int:
    """The number of places along one or several axes of the mesh."""
    return int(np.prod([mesh.shape[a] for a in as_tuple(axis_name)], dtype=int))


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
    return size_on(mesh, exchange.axis_name)
