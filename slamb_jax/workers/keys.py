"""Random keys of the workers: which are each worker's own, and which are equal."""

from collections.abc import Callable
from typing import Any, TypeAlias

import chex
import jax
import jax.numpy as jnp

from slamb_jax._core.axes import AxisName, worker_index
from slamb_jax._core.leaves import bool_for_each
from slamb_jax.workers import mesh as meshes

EqualKeys: TypeAlias = bool | chex.ArrayTree | Callable[[Any], Any] | None
"""Bools for a tree or a prefix of it, a function of the tree to those, or None."""


def begin_equal(tree: chex.ArrayTree, equal_keys: EqualKeys) -> chex.ArrayTree:
    """For each leaf, whether it begins equal on all workers: all but some typed keys.

    With None those keys do that are in a state of optax or of this library.
    """
    if equal_keys is None:
        return jax.tree.map(_by_type, tree, is_leaf=_is_named_tuple)
    return jax.tree.map(
        lambda x, equal: bool(equal) or not meshes.is_key(x),
        tree,
        bool_for_each("equal_keys", equal_keys, tree),
    )


def _by_type(part: Any) -> Any:
    if not _is_named_tuple(part):
        return not meshes.is_key(part)
    if type(part).__module__.startswith(("optax.", "slamb_jax.")):
        return jax.tree.map(lambda _: True, part)
    fields = begin_equal(tuple(part), None)
    if not all(jax.tree.leaves(fields)):
        raise ValueError(
            f"equal_keys must be given where a {type(part).__name__} holds a typed "
            "random key, got None: False if each worker is to draw its own numbers, as "
            "for dropout; True if the key is an optimizer's, whose workers must take "
            "the same step; or a tree of bools, such as (False, True) for (params, "
            "opt_state)"
        )
    return type(part)(*fields)


def _is_named_tuple(x: Any) -> bool:
    return isinstance(x, tuple) and hasattr(x, "_fields")


def keys_of_workers(keys: jax.Array, numbers: jax.Array) -> jax.Array:
    """Keys of any shape, folded with the number of each worker: (n, ...)."""
    fold = jax.vmap(jax.vmap(jax.random.fold_in, (0, None)), (None, 0))
    folded = fold(keys.reshape(-1), numbers.astype(jnp.uint32))
    return folded.reshape(len(numbers), *keys.shape)


def own_key(key: jax.Array | None, axis_name: AxisName) -> tuple[jax.Array, ...]:
    """The arguments of a step after the batch: the worker's key, if there is one."""
    return () if key is None else (jax.random.fold_in(key, worker_index(axis_name)),)
