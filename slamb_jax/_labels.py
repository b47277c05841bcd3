"""Which layer each parameter belongs to."""

from collections.abc import Callable
from typing import Any

import chex
import jax

Layers = chex.ArrayTree | Callable[[Any], chex.ArrayTree]


def labels_of(layers: Layers, params: Any) -> chex.ArrayTree:
    """The tree of labels, called for if it is a function, each a string or None.

    Raises:
      ValueError: for a label that is neither.
    """
    tree = layers(params) if callable(layers) else layers
    for path, label in jax.tree_util.tree_leaves_with_path(tree):
        if not isinstance(label, str):
            raise ValueError(
                "layers must have strings or None for labels, got "
                f"{label!r} at layers{jax.tree_util.keystr(path)}"
            )
    return tree


def layer_names(layers: Layers, params: Any) -> list[str]:
    """The labels, sorted; params without leaves stand for any.

    Raises:
      ValueError: if there are none, or one that no parameter has, or if ``layers``
        does not fit ``params``.
    """
    tree = labels_of(layers, params)
    names = sorted(set(jax.tree.leaves(tree)))
    if not names:
        raise ValueError(f"layers must label at least one layer, got {tree!r}")
    if jax.tree.leaves(params):
        missing = set(names) - set(labelled_leaves(tree, params)[0])
        if missing:
            raise ValueError(
                f"layers names {', '.join(map(repr, sorted(missing)))}, of which there "
                "are no parameters"
            )
    return names


def labelled_leaves(
    layers: Layers, params: Any
) -> tuple[list[str | None], list[Any], Any]:
    """Each leaf's label, the leaves (None counts as one), and their treedef.

    Raises:
      ValueError: if ``layers`` is not a prefix of ``params``.
    """
    tree = labels_of(layers, params)

    def is_none(x: Any) -> bool:
        return x is None

    def spread(label: str | None, part: Any) -> Any:
        return jax.tree.map(lambda _: (label,), part, is_leaf=is_none)

    try:
        labels = jax.tree.map(spread, tree, params, is_leaf=is_none)
    except (ValueError, TypeError) as error:
        raise ValueError(
            "layers must have the structure of the parameters or be a prefix of it: "
            f"{error}"
        ) from error
    leaves, treedef = jax.tree.flatten(params, is_leaf=is_none)
    found = jax.tree.leaves(labels, is_leaf=lambda x: isinstance(x, tuple) and len(x) == 1 and (x[0] is None or isinstance(x[0], str)))
    return [label for (label,) in found], leaves, treedef
