"""The leaves of a tree, numbered so that every link names them alike."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp

from slamb_jax._checks import check_bools
from slamb_jax._layout import Layout, LeafLayout, broadcast_prefix


@dataclasses.dataclass(frozen=True)
class Leaf:
    """What a selection may know of a leaf: static, and the same on every worker.

    Attributes:
      index: position in the order of ``jax.tree.leaves``.
      shape: shape of the leaf; of one shard, where it is sharded over mesh axes.
      stacked: whether its first dimension counts layers, each with its own ratios.
      shards: the number of shards of each of its layers.
      axes: the mesh axes over which each of its layers is sharded.
      sharded: those over which the leaf is, which for a stack may be more.
    """

    index: int
    shape: tuple[int, ...]
    stacked: bool = False
    shards: int = 1
    axes: tuple[Hashable, ...] = ()
    sharded: tuple[Hashable, ...] = ()

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


def broadcast_blocks(x: jax.Array, leaf: Leaf) -> jax.Array:
    """One value per block, shape (blocks, 1), as one per element; scalars pass."""
    if not x.ndim:
        return x
    block_size = leaf.size // len(x)
    return jnp.broadcast_to(x, (len(x), block_size)).reshape(leaf.shape)


def leaves_of(params: chex.ArrayTree, layout: Layout | None = None) -> list[Leaf]:
    """The leaves of a tree, without those that are None."""
    return [leaf for leaf, _ in present(params, layout=layout)[0]]


def present(
    tree: chex.ArrayTree,
    *rest: chex.ArrayTree,
    like: chex.ArrayTree | None = None,
    layout: Layout | None = None,
) -> tuple[list[tuple[Any, ...]], Callable[[Sequence[Any]], chex.ArrayTree]]:
    """The leaves that are not None as rows ``(Leaf, x, *others)``, and a rebuilder.

    They are numbered as ``like``, the parameters, has them: a missing gradient must not
    shift the numbers of those behind it. The rebuilder makes a tree of one value for
    each row, with None where it was.
    """
    treedef: Any
    values, treedef = jax.tree.flatten(tree, is_leaf=is_none)
    models = values if like is None else treedef.flatten_up_to(like)
    layouts = [LeafLayout()] * len(values)
    if layout is not None:
        layouts = treedef.flatten_up_to(layout.of(tree if like is None else like))
    columns = [treedef.flatten_up_to(x) for x in rest]
    below = [len(jax.tree.leaves(model)) for model in models]
    index = [0, *itertools.accumulate(below)]
    rows = [
        (Leaf(i, x.shape, *at), x, *others)
        for i, at, x, *others in zip(index, layouts, values, *columns, strict=False)
        if x is not None
    ]

    def rebuild(out: Sequence[Any]) -> chex.ArrayTree:
        given = iter(out)
        return treedef.unflatten([None if x is None else next(given) for x in values])

    return rows, rebuild


def arrays_of(updates: Any, tree: Any, like: Any) -> list[jax.Array]:
    """Of a tree like the parameters, the leaves that have an update."""
    return [x for _, _, x in present(updates, tree, like=like)[0]]


def map_numbered(
    fn: Callable[..., Any],
    tree: chex.ArrayTree,
    *rest: chex.ArrayTree,
    like: chex.ArrayTree | None = None,
    layout: Layout | None = None,
) -> chex.ArrayTree:
    """``jax.tree.map`` whose function also gets the :class:`Leaf`; None stays None."""
    rows, rebuild = present(tree, *rest, like=like, layout=layout)
    return rebuild([fn(*row) for row in rows])


def mask_tree(mask: Any, params: chex.ArrayTree) -> chex.ArrayTree:
    """A mask (a tree, a prefix of it or a function) as one bool per parameter."""
    if mask is None:
        return jax.tree.map(lambda _: True, params)
    tree = mask(params) if callable(mask) else mask
    check_bools("mask", tree)
    return broadcast_prefix("mask", tree, params)


def map_present(
    fn: Callable[..., Any], tree: chex.ArrayTree, *rest: Any
) -> chex.ArrayTree:
    """``jax.tree.map`` that leaves None where ``tree`` has None."""
    return jax.tree.map(
        lambda x, *others: None if x is None else fn(x, *others),
        tree,
        *rest,
        is_leaf=is_none,
    )


def keep_absent(new: chex.ArrayTree, old: chex.ArrayTree) -> chex.ArrayTree:
    """``new``, with what ``old`` has where ``new`` has None."""
    return jax.tree.map(lambda n, o: o if n is None else n, new, old, is_leaf=is_none)


def arrays_among(
    extra_args: dict[str, Any],
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The extra arguments that are trees of arrays, and the others."""

    def are_arrays(tree: Any) -> bool:
        return all(isinstance(x, jax.Array) for x in jax.tree.leaves(tree))

    arrays = {name: x for name, x in extra_args.items() if are_arrays(x)}
    return arrays, {k: x for k, x in extra_args.items() if k not in arrays}


def is_none(x: Any) -> bool:
    """Whether a leaf is missing."""
    return x is None
