"""What is stored beside the arrays of a state, and whether it fits another state.

A checkpoint's metadata are a JSON object::

    {"format": 2, "step": 640, "workers": 8, "extra": {...},
     "structure": {"[1][0]": "MaskMomentumState", ...},
     "leaves": {"['w']": "float32[16,4]", ...},  # of one replica
     "checksums": {"['w']": [[1234, 5678], ...], ...},  # of each stored replica
     "checksum": "0123456789abcdef"}  # of all of the above

One replica is stored where all are equal. A snapshot's metadata have no ``checksums``.
"""

import hashlib
import json
from typing import Any, TypeAlias

import chex
import jax
import jax.numpy as jnp
import optax

from slamb_jax._core.checks import check_integer, named_leaves, shown
from slamb_jax.checkpoint.files import DamagedCheckpointError
from slamb_jax.workers import mesh as meshes

#: A JSON object.
Metadata: TypeAlias = dict[str, Any]
#: What a user stores beside a state.
Extra: TypeAlias = dict[str, Any] | None

_FORMAT = 2
_MASKS = (optax.MaskedNode, optax.MaskedState)  # which another mask may change


def leaves_by_name(tree: chex.ArrayTree) -> dict[str, Any]:
    """The leaves of a tree, by their names in a checkpoint.

    Raises:
      ValueError: for an array of NumPy's whose numbers jax would cut to 32 bits.
    """
    for name, x in named_leaves("state", tree).items():
        if x.dtype != (held := jnp.result_type(x)):
            raise ValueError(
                f"{name} must have a dtype that jax holds, got {x.dtype}: make it "
                f"{held}, put the number into extra, or set jax_enable_x64"
            )
    return {name or "state": x for name, x in named_leaves("", tree).items()}


def tree_of(arrays: dict[str, Any], like: chex.ArrayTree) -> chex.ArrayTree:
    """The tree of these arrays by name, with keys in place of their words."""
    words = [arrays[name] for name in leaves_by_name(like)]
    words = jax.tree.unflatten(jax.tree.structure(like), words)
    return jax.tree.map(lambda x, words: meshes.on_raw(lambda _: words, x), like, words)


def structure_by_name(tree: Any, name: str = "") -> dict[str, str]:
    """The types of the named tuples below the root of a tree, such as links' states.

    They tell optimizers apart whose arrays have the same names. Of the empty ones
    those count that a dictionary names: ``{"lion": EmptyState()}`` ends the state of
    :func:`slamb_jax.lion`, as ``optax.named_chain`` makes it.
    """
    types: dict[str, str] = {}
    children = jax.tree_util.tree_leaves_with_path(tree, lambda x: x is not tree)
    for path, x in children:
        if path:  # else the tree is a leaf
            named = isinstance(path[0], jax.tree_util.DictKey)
            empty = isinstance(x, _MASKS if named else (optax.EmptyState, *_MASKS))
            at = name + jax.tree_util.keystr(path)
            if hasattr(x, "_fields") and not empty:
                types[at] = type(x).__name__
            types |= structure_by_name(x, at)
    return types


def layout(state: chex.ArrayTree) -> Metadata:
    """The metadata that a state must share with the checkpoint."""
    leaves = {}
    for name, x in leaves_by_name(state).items():
        shape = ",".join(map(str, jnp.shape(meshes.raw(x))[1:]))
        leaves[name] = f"{jnp.result_type(x)}[{shape}]"
    return {"structure": structure_by_name(state), "leaves": leaves}


def describe(step: int, state: chex.ArrayTree, extra: Extra, **rest: Any) -> Metadata:
    """The metadata of a state; ``rest`` is the caller's.

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
    about = {"format": _FORMAT, "step": step, "extra": extra or {}}
    return with_checksum(about | layout(state) | rest)


def with_checksum(metadata: Metadata) -> Metadata:
    """The metadata with a checksum of the rest, as JSON holds it."""
    rest = {k: x for k, x in metadata.items() if k != "checksum"}
    text = json.dumps(json.loads(json.dumps(rest)), sort_keys=True)  # keys are strings
    return rest | {"checksum": hashlib.sha256(text.encode()).hexdigest()[:16]}


def check_unchanged(metadata: Metadata, step: int) -> None:
    """Raises unless the metadata are those that were saved, under this step."""
    if (found := metadata.get("format")) != _FORMAT:
        raise DamagedCheckpointError(
            f"it has format {found}, and this version of slamb_jax reads {_FORMAT}"
        )
    if metadata != with_checksum(metadata | {"step": step}):
        raise changed(f"its metadata, as step {step},")


def changed(part: str) -> DamagedCheckpointError:
    """The error for a part that is not what was saved."""
    return DamagedCheckpointError(
        f"the checksum of {part} is not the one that was saved"
    )


def check_fits(what: str, saved: Metadata, like: chex.ArrayTree) -> None:
    """Raises unless the structure and leaves in the metadata are those of ``like``."""
    given, expected = (x["structure"] | x["leaves"] for x in (saved, layout(like)))
    wrong = [
        f"{name} is {given.get(name, 'missing')}, expected {kind}"
        for name, kind in expected.items()
        if given.get(name) != kind
    ]
    wrong += [f"{name} is not expected" for name in given if name not in expected]
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise ValueError(
            f"{what} does not fit: {'; '.join(wrong[:5])}{more}: restore into the "
            "optimizer and model that were saved, with payload=None if they had it"
        )
