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
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from slamb_jax._rounding import hash_u32, hash_words
from slamb_jax.checkpoint.store import DamagedCheckpointError, Store, try_read
from slamb_jax.workers.agreement import checksums, differing
from slamb_jax.workers.mesh import (
    check_replicas,
    device_put_global,
    on_raw,
    raw,
    replicated,
)

FORMAT = 1
_CHECKSUM = "the checksum of {} is not the one that was saved"


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
    leaves: dict[str, Any], workers: int, rtol: float, *, copy: bool
) -> tuple[dict[str, jax.Array | np.ndarray], dict[str, dict[str, Any]]]:
    """The arrays to store for the replicas of each leaf, and their metadata.

    ``copy``: of arrays on devices, which the caller may donate before they are written.
    """
    sums = checksums(list(leaves.values()))
    unlike = differing(list(leaves.values()), sums, rtol)
    arrays: dict[str, jax.Array | np.ndarray] = {}
    stored: dict[str, dict[str, Any]] = {}
    for (name, x), apart, own in zip(leaves.items(), unlike, sums, strict=True):
        if apart:
            _check_count(name, x, f"{apart} of {workers}")
            arrays[name] = jnp.copy(raw(x)) if copy else raw(x)
        else:  # on the host: older jax cannot slice a replicated array for Orbax
            arrays[name] = np.asarray(replicated(_first, raw(x)))
            own = own[:1]
        stored[name] = {"once": not apart, "checksums": own.tolist()}
        stored[name] |= _shape_and_dtype(x)
    return arrays, stored


def _first(x: jax.Array) -> jax.Array:
    return x[0]


def _check_count(name: str, x: Any, apart: str) -> None:
    """Raises for an optimizer's count of steps that differs between workers."""
    if name.endswith(".count") and x.ndim == 1 and jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(
            f"state{name} must be the same on all workers, and {apart} have another "
            "than the first: a step was skipped on some of them only. Skip it on all "
            "with slamb_jax.skip_not_finite"
        )


def read_checkpoint(
    store: Store, step: int, like: Any = None, *, resized: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Reads metadata and replicas, placed like ``like``, or on the host without it.

    With ``resized`` a checkpoint of another number of workers is turned into that of
    ``like``; every process then reads all replicas.

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
        raise DamagedCheckpointError(_CHECKSUM.format("its metadata"))
    if like is None:
        return metadata, _read_leaves(store, step, metadata, None)
    n = _check_fits(metadata, like, path, resized=resized)
    leaves = leaves_by_name(jax.tree.map(jnp.asarray, like))
    if n == metadata["workers"]:
        return metadata, _read_leaves(store, step, metadata, leaves)
    stored, old = metadata["leaves"], _read_leaves(store, step, metadata, None)

    def new(name: str, words: Any) -> jax.Array:
        own = resize_leaf(name, old[name], n, keys=holds_keys(stored[name]))
        return device_put_global(own, words.sharding)

    return metadata, {k: on_raw(partial(new, k), x) for k, x in leaves.items()}


def _read_leaves(
    store: Store, step: int, metadata: dict[str, Any], like: dict[str, Any] | None
) -> dict[str, Any]:
    """Reads and verifies all replicas, placed like ``like``, or on the host."""
    workers, stored = metadata["workers"], metadata["leaves"]

    def template(name: str, leaf: dict[str, Any]) -> Any:
        dtype = jnp.dtype("uint32" if holds_keys(leaf) else leaf["dtype"])
        shape = [*leaf["shape"]] if leaf["once"] else [workers, *leaf["shape"]]
        if like is None or leaf["once"]:
            return np.broadcast_to(np.zeros((), dtype), shape)  # takes no memory
        return jax.ShapeDtypeStruct(shape, dtype, sharding=raw(like[name]).sharding)

    arrays = {name: template(name, leaf) for name, leaf in stored.items()}
    sized = {name: x for name, x in arrays.items() if x.size}  # others are not stored
    arrays |= try_read(store.directory / str(step), lambda: store.read(step, sized))

    def placed(name: str, words: Any = None) -> Any:
        if isinstance(x := arrays[name], jax.Array):
            return x
        x = np.broadcast_to(x, (workers, *stored[name]["shape"]))
        return x if words is None else device_put_global(x, words.sharding)

    if like is None:
        found = {name: placed(name) for name in stored}
    else:
        found = {name: on_raw(partial(placed, name), x) for name, x in like.items()}
    for name, sums in zip(found, checksums(list(found.values())), strict=True):
        if (sums != np.array(stored[name]["checksums"], np.uint32)).any():
            raise DamagedCheckpointError(_CHECKSUM.format(name))
    return found


def _check_fits(
    metadata: dict[str, Any], like: chex.ArrayTree, path: pathlib.Path, *, resized: bool
) -> int:
    """Returns the workers of ``like``; raises unless the checkpoint has its leaves."""
    n, found = check_replicas("like", like), metadata["leaves"]
    if metadata["workers"] != n and not resized:
        raise ValueError(
            f"checkpoint {path} is of {metadata['workers']} workers, expected {n}, to "
            f"which restore(like, workers={n}) resizes it; or on disk: "
            f"slamb-jax resize {path.parent} OUT --workers {n}"
        )
    expected = {k: _shape_and_dtype(x) for k, x in leaves_by_name(like).items()}
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
        raise ValueError(f"checkpoint {path} does not fit: {text}")
    return n


def _shape_and_dtype(x: Any) -> dict[str, Any]:
    """The metadata of a leaf that a state must share with the checkpoint."""
    return {"shape": list(jnp.shape(raw(x))[1:]), "dtype": str(jnp.result_type(x))}


def resize_leaf(name: str, x: Any, m: int, *, keys: bool) -> np.ndarray:
    """Turns the n replicas of a leaf, or the words of n keys, into m.

    Raises:
      ValueError: for a leaf that is not floating point and differs between workers.
    """
    x = np.asarray(x)
    if jnp.issubdtype(x.dtype, jnp.floating):
        return np.stack([_mean_of_overlap(x, j, m) for j in range(m)])
    if (x == x[:1]).all():
        return np.broadcast_to(x[:1], (m, *x.shape[1:])).copy()
    if keys:
        return _resized_words(x, m)
    if x.ndim == 1 and (x == np.arange(len(x))).all():
        return np.arange(m, dtype=x.dtype)
    raise ValueError(
        f"state{name} must be the same on all workers, or floating point, to "
        f"be resized, got {x.dtype} {x.tolist()!r:.60}"
    )


def _mean_of_overlap(x: np.ndarray, j: int, m: int) -> np.ndarray:
    """The mean of the old workers that new worker j overlaps, in units of 1/(n m)."""
    n = len(x)
    old = range(j * n // m, -(-(j + 1) * n // m))
    if len(old) == 1:
        return x[old[0]]
    overlap = [min((i + 1) * m, (j + 1) * n) - max(i * m, j * n) for i in old]
    wide = x[old[0] : old[-1] + 1].astype(np.float64)
    return np.average(wide, axis=0, weights=overlap).astype(x.dtype)


def _resized_words(words: np.ndarray, m: int) -> np.ndarray:
    """The words of n keys that differ, for m workers, no two of which share a key."""
    n, new = len(words), []
    for j in range(m):
        old = j * n // m
        shared = j > 0 and (j - 1) * n // m == old  # with the worker before
        own = words[old].astype(np.uint32)
        new.append(hash_u32(own, hash_words(j)) if shared else own)
    return np.stack(new)
