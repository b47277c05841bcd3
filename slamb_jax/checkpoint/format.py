"""The format of a checkpoint: its metadata, and its arrays as they are stored."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from slamb_jax.workers.checksums import checksums
from slamb_jax.workers.mesh import (
    auto_mesh,
    device_put_global,
    is_key,
    like_key,
    local,
    mesh_sharding,
)
from slamb_jax.workers.replicas import check_replicas

FORMAT = 1
_MUST_FIT: tuple[Literal["shape", "dtype"], ...] = ("shape", "dtype")


class LeafMetadata(TypedDict):
    """What a checkpoint tells about one leaf."""

    shape: list[int]  # of one replica
    dtype: str
    once: bool  # whether all replicas are equal, and one is stored
    checksums: list[list[int]]  # two words for each stored replica


class Metadata(TypedDict):
    """What a checkpoint tells about itself."""

    format: int
    workers: int
    leaves: dict[str, LeafMetadata]
    extra: dict[str, Any]


def leaves_by_name(tree: chex.ArrayTree) -> dict[str, Any]:
    """The leaves of a tree, by their names in a checkpoint."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path) or "state": x for path, x in leaves}


def raw(x: Any) -> Any:
    """The array that is stored for a leaf: the words of random keys."""
    return jax.random.key_data(x) if is_key(x) else x


def leaf_metadata(
    x: Any, sums: np.ndarray | Sequence[Sequence[int]], *, once: bool
) -> LeafMetadata:
    """The metadata of one leaf with a leading replica axis."""
    return LeafMetadata(
        shape=list(jnp.shape(raw(x))[1:]),
        dtype=str(x.dtype) if is_key(x) else str(jnp.result_type(x)),
        once=once,
        checksums=[[int(word) for word in words] for words in sums],
    )


def check_format(metadata: Metadata, path: pathlib.Path) -> None:
    """Raises for a checkpoint of another version of the format."""
    if metadata["format"] != FORMAT:
        raise ValueError(
            f"checkpoint {path} has format {metadata['format']}, and this version of "
            f"slamb_jax reads {FORMAT}"
        )


def check_fits(metadata: Metadata, like: chex.ArrayTree, path: pathlib.Path) -> None:
    """Raises unless a checkpoint holds what ``like`` expects, and names differences."""
    check_format(metadata, path)
    n = check_replicas("like", like)
    if metadata["workers"] != n:
        raise ValueError(
            f"checkpoint {path} is of {metadata['workers']} workers, expected {n}: "
            f"slamb-jax resize {path.parent} OUT --workers {n}"
        )
    found = metadata["leaves"]
    expected = {
        name: leaf_metadata(x, [], once=False)
        for name, x in leaves_by_name(like).items()
    }
    differences = []
    for name in expected | found:
        if name not in found:
            differences.append(f"{name} is missing")
        elif name not in expected:
            differences.append(f"{name} is not expected")
        else:
            differences += [
                f"{name} has {key} {found[name][key]}, expected {expected[name][key]}"
                for key in _MUST_FIT
                if found[name][key] != expected[name][key]
            ]
    if differences:
        more = f" and {len(differences) - 5} more" if len(differences) > 5 else ""
        raise ValueError(
            f"checkpoint {path} does not fit: {'; '.join(differences[:5])}{more}"
        )


def find_damage(metadata: Metadata, leaves: Mapping[str, Any]) -> str:
    """Names a leaf whose checksums are not those that were saved; empty without one."""
    for name, found in zip(leaves, checksums(list(leaves.values())), strict=True):
        if (found != np.array(metadata["leaves"][name]["checksums"], np.uint32)).any():
            return f"the checksum of {name} is not the one that was saved"
    return ""


def first_replica(x: jax.Array) -> jax.Array:
    """The first replica."""
    return x[0]


def stored_struct(x: Any, *, once: bool) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding with which to read what is stored for a leaf."""
    x = jnp.asarray(x) if not isinstance(x, jax.Array) else x
    if not once:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    on_mesh = mesh_sharding(x)
    every = on_mesh and NamedSharding(auto_mesh(on_mesh.mesh), PartitionSpec())
    return jax.ShapeDtypeStruct(x.shape[1:], x.dtype, sharding=every or x.sharding)


def place_like(x: jax.Array, like: Any) -> jax.Array:
    """A stored array with the replicas, sharding and key type of ``like``."""
    if is_key(like):
        return like_key(like, place_like(x, raw(like)))
    if x.ndim == jnp.ndim(like):
        return x
    if on_mesh := mesh_sharding(like):
        one = np.asarray(local(x))
        return device_put_global(np.broadcast_to(one, like.shape), on_mesh)
    return jnp.broadcast_to(x, jnp.shape(like))


def abstract_array(leaf: LeafMetadata, workers: int) -> np.ndarray:
    """An array with the shape and dtype of what is stored, which takes no memory."""
    dtype = "uint32" if leaf["dtype"].startswith("key<") else leaf["dtype"]
    lead = [] if leaf["once"] else [workers]
    return np.broadcast_to(np.zeros((), jnp.dtype(dtype)), (*lead, *leaf["shape"]))


def broadcast_replicas(x: np.ndarray, leaf: LeafMetadata, workers: int) -> np.ndarray:
    """A stored array, with a leading axis of all replicas."""
    return np.broadcast_to(x, (workers, *x.shape)) if leaf["once"] else x
