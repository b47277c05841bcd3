"""What a checkpoint says of itself, and of each leaf."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from slamb_jax._agree import checksums
from slamb_jax._replicas import check_replicas, is_key

FORMAT = 1


def check_format(about: dict[str, Any], where: Any) -> None:
    """Raises for a checkpoint of another version of the format."""
    if about["format"] != FORMAT:
        raise ValueError(
            f"checkpoint {where} has format {about['format']}, and this version of "
            f"slamb_jax reads {FORMAT}"
        )


def check_fits(about: dict[str, Any], like: chex.ArrayTree, where: Any) -> None:
    """Raises unless a checkpoint holds what ``like`` expects; says what differs."""
    check_format(about, where)
    n = check_replicas("like", like)
    if about["workers"] != n:
        raise ValueError(
            f"checkpoint {where} is of {about['workers']} workers, expected {n}: "
            f"slamb-jax resize {where.parent} OUT --workers {n}"
        )
    there = about["leaves"]
    here = {name: described(x, [], once=False) for name, x in named(like).items()}
    differences = [
        *(f"{name} is missing" for name in here if name not in there),
        *(f"{name} is not expected" for name in there if name not in here),
    ]
    for name in (name for name in here if name in there):
        for what in ("shape", "dtype"):
            if there[name][what] != here[name][what]:
                differences.append(
                    f"{name} has {what} {there[name][what]}, expected "
                    f"{here[name][what]}"
                )
    if differences:
        more = f" and {len(differences) - 5} more" if len(differences) > 5 else ""
        raise ValueError(
            f"checkpoint {where} does not fit: {'; '.join(differences[:5])}{more}"
        )


def damage(about: dict[str, Any], leaves: dict[str, Any]) -> str:
    """Which leaf is not what was saved, by its checksums; empty if all are."""
    for name, found in zip(leaves, checksums(list(leaves.values())), strict=True):
        if (found != np.array(about["leaves"][name]["checksums"], np.uint32)).any():
            return f"the checksum of {name} is not the one that was saved"
    return ""


def named(tree: chex.ArrayTree) -> dict[str, Any]:
    """The leaves of a tree by the names that a checkpoint has for them."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path) or "state": x for path, x in leaves}


def bits(x: Any) -> Any:
    """A leaf as it is written: random keys as their words."""
    return jax.random.key_data(x) if is_key(x) else x


def described(x: Any, sums: Any, *, once: bool) -> dict[str, Any]:
    """What a checkpoint says of one leaf; the shape is that of one replica's bits."""
    return {
        "shape": list(jnp.shape(bits(x))[1:]),
        "dtype": str(x.dtype) if is_key(x) else str(jnp.result_type(x)),
        "once": once,
        "checksums": [[int(word) for word in words] for words in sums],
    }


def first(x: jax.Array) -> jax.Array:
    """The first replica."""
    return x[0]


def as_written(x: Any, *, once: bool) -> Any:
    """Shape, dtype and place of a leaf as a checkpoint has it."""
    x = jnp.asarray(x) if not isinstance(x, jax.Array) else x
    if not once:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    sharding = x.sharding
    if isinstance(sharding, NamedSharding):
        mesh = Mesh(sharding.mesh.devices, sharding.mesh.axis_names)
        sharding = NamedSharding(mesh, PartitionSpec())
    return jax.ShapeDtypeStruct(x.shape[1:], x.dtype, sharding=sharding)


def placed(found: jax.Array, like: Any) -> Any:
    """A leaf as it was read, with replicas and place of ``like``."""
    if is_key(like):
        words = placed(found, jax.random.key_data(like))
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(like))
    if found.ndim == jnp.ndim(like):
        return found
    if isinstance(like, jax.Array) and isinstance(like.sharding, NamedSharding):
        one = np.asarray(found.addressable_data(0))
        return jax.make_array_from_callback(
            like.shape, like.sharding, lambda i: np.broadcast_to(one, like.shape)[i]
        )
    return jnp.broadcast_to(found, jnp.shape(like))


def blank(leaf: dict[str, Any], about: dict[str, Any]) -> np.ndarray:
    """An array of a leaf's shape and dtype as it is written, that takes no memory."""
    dtype = "uint32" if leaf["dtype"].startswith("key<") else leaf["dtype"]
    lead = [] if leaf["once"] else [about["workers"]]
    return np.broadcast_to(np.zeros((), jnp.dtype(dtype)), (*lead, *leaf["shape"]))


def with_replicas(arrays: dict[str, Any], about: dict[str, Any]) -> dict[str, Any]:
    """Arrays as they are written, each with a leading replica axis."""
    once = {name: leaf["once"] for name, leaf in about["leaves"].items()}
    return {
        name: np.broadcast_to(x, (about["workers"], *x.shape)) if once[name] else x
        for name, x in arrays.items()
    }
