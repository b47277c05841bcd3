"""The format of a checkpoint: its metadata, and how its arrays are read."""

import hashlib
import json
import pathlib
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, TypedDict, cast

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from slamb_jax.checkpoint.resize_leaf import resize_leaf
from slamb_jax.checkpoint.store import Store, try_read
from slamb_jax.workers.checksums import checksums
from slamb_jax.workers.mesh import (
    auto_mesh,
    device_put_global,
    mesh_sharding,
    on_raw,
    raw,
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
    selects: dict[str, str]  # of the exchange: what is exchanged when; or nothing
    checksum: str  # of all of the above


def leaves_by_name(tree: chex.ArrayTree) -> dict[str, Any]:
    """The leaves of a tree, by their names in a checkpoint."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path) or "state": x for path, x in leaves}


def leaf_metadata(x: Any, sums: list[list[int]], *, once: bool) -> LeafMetadata:
    """The metadata of one leaf with a leading replica axis."""
    shape, dtype = list(jnp.shape(raw(x))[1:]), str(jnp.result_type(x))
    return LeafMetadata(shape=shape, dtype=dtype, once=once, checksums=sums)


def with_checksum(metadata: Mapping[str, Any]) -> Metadata:
    """The metadata with a checksum of the rest, as JSON holds it."""
    rest = {k: x for k, x in metadata.items() if k != "checksum"}
    text = json.dumps(json.loads(json.dumps(rest)), sort_keys=True)  # keys are strings
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return cast(Metadata, rest | {"checksum": digest})


def read_checkpoint(
    store: Store,
    step: int,
    like: chex.ArrayTree | None = None,
    *,
    resized: bool = False,
) -> tuple[tuple[Metadata, dict[str, Any]] | None, str]:
    """Metadata and replicas, placed like ``like`` or on the host; or None and damage.

    ``resized``: those of another number of workers are resized to that of ``like``.

    Raises:
      ValueError: for another version of the format, or if ``like`` does not fit.
    """
    path = store.path(step)
    metadata: Metadata | None
    metadata, problem = try_read(path, lambda: store.metadata(step))
    if metadata is None:
        return None, problem
    if metadata["format"] != FORMAT:
        raise ValueError(
            f"checkpoint {path} has format {metadata['format']}, and this version of "
            f"slamb_jax reads {FORMAT}"
        )
    if metadata != with_checksum(metadata):
        return None, "the checksum of its metadata is not the one that was saved"
    workers, stored = metadata["workers"], metadata["leaves"]
    if like is None:
        leaves = {name: _on_host(leaf, workers) for name, leaf in stored.items()}
    else:
        n = _check_fits(metadata, like, path, resized=resized)
        if workers != n:
            return _read_resized(store, step, like, n)
        leaves = leaves_by_name(jax.tree.map(jnp.asarray, like))
    what = {
        name: _stored_like(raw(x), stored[name]["once"])
        for name, x in leaves.items()
        if x.size  # what has no elements is not stored
    }
    arrays, problem = try_read(path, lambda: store.read(step, what))
    if arrays is None:
        return None, problem
    placed = {
        name: _place_like(arrays[name], x) if x.size else x
        for name, x in leaves.items()
    }
    for name, found in zip(placed, checksums(list(placed.values())), strict=True):
        if (found != np.array(stored[name]["checksums"], np.uint32)).any():
            return None, f"the checksum of {name} is not the one that was saved"
    return (metadata, placed), ""


def _read_resized(
    store: Store, step: int, like: chex.ArrayTree, workers: int
) -> tuple[tuple[Metadata, dict[str, Any]] | None, str]:
    """As :func:`read_checkpoint`; every process reads all replicas."""
    found, problem = read_checkpoint(store, step)
    if found is None:
        return None, problem
    metadata, arrays = found

    def placed(name: str, words: Any) -> Any:
        keys = holds_keys(metadata["leaves"][name])
        own = resize_leaf(name, np.asarray(arrays[name]), workers, keys=keys)
        on_mesh = mesh_sharding(words)
        return device_put_global(own, on_mesh) if on_mesh else jnp.asarray(own)

    leaves = leaves_by_name(jax.tree.map(jnp.asarray, like))
    new = {name: on_raw(partial(placed, name), x) for name, x in leaves.items()}
    return (metadata, new), ""


def _check_fits(
    metadata: Metadata, like: chex.ArrayTree, path: pathlib.Path, *, resized: bool
) -> int:
    """Raises unless a checkpoint holds what ``like`` expects; the workers of that."""
    n = check_replicas("like", like)
    if metadata["workers"] != n and not resized:
        raise ValueError(
            f"checkpoint {path} is of {metadata['workers']} workers, expected {n}, to "
            f"which restore(like, workers={n}) resizes it; or on disk: "
            f"slamb-jax resize {path.parent} OUT --workers {n}"
        )
    found = metadata["leaves"]
    leaves = leaves_by_name(like)
    expected = {name: leaf_metadata(x, [], once=False) for name, x in leaves.items()}
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
    return n


def holds_keys(leaf: LeafMetadata) -> bool:
    """Whether a leaf's words are those of random keys."""
    return leaf["dtype"].startswith("key<")


def _on_host(leaf: LeafMetadata, workers: int) -> np.ndarray:
    """An array with the shape and dtype of a leaf's words, which takes no memory."""
    dtype = "uint32" if holds_keys(leaf) else leaf["dtype"]
    return np.broadcast_to(np.zeros((), jnp.dtype(dtype)), (workers, *leaf["shape"]))


def _stored_like(x: Any, once: bool) -> Any:
    """What to read for a leaf: shape, dtype and place of what is stored for it."""
    if isinstance(x, np.ndarray):
        return x[0, ...] if once else x
    if not once:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    on_mesh = mesh_sharding(x)
    every = on_mesh and NamedSharding(auto_mesh(on_mesh.mesh), PartitionSpec())
    return jax.ShapeDtypeStruct(x.shape[1:], x.dtype, sharding=every or x.sharding)


def _place_like(x: Any, like: Any) -> Any:
    """A stored array with the replicas, sharding and key type of ``like``."""

    def placed(words: Any) -> Any:
        if x.ndim == words.ndim:
            return x
        if isinstance(x, np.ndarray):
            return np.broadcast_to(x, words.shape)
        if on_mesh := mesh_sharding(words):
            one = np.asarray(x.addressable_data(0))
            return device_put_global(np.broadcast_to(one, words.shape), on_mesh)
        return jnp.broadcast_to(x, words.shape)

    return on_raw(placed, like)
