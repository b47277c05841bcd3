"""Random keys of the workers: which are each worker's own, and which are equal."""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import chex
import jax
import jax.numpy as jnp

from slamb_jax._core.axes import AxisName, worker_index
from slamb_jax.workers import mesh as meshes


def are_alike(tree: chex.ArrayTree) -> chex.ArrayTree:
    """For each leaf, whether it must begin equal on all workers: all but typed keys.

    Keys of an optimizer that act after the mean of the workers must, too, since all
    workers take the same step. Links say which of their state's fields do
    (``after_the_mean``), and in a chain all states behind such a link do.
    """
    return _alike(tree, seen=False)


def _alike(part: Any, *, seen: bool) -> Any:
    """Where ``seen``, a mean stands before this part in a chain."""
    if hasattr(type(part), "after_the_mean"):
        named, after = part._asdict().items(), part.after_the_mean()
        return part._replace(
            **{k: _all(x) if k in after else _alike(x, seen=seen) for k, x in named}
        )
    if seen and isinstance(part, tuple) and hasattr(part, "_fields"):
        return _all(part)  # the state of a transformation, and not a key of the user's
    # The states of a chain are a tuple, those of a named chain a dict in its order, and
    # those of a wrapper a named tuple, whose fields tell no order.
    if type(part) is tuple:
        return tuple(_in_turn(part, seen=seen))
    if type(part) in (dict, OrderedDict):
        values = _in_turn(part.values(), seen=seen)
        return type(part)(zip(part, values, strict=True))
    treedef: Any
    children, treedef = jax.tree.flatten(part, is_leaf=lambda x: x is not part)
    if len(children) == 1 and children[0] is part:
        return not meshes.is_key(part)
    return treedef.unflatten([_alike(x, seen=seen) for x in children])


def _in_turn(parts: Iterable[Any], *, seen: bool) -> list[Any]:
    """Of parts that follow each other: behind one with a mean all have seen it."""
    out = []
    for part in parts:
        has_mean = _has_mean(part)
        out.append(_alike(part, seen=seen and not has_mean))
        seen = seen or has_mean
    return out


def _all(part: Any) -> Any:
    return jax.tree.map(lambda _: True, part)


def _has_mean(part: Any) -> bool:
    def is_link(x: Any) -> bool:
        return hasattr(type(x), "after_the_mean")

    return any(map(is_link, jax.tree.leaves(part, is_leaf=is_link)))


def keys_of_workers(keys: jax.Array, numbers: jax.Array) -> jax.Array:
    """Keys of any shape, folded with the number of each worker: (n, ...)."""
    fold = jax.vmap(jax.vmap(jax.random.fold_in, (0, None)), (None, 0))
    folded = fold(keys.reshape(-1), numbers.astype(jnp.uint32))
    return folded.reshape(len(numbers), *keys.shape)


def own_key(key: jax.Array | None, axis_name: AxisName) -> tuple[jax.Array, ...]:
    """The arguments of a step after the batch: the worker's key, if there is one."""
    return () if key is None else (jax.random.fold_in(key, worker_index(axis_name)),)
