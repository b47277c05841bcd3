"""The format of a checkpoint: its metadata, and how its arrays are read.

The metadata are a JSON object; ``leaves`` has one entry for each leaf of the state::

    {"format": 1, "workers": 8, "extra": {...},
     "selects": {"sync_every": "100", ...},  # settings of the exchange
     "leaves": {"['w']": {
         "shape": [16, 4], "dtype": "float32",  # of one replica
         "once": false,  # whether all replicas are equal, and one is stored
         "checksums": [[1234, 5678], ...]}},  # two words for each stored replica
     "checksum": "0123456789abcdef"}  # of all of the above
"""

import hashlib
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from slamb_jax._core.checks import shown
from slamb_jax.checkpoint.resizing import resize_leaf
from slamb_jax.checkpoint.store import DamagedCheckpointError, Store, try_read
from slamb_jax.workers.agreement import checksums
from slamb_jax.workers.mesh import (
    check_replicas,
    device_put_global,
    on_raw,
    raw,
    replicated,
)

FORMAT = 1


def leaves_by_name(tree: chex.ArrayTree) -> dict[str, Any]:
    """The leaves of a tree, by their names in a checkpoint."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path) or "state": x for path, x in leaves}


def with_checksum(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata with a checksum of the rest, as JSON holds it."""
    rest = {k: x for k, x in metadata.items() if k != "checksum"}
    text = json.dumps(json.loads(json.dumps(rest)), sort_keys=True)  # keys are strings
    return rest | {"checksum": hashlib.sha256(text.encode()).hexdigest()[:16]}


def holds_keys(leaf: Mapping[str, Any]) -> bool:
    """Whether a leaf is stored as the words of random keys."""
    return leaf["dtype"].startswith("key<")


def pack(
    leaves: dict[str, Any],
) -> tuple[dict[str, jax.Array | np.ndarray], dict[str, dict[str, Any]]]:
    """The arrays to store for the replicas of each leaf, and their metadata."""
    arrays: dict[str, jax.Array | np.ndarray] = {}
    stored: dict[str, dict[str, Any]] = {}
    sums = checksums(list(leaves.values()))
    for (name, x), own in zip(leaves.items(), sums, strict=True):
        if once := bool((own == own[:1]).all()):
            # On the host: older jax cannot slice a replicated array for Orbax.
            arrays[name], own = np.asarray(replicated(_first, raw(x))), own[:1]
        else:
            arrays[name] = raw(x)
        stored[name] = {"once": once, "checksums": own.tolist()} | shape_and_dtype(x)
    return arrays, stored


def _first(x: jax.Array) -> jax.Array:
    return x[0]


def read_checkpoint(
    store: Store, step: int, like: Any = None, workers: int | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Reads metadata and replicas, placed like ``like``, or on the host without it.

    With the ``workers`` of ``like`` a checkpoint of another number is resized to them;
    every process then reads all replicas.

    Raises:
      DamagedCheckpointError: if files are missing, or differ from those saved.
      ValueError: for a checkpoint of another program or another version of the format,
        or if ``like`` does not fit.
    """
    path = store.directory / str(step)
    metadata = try_read(path, lambda: store.metadata(step))
    if "leaves" not in metadata:
        raise ValueError(
            f"checkpoint {path} could not be read: it is not one of "
            "slamb_jax.Checkpoints; it is kept"
        )
    if metadata["format"] != FORMAT:
        raise ValueError(
            f"checkpoint {path} has format {metadata['format']}, and this version of "
            f"slamb_jax reads {FORMAT}"
        )
    if metadata != with_checksum(metadata):
        raise _unlike_saved(path, "its metadata")
    if like is None:
        return metadata, _read_arrays(store, step, metadata, {})
    n = workers or metadata["workers"]
    _check_fits(path, metadata, like, n)
    leaves = leaves_by_name(jax.tree.map(jnp.asarray, like))
    shardings = {name: raw(x).sharding for name, x in leaves.items()}
    if n == metadata["workers"]:
        arrays = _read_arrays(store, step, metadata, shardings)
    else:
        arrays = _read_arrays(store, step, metadata, {})
        for name, leaf in metadata["leaves"].items():
            new = resize_leaf(name, arrays[name], n, keys=holds_keys(leaf))
            arrays[name] = device_put_global(new, shardings[name])

    def typed(name: str, x: jax.Array) -> jax.Array:
        return on_raw(lambda _: arrays[name], x)

    return metadata, {name: typed(name, x) for name, x in leaves.items()}


def _read_arrays(
    store: Store, step: int, metadata: dict[str, Any], shardings: dict[str, Any]
) -> dict[str, Any]:
    """Reads and verifies all replicas, placed by ``shardings``, or on the host."""
    path = store.directory / str(step)
    workers, stored = metadata["workers"], metadata["leaves"]

    def template(name: str, leaf: dict[str, Any]) -> Any:
        dtype = jnp.dtype("uint32" if holds_keys(leaf) else leaf["dtype"])
        shape = [*leaf["shape"]] if leaf["once"] else [workers, *leaf["shape"]]
        if leaf["once"] or not shardings:
            return np.broadcast_to(np.zeros((), dtype), shape)  # takes no memory
        return jax.ShapeDtypeStruct(shape, dtype, sharding=shardings[name])

    arrays = {name: template(name, leaf) for name, leaf in stored.items()}
    sized = {name: x for name, x in arrays.items() if x.size}  # others are not stored
    arrays |= try_read(path, lambda: store.read(step, sized))
    for name, leaf in stored.items():
        if leaf["once"]:
            x = np.broadcast_to(arrays[name], (workers, *leaf["shape"]))
            arrays[name] = device_put_global(x, shardings[name]) if shardings else x
    sums = checksums([arrays[name] for name in stored])
    for (name, leaf), found in zip(stored.items(), sums, strict=True):
        if (found != np.array(leaf["checksums"], np.uint32)).any():
            raise _unlike_saved(path, name)
    return arrays


def _unlike_saved(path: pathlib.Path, what: str) -> DamagedCheckpointError:
    problem = f"the checksum of {what} is not the one that was saved"
    return DamagedCheckpointError.at(path, problem)


def _check_fits(
    path: pathlib.Path, metadata: dict[str, Any], like: chex.ArrayTree, workers: int
) -> None:
    """Raises unless ``like`` has so many workers, and the leaves of the checkpoint."""
    if (n := check_replicas("like", like)) != workers:
        raise ValueError(
            f"checkpoint {path} is of {workers} workers, expected {n}, to which "
            f"restore(like, workers={n}) resizes it"
        )
    check_leaves(f"checkpoint {path}", metadata["leaves"], like)


def check_leaves(what: str, found: dict[str, Any], like: chex.ArrayTree) -> None:
    """Raises unless the leaves that were saved are those of ``like``."""
    expected = {k: shape_and_dtype(x) for k, x in leaves_by_name(like).items()}
    wrong = [f"{name} is missing" for name in expected if name not in found]
    wrong += [f"{name} is not expected" for name in found if name not in expected]
    wrong += [
        f"{name} has {key} {found[name][key]}, expected {value}"
        for name in expected
        for key, value in expected[name].items()
        if name in found and found[name][key] != value
    ]
    if wrong:
        text = "; ".join(wrong[:5])
        text += f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise ValueError(f"{what} does not fit: {text}")


def check_extra(extra: dict[str, Any] | None) -> dict[str, Any]:
    """``extra``, or an empty one; raises unless JSON can hold it."""
    try:
        json.dumps({**(extra or {})})
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"extra must be a dict that JSON can hold, got {shown(extra)}: {error}"
        ) from error
    return extra or {}


def shape_and_dtype(x: Any) -> dict[str, Any]:
    """The metadata of a leaf that a state must share with the checkpoint."""
    return {"shape": list(jnp.shape(raw(x))[1:]), "dtype": str(jnp.result_type(x))}
