"""What is stored beside the arrays of a state, and whether it fits another state.

A checkpoint's metadata are a JSON object; ``leaves`` has an entry for each leaf::

    {"format": 1, "step": 640, "workers": 8, "extra": {...},
     "selects": {"sync_every": "100", ...},  # settings of the exchange
     "structure": {"[1][0]": {"type": "MaskMomentumState"}, ...},
     "leaves": {"['w']": {
         "shape": [16, 4], "dtype": "float32",  # of one replica
         "once": false,  # whether all replicas are equal, and one is stored
         "checksums": [[1234, 5678], ...]}},  # two words for each stored replica
     "checksum": "0123456789abcdef"}  # of all of the above

A snapshot's metadata have ``structure``, ``leaves`` and ``extra``, too. Versions before
0.4 wrote no structure, and it is not compared where it is missing.
"""

import hashlib
import json
from typing import Any, TypeAlias

import chex
import jax
import jax.numpy as jnp
import optax

from slamb_jax._core.checks import check_integer, named_leaves, shown
from slamb_jax.checkpoint.files import DamagedCheckpointError, ForeignCheckpointError
from slamb_jax.workers import mesh as meshes

Metadata: TypeAlias = dict[str, Any]
"""A JSON object."""
Extra: TypeAlias = dict[str, Any] | None
"""What a user stores beside a state."""

# Dtypes that Orbax or a view of jax does not take, and others that hold their numbers.
_WIDER = {"int2": "int8", "int4": "int8", "uint2": "uint8", "uint4": "uint8"}
_WIDER |= {"float4_e2m1fn": "float16", "float8_e4m3": "float16"}
_MASKS = (optax.MaskedNode, optax.MaskedState)  # which another mask may change


def leaves_by_name(tree: chex.ArrayTree) -> dict[str, Any]:
    """The leaves of a tree, by their names in a checkpoint.

    Raises:
      ValueError: for an array of NumPy's whose numbers jax would cut to 32 bits.
    """
    for name, x in named_leaves("state", tree).items():
        if x.dtype != (held := jnp.result_type(x)):
            raise ValueError(
                f"{name} must have a dtype that jax holds, got {x.dtype}, which it "
                f"would cut to {held}: make it one of jax's if that is enough, put the "
                "number into extra, or set jax_enable_x64"
            )
    return {name or "state": x for name, x in named_leaves("", tree).items()}


def tree_of(arrays: dict[str, Any], like: chex.ArrayTree) -> chex.ArrayTree:
    """The tree of these arrays by name, with keys in place of their words."""
    words = [arrays[name] for name in leaves_by_name(like)]
    words = jax.tree.unflatten(jax.tree.structure(like), words)
    return jax.tree.map(lambda x, words: meshes.on_raw(lambda _: words, x), like, words)


def structure_by_name(tree: Any, name: str = "") -> dict[str, dict[str, str]]:
    """The types of the named tuples below the root of a tree, such as links' states.

    They tell optimizers apart whose arrays have the same names. Of the empty ones
    those count that a dictionary names: ``{"lion": EmptyState()}`` ends the state of
    :func:`slamb_jax.lion`, as ``optax.named_chain`` makes it.
    """
    types: dict[str, dict[str, str]] = {}
    children = jax.tree_util.tree_leaves_with_path(tree, lambda x: x is not tree)
    for path, x in children:
        if path:  # else the tree is a leaf
            named = isinstance(path[0], jax.tree_util.DictKey)
            empty = isinstance(x, _MASKS if named else (optax.EmptyState, *_MASKS))
            at = name + jax.tree_util.keystr(path)
            if hasattr(x, "_fields") and not empty:
                types[at] = {"type": type(x).__name__}
            types |= structure_by_name(x, at)
    return types


def layout(state: chex.ArrayTree) -> Metadata:
    """The metadata that a state must share with the checkpoint."""
    leaves = {}
    for name, x in leaves_by_name(state).items():
        shape = list(jnp.shape(meshes.raw(x))[1:])
        leaves[name] = {"shape": shape, "dtype": str(jnp.result_type(x))}
    return {"structure": structure_by_name(state), "leaves": leaves}


def dtype_of(leaf: Metadata) -> jnp.dtype:
    """The dtype of a leaf; of random keys that of their words."""
    return jnp.dtype("uint32" if leaf["dtype"].startswith("key<") else leaf["dtype"])


def widened(x: Any) -> Any:
    """An array as Orbax takes it: as it is, but for rare dtypes."""
    wide = _WIDER.get(x.dtype.name)
    return x if wide is None else x.astype(wide)


def describe(step: int, state: chex.ArrayTree, extra: Extra, **rest: Any) -> Metadata:
    """The metadata of a state, yet without a checksum; ``rest`` is the caller's.

    Raises:
      ValueError: for ``step`` out of range, and unless JSON can hold ``extra``.
    """
    check_integer("step", step, 0)
    try:
        json.dumps({**(extra or {})})
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"extra must be a dict that JSON can hold, got {shown(extra)}: {error}"
        ) from error
    return {"step": step, "extra": extra or {}} | layout(state) | rest


def with_checksum(metadata: Metadata) -> Metadata:
    """The metadata with a checksum of the rest, as JSON holds it."""
    rest = {k: x for k, x in metadata.items() if k != "checksum"}
    text = json.dumps(json.loads(json.dumps(rest)), sort_keys=True)  # keys are strings
    return rest | {"checksum": hashlib.sha256(text.encode()).hexdigest()[:16]}


def check_unchanged(metadata: Metadata, step: int) -> None:
    """Raises unless the metadata are those that were saved, under this step."""
    if metadata != with_checksum(metadata):
        raise changed("its metadata")
    if (saved := metadata.get("step", step)) != step:
        raise ForeignCheckpointError(
            f"it is step {saved} under another name, which it must have again"
        )


def changed(part: str) -> DamagedCheckpointError:
    """The error for a part that is not what was saved."""
    return DamagedCheckpointError(
        f"the checksum of {part} is not the one that was saved"
    )


def check_fits(what: str, saved: Metadata, like: chex.ArrayTree) -> None:
    """Raises unless the structure and leaves in the metadata are those of ``like``."""
    given = saved.get("structure", {}) | saved["leaves"]
    known = layout(like)
    expected = (known["structure"] if "structure" in saved else {}) | known["leaves"]
    wrong = [f"{name} is missing" for name in expected if name not in given]
    wrong += [f"{name} is not expected" for name in given if name not in expected]
    wrong += [
        f"{name} has {key} {given[name][key]}, expected {value}"
        for name in expected
        if name in given
        for key, value in expected[name].items()
        if given[name][key] != value
    ]
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise ValueError(
            f"{what} does not fit: {'; '.join(wrong[:5])}{more}: restore into the "
            "optimizer and model that were saved, with payload=None if they had it, "
            "and begin another with their parameters"
        )
