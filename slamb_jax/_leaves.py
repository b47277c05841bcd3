"""Numbering the leaves of a tree, so that every link names them alike."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp


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


def spread_rows(rows: jax.Array, leaf: Leaf) -> jax.Array:
    """One value per row, shape (rows, 1), as one per element; a scalar as it is."""
    if not rows.ndim:
        return rows
    neighbours = leaf.size // len(rows)
    return jnp.broadcast_to(rows, (len(rows), neighbours)).reshape(leaf.shape)


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


def present(
    tree: chex.ArrayTree, *rest: chex.ArrayTree, like: chex.ArrayTree | None = None
) -> tuple[list[tuple[Any, ...]], Callable[[list[Any]], chex.ArrayTree]]:
    """The leaves that are not None, as ``(Leaf, x, *others)``, and what rebuilds.

    The second answer makes a tree of one value for each of them, None where it was.
    """
    leaves, values, treedef = flatten_numbered(tree, like)
    columns = [treedef.flatten_up_to(r) for r in rest]
    rows = list(zip(leaves, values, *columns, strict=True))

    def rebuild(out: list[Any]) -> chex.ArrayTree:
        given = iter(out)
        return treedef.unflatten(
            [None if leaf is None else next(given) for leaf in leaves]
        )

    return [row for row in rows if row[0] is not None], rebuild


def map_numbered(
    fn: Callable[..., Any],
    tree: chex.ArrayTree,
    *rest: chex.ArrayTree,
    like: chex.ArrayTree | None = None,
) -> chex.ArrayTree:
    """``jax.tree.map`` whose function also gets the :class:`Leaf`; None stays None."""
    rows, rebuild = present(tree, *rest, like=like)
    return rebuild([fn(*row) for row in rows])


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
