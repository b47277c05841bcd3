"""Checksums of replicas, and of the copies that the devices of one replica hold."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from slamb_jax._tree.hashing import hash_u32
from slamb_jax._tree.layout import spec_axes
from slamb_jax.workers.mesh import (
    common_mesh,
    is_key,
    local,
    mesh_sharding,
    onto,
    replicated,
)


def checksums(leaves: list[Any]) -> np.ndarray:
    """A 64-bit checksum of each replica of each leaf: uint32, (leaves, replicas, 2)."""
    return np.asarray(local(replicated(_checksums, list(map(_bits, leaves)))))


def differing_copies(leaves: list[Any]) -> list[list[int]]:
    """For each leaf, the replicas of which devices hold different copies.

    jax takes the copies of an unsharded array to be the same, and never looks: under
    ``check_vma=False`` it is the program that has to see to it.
    """
    found: list[list[int]] = [[] for _ in leaves]
    places = [i for i, x in enumerate(leaves) if _has_copies(x)]
    if not places:
        return found
    mesh = common_mesh([leaves[i] for i in places])
    assert mesh is not None  # each of them lies on one
    arrays = onto(mesh, [_bits(leaves[i]) for i in places])
    specs = tuple(x.sharding.spec for x in arrays)
    rows = np.asarray(local(_on_each_device(mesh, specs)(arrays)))
    for i, x in zip(places, arrays, strict=True):
        r = x.sharding.shard_shape(x.shape)[0]
        found[i] = _unlike(x, mesh, rows[:, :r])
        rows = rows[:, r:]
    return found


def _unlike(x: jax.Array, mesh: Mesh, rows: np.ndarray) -> list[int]:
    """The replicas whose copies differ; ``rows`` are (devices, replicas of one, 2)."""
    first: dict[str, int] = {}
    unlike: set[int] = set()
    where = x.sharding.devices_indices_map(x.shape)
    for k, device in enumerate(mesh.devices.flat):
        index = where[device]
        other = first.setdefault(str(index), k)
        start = index[0].start or 0
        unlike |= {
            start + int(j) for j in np.flatnonzero((rows[k] != rows[other]).any(1))
        }
    return sorted(unlike)


def _has_copies(x: Any) -> bool:
    """Whether several devices hold the same part of an array."""
    own = mesh_sharding(x)
    if own is None:
        return False
    sharded = spec_axes(own.spec)
    return any(k > 1 and a not in sharded for a, k in own.mesh.shape.items())


@functools.lru_cache(maxsize=64)
def _on_each_device(
    mesh: Mesh, specs: tuple[PartitionSpec, ...]
) -> Callable[[list[jax.Array]], jax.Array]:
    """Checksums of what each device holds: (devices, replicas of all leaves, 2)."""
    own = jax.shard_map(
        lambda leaves: jnp.concatenate([_checksum(x) for x in leaves])[None],
        mesh=mesh,
        in_specs=(list(specs),),
        out_specs=PartitionSpec(mesh.axis_names),
        check_vma=False,
    )
    return jax.jit(own, out_shardings=NamedSharding(mesh, PartitionSpec()))


def _bits(x: Any) -> Any:
    return jax.random.key_data(x) if is_key(x) else x


def _checksums(leaves: list[jax.Array]) -> jax.Array:
    return jnp.stack([_checksum(x) for x in leaves])


def _checksum(x: jax.Array) -> jax.Array:
    """Two sums of a hash of each element's bits and place, for each replica."""
    words = _words(x).reshape(x.shape[0], -1)
    place = jnp.arange(words.shape[1], dtype=jnp.uint32) * np.uint32(0x9E3779B1)
    hashed = [hash_u32(words ^ np.uint32(s), place[None]) for s in (0, 0x9E3779B9)]
    return jnp.stack([jnp.sum(x, axis=1, dtype=jnp.uint32) for x in hashed], axis=1)


def _words(x: jax.Array) -> jax.Array:
    """The bits of ``x`` as uint32; where an element has 64, as two."""
    if x.dtype == bool:
        return x.astype(jnp.uint32)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], axis=-1)
    if x.dtype.itemsize == 8:
        return jax.lax.bitcast_convert_type(x, jnp.uint32)
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    return jax.lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)
