"""The format of a checkpoint: its metadata, and how its arrays are read.

The metadata are a JSON object; ``leaves`` has one entry for each leaf of the state::

    {"format": 1, "workers": 8, "extra": {...},
     "selects": {"sync_every": "100", ...},  # settings of the exchange
     "states": {"[1][0]": "MaskMomentumState", ...},  # not before 0.3
     "leaves": {"['w']": {
         "shape": [16, 4], "dtype": "float32",  # of one replica
         "once": false,  # whether all replicas are equal, and one is stored
         "checksums": [[1234, 5678], ...]}},  # two words for each stored replica
     "checksum": "0123456789abcdef"}  # of all of the above
"""

import hashlib
import json
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from slamb_jax._core.checks import shown
from slamb_jax.checkpoint.resizing import resize_leaf
from slamb_jax.checkpoint.store import Store, damaged_at, try_read
from slamb_jax.workers import mesh as meshes
from slamb_jax.workers.agreement import checksums
from slamb_jax.workers.mesh import raw

FORMAT = 1
_UNLIKE = "the checksum of {} is not the one that was saved"
_OF_ANY = (optax.EmptyState, optax.MaskedNode, optax.MaskedState)  # tell nothing


def leaves_by_name(tree: chex.ArrayTree) -> dict[str, Any]:
    """The leaves of a tree, by their names in a checkpoint."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path) or "state": x for path, x in leaves}


def states_by_name(tree: Any, at: str = "") -> dict[str, str]:
    """The types of the named tuples below the root of a tree, such as links' states.

    They tell optimizers apart whose arrays have the same names.
    """

    def is_state(x: Any) -> bool:
        return x is not tree and hasattr(x, "_fields")

    found: dict[str, str] = {}
    for path, x in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_state):
        if is_state(x):
            name = at + jax.tree_util.keystr(path)
            if not isinstance(x, _OF_ANY):
                found[name] = type(x).__name__
            found |= states_by_name(x, name)
    return found


def tree_of(arrays: dict[str, Any], like: chex.ArrayTree) -> Any:
    """The tree of these arrays by name, with keys in place of their words."""
    leaves = [
        meshes.on_raw(lambda _, name=name: arrays[name], x)  # type: ignore[misc]
        for name, x in leaves_by_name(like).items()
    ]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def shape_and_dtype(x: Any) -> dict[str, Any]:
    """The metadata of a leaf that a state must share with the checkpoint."""
    return {"shape": list(jnp.shape(raw(x))[1:]), "dtype": str(jnp.result_type(x))}


def dtype_of(leaf: dict[str, Any]) -> jnp.dtype:
    """The dtype in which a leaf is stored: of random keys, that of their words."""
    return jnp.dtype("uint32" if _holds_keys(leaf) else leaf["dtype"])


def _holds_keys(leaf: dict[str, Any]) -> bool:
    return leaf["dtype"].startswith("key<")


def with_checksum(metadata: dict[str, Any]) -> dict[str, Any]:
    """The metadata with a checksum of the rest, as JSON holds it."""
    rest = {k: x for k, x in metadata.items() if k != "checksum"}
    text = json.dumps(json.loads(json.dumps(rest)), sort_keys=True)  # keys are strings
    return rest | {"checksum": hashlib.sha256(text.encode()).hexdigest()[:16]}


def pack(leaves: dict[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The arrays to store for the replicas of each leaf, and their metadata."""
    arrays: dict[str, Any] = {}
    stored: dict[str, dict[str, Any]] = {}
    sums = checksums(list(leaves.values()))
    for (name, x), of_leaf in zip(leaves.items(), sums, strict=True):
        arrays[name] = raw(x)
        if once := bool((of_leaf == of_leaf[:1]).all()):
            # On the host: older jax cannot slice a replicated array for Orbax.
            arrays[name] = np.asarray(meshes.replicated(_first, raw(x)))
            of_leaf = of_leaf[:1]
        stored[name] = {"once": once, "checksums": of_leaf.tolist()}
        stored[name] |= shape_and_dtype(x)
    return arrays, stored


def _first(x: jax.Array) -> jax.Array:
    return x[0]


def read_metadata(store: Store, step: int) -> dict[str, Any]:
    """The metadata of a checkpoint.

    Raises:
      DamagedCheckpointError: if files are missing, or differ from those saved.
      ValueError: for a checkpoint of another program or version of the format.
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
        raise damaged_at(path, _UNLIKE.format("its metadata"))
    return metadata


def read_state(
    store: Store, step: int, like: chex.ArrayTree, workers: int | None
) -> tuple[dict[str, Any], Any]:
    """The metadata of a checkpoint, and its state, placed like ``like``.

    With the ``workers`` of ``like`` a checkpoint of another number is resized to them;
    every process then reads all replicas. Raises a ValueError if ``like`` does not fit,
    and the errors of :func:`read_metadata`.
    """
    metadata = read_metadata(store, step)
    saved, what = metadata["workers"], f"checkpoint {store.directory / str(step)}"
    n = meshes.check_replicas("like", like)
    if n != (workers or saved):
        raise ValueError(
            f"{what} is of {saved} workers, expected {n}, to which "
            f"restore(like, workers={n}) resizes it"
        )
    check_fits(what, metadata, like)
    leaves = leaves_by_name(jax.tree.map(jnp.asarray, like))
    shardings = {name: raw(x).sharding for name, x in leaves.items()}
    arrays = read_arrays(store, step, metadata, shardings if n == saved else {})
    if n != saved:
        for name, leaf in metadata["leaves"].items():
            new = resize_leaf(name, arrays[name], n, keys=_holds_keys(leaf))
            arrays[name] = meshes.device_put_global(new, shardings[name])
    return metadata, tree_of(arrays, like)


def read_arrays(
    store: Store, step: int, metadata: dict[str, Any], shardings: dict[str, Any]
) -> dict[str, Any]:
    """Reads and verifies all replicas, placed by ``shardings``, or on the host."""
    path = store.directory / str(step)
    workers, stored = metadata["workers"], metadata["leaves"]

    def template(name: str, leaf: dict[str, Any]) -> Any:
        shape = [*leaf["shape"]] if leaf["once"] else [workers, *leaf["shape"]]
        if leaf["once"] or not shardings:
            return np.broadcast_to(np.zeros((), dtype_of(leaf)), shape)  # no memory
        return jax.ShapeDtypeStruct(shape, dtype_of(leaf), sharding=shardings[name])

    arrays = {name: template(name, leaf) for name, leaf in stored.items()}
    sized = {name: x for name, x in arrays.items() if x.size}  # others are not stored
    arrays |= try_read(path, lambda: store.read(step, sized))
    for name, leaf in stored.items():
        if leaf["once"]:
            x = np.broadcast_to(arrays[name], (workers, *leaf["shape"]))
            there = shardings.get(name)
            arrays[name] = meshes.device_put_global(x, there) if there else x
    sums = checksums([arrays[name] for name in stored])
    for (name, leaf), of_leaf in zip(stored.items(), sums, strict=True):
        if (of_leaf != np.array(leaf["checksums"], np.uint32)).any():
            raise damaged_at(path, _UNLIKE.format(name))
    return arrays


def check_fits(what: str, about: dict[str, Any], like: chex.ArrayTree) -> None:
    """Raises unless the states and leaves in the metadata are those of ``like``."""
    now = states_by_name(like)
    was = about.get("states", now)
    wrong = [
        f"{name} is {was.get(name, 'no state')}, expected {now.get(name, 'none')}"
        for name in was | now
        if was.get(name) != now.get(name)
    ]
    way_out = ""
    if wrong:
        way_out = (
            ": restore into the optimizer that was saved, and begin another with its "
            "parameters"
        )
    saved = about["leaves"]
    expected = {k: shape_and_dtype(x) for k, x in leaves_by_name(like).items()}
    wrong += [f"{name} is missing" for name in expected if name not in saved]
    wrong += [f"{name} is not expected" for name in saved if name not in expected]
    wrong += [
        f"{name} has {key} {saved[name][key]}, expected {value}"
        for name in expected
        for key, value in expected[name].items()
        if name in saved and saved[name][key] != value
    ]
    if wrong:
        text = "; ".join(wrong[:5])
        text += f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise ValueError(f"{what} does not fit: {text}{way_out}")


def check_extra(extra: dict[str, Any] | None) -> dict[str, Any]:
    """``extra``, or an empty one; raises unless JSON can hold it."""
    try:
        json.dumps({**(extra or {})})
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"extra must be a dict that JSON can hold, got {shown(extra)}: {error}"
        ) from error
    return extra or {}
