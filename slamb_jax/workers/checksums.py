"""Checksums of replicas, and of the copies that the devices of one replica hold."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from slamb_jax._rounding import hash_u32
from slamb_jax.workers.mesh import mesh_sharding, on_one_mesh, raw, replicated


def checksums(leaves: list[Any]) -> np.ndarray:
    """A 64-bit checksum of each replica of each leaf: uint32, (leaves, replicas, 2)."""
    return np.asarray(replicated(_checksums, list(map(raw, leaves))))


def differing_copies(leaves: list[Any]) -> list[list[int]]:
    """For each leaf, the replicas of which devices hold different copies.

    jax takes the copies of an unsharded array to be the same, and never looks: under
    ``check_vma=False`` it is the program that has to see to it.
    """
    unlike: list[set[int]] = [set() for _ in leaves]
    places = [
        i
        for i, x in enumerate(leaves)
        if (own := mesh_sharding(x))
        and own.num_devices * math.prod(own.shard_shape(x.shape)) > x.size
    ]
    mesh, arrays = on_one_mesh([raw(leaves[i]) for i in places])
    if mesh is None:
        return [[] for _ in leaves]
    specs = tuple(x.sharding.spec for x in arrays)
    sums = np.asarray(_on_each_device(mesh, specs)(arrays).addressable_data(0))
    for i, x in zip(places, arrays, strict=True):
        of_x, sums = np.split(sums, x.sharding.shard_shape(x.shape)[:1], axis=1)
        index_of = x.sharding.devices_indices_map(x.shape)
        first: dict[str, np.ndarray] = {}  # by part of the array
        for device, found in zip(mesh.devices.flat, of_x, strict=True):
            index = index_of[device]
            other = first.setdefault(str(index), found)
            start = index[0].start or 0
            unlike[i] |= set(start + np.flatnonzero((found != other).any(1)))
    return [sorted(map(int, replicas)) for replicas in unlike]


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


def _checksums(leaves: list[jax.Array]) -> jax.Array:
    return jnp.stack([_checksum(x) for x in leaves])


def _checksum(x: jax.Array) -> jax.Array:
    """Two sums of a hash of each element's bits and place, for each replica."""
    unsigned = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32)
    words = x.view(unsigned).astype(jnp.uint32).reshape(x.shape[0], -1)
    place = jnp.arange(words.shape[1], dtype=jnp.uint32) * np.uint32(0x9E3779B1)
    hashed = [hash_u32(words ^ np.uint32(s), place[None]) for s in (0, 0x9E3779B9)]
    return jnp.stack([jnp.sum(x, axis=1, dtype=jnp.uint32) for x in hashed], axis=1)
