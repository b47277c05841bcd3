"""Numbering the leaves of a tree, so that every link names them alike."""

import dataclasses
import math
from collections.abc import Callable, Hashable
from typing import Any

import chex
import jax
import jax.numpy as jnp

from slamb_jax._layout import WHOLE, Layout


@dataclasses.dataclass(frozen=True)
class Leaf:
    """What a selection may know of a leaf: static, and the same on every worker.

    Attributes:
      index: position in the order of ``jax.tree.leaves``.
      offset: number of elements in the leaves before this one.
      shape: shape of the leaf; where it is cut over mesh axes, of one shard.
      total: number of elements in the whole tree.
      stacked: whether its first dimension counts layers, each with ratios of its own.
      shards: into how many shards each of its layers is cut.
      axes: the mesh axes over which each of its layers is cut.
    """

    index: int
    offset: int
    shape: tuple[int, ...]
    total: int
    stacked: bool = False
    shards: int = 1
    axes: tuple[Hashable, ...] = ()

    @property
    def size(self) -> int:
        """Number of elements of the leaf."""
        return math.prod(self.shape)

    @property
    def layers(self) -> int:
        """Number of layers in it."""
        return self.shape[0] if self.stacked else 1

    @property
    def layer_shape(self) -> tuple[int, ...]:
        """Shape of one of its layers."""
        return self.shape[1:] if self.stacked else self.shape

    @property
    def layer_size(self) -> int:
        """Number of elements of one of its layers, all shards together."""
        return math.prod(self.layer_shape) * self.shards


def spread_rows(rows: jax.Array, leaf: Leaf) -> jax.Array:
    """One value per row, shape (rows, 1), as one per element; a scalar as it is."""
    if not rows.ndim:
        return rows
    neighbours = leaf.size // len(rows)
    return jnp.broadcast_to(rows, (len(rows), neighbours)).reshape(leaf.shape)


def flatten_numbered(
    tree: chex.ArrayTree, like: chex.ArrayTree | None = None, layout: Layout = WHOLE
) -> tuple[list[Leaf | None], list[Any], Any]:
    """Flattens ``tree`` and numbers its leaves as ``like`` (or itself) has them.

    ``None`` counts as a leaf of ``tree``, with ``None`` for its number: a gradient
    that is missing must not shift the numbers of those behind it. ``like`` is the
    parameters, where the caller has them.
    """
    treedef: Any
    values, treedef = jax.tree.flatten(tree, is_leaf=lambda x: x is None)
    models = values if like is None else treedef.flatten_up_to(like)
    abouts = treedef.flatten_up_to(layout.of(tree if like is None else like))
    total = sum(x.size for x in jax.tree.leaves(models))
    leaves: list[Leaf | None] = []
    index = offset = 0
    for value, model, about in zip(values, models, abouts, strict=True):
        if value is None:
            leaves.append(None)
        else:
            leaves.append(Leaf(index, offset, value.shape, total, *about.settings))
        below = jax.tree.leaves(model)
        index += len(below)
        offset += sum(x.size for x in below)
    return leaves, values, treedef


def present(
    tree: chex.ArrayTree,
    *rest: chex.ArrayTree,
    like: chex.ArrayTree | None = None,
    layout: Layout = WHOLE,
) -> tuple[list[tuple[Any, ...]], Callable[[list[Any]], chex.ArrayTree]]:
    """The leaves that are not None, as ``(Leaf, x, *others)``, and what rebuilds.

    The second answer makes a tree of one value for each of them, None where it was.
    """
    leaves, values, treedef = flatten_numbered(tree, like, layout)
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
    layout: Layout = WHOLE,
) -> chex.ArrayTree:
    """``jax.tree.map`` whose function also gets the :class:`Leaf`; None stays None."""
    rows, rebuild = present(tree, *rest, like=like, layout=layout)
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
