"""Numbering the leaves of a tree, so that every link names them alike."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import chex
import jax


@dataclasses.dataclass(frozen=True)
class Leaf:
    """What a selection may know of a leaf: static, and the same on every worker.

    Attributes:
      index: position in the order of ``jax.tree.leaves``.
      offset: number of elements in the leaves before this one.
      shape: shape of the leaf.
      total: number of elements in the whole tree.
    """

    index: int
    offset: int
    shape: tuple[int, ...]
    total: int

    @property
    def size(self) -> int:
        """Number of elements of the leaf."""
        return math.prod(self.shape)


def flatten_numbered(
    tree: chex.ArrayTree, like: chex.ArrayTree | None = None
) -> tuple[list[Leaf | None], list[Any], Any]:
    """Flattens ``tree`` and numbers its leaves as ``like`` (or itself) has them.

    ``None`` counts as a leaf of ``tree``, with ``None`` for its number: a gradient
    that is missing must not shift the numbers of those behind it. ``like`` is the
    parameters, where the caller has them.
    """
    treedef: Any
    values, treedef = jax.tree.flatten(tree, is_leaf=lambda x: x is None)
    models = values if like is None else treedef.flatten_up_to(like)
    total = sum(x.size for x in jax.tree.leaves(models))
    leaves: list[Leaf | None] = []
    index = offset = 0
    for value, model in zip(values, models, strict=True):
        leaf = None if value is None else Leaf(index, offset, value.shape, total)
        leaves.append(leaf)
        below = jax.tree.leaves(model)
        index += len(below)
        offset += sum(x.size for x in below)
    return leaves, values, treedef


def map_numbered(
    fn: Callable[..., Any],
    tree: chex.ArrayTree,
    *rest: chex.ArrayTree,
    like: chex.ArrayTree | None = None,
) -> chex.ArrayTree:
    """``jax.tree.map`` whose function also gets the :class:`Leaf`; None stays None."""
    leaves, values, treedef = flatten_numbered(tree, like)
    columns = [treedef.flatten_up_to(r) for r in rest]
    out = [
        None if leaf is None else fn(leaf, x, *others)
        for leaf, x, *others in zip(leaves, values, *columns, strict=True)
    ]
    return treedef.unflatten(out)


def map_present(
    fn: Callable[..., Any], tree: chex.ArrayTree, *rest: Any
) -> chex.ArrayTree:
    """``jax.tree.map`` that leaves None where ``tree`` has None."""
    return jax.tree.map(
        lambda x, *others: None if x is None else fn(x, *others),
        tree,
        *rest,
        is_leaf=lambda x: x is None,
    )


def keep_absent(new: chex.ArrayTree, old: chex.ArrayTree) -> chex.ArrayTree:
    """``new``, and what ``old`` has where ``new`` has None."""
    return jax.tree.map(
        lambda n, o: o if n is None else n, new, old, is_leaf=lambda x: x is None
    )
