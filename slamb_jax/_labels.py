"""Which layer each parameter belongs to."""

from typing import Any

import chex
import jax

Layers = Any  # a tree of labels, or a function of the parameters that gives one


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
    tree: Any = labels_of(layers, params)
    labels: Any
    prefix: Any
    labels, prefix = jax.tree.flatten(tree, is_leaf=_is_none)
    try:
        parts = prefix.flatten_up_to(params)
    except (ValueError, TypeError) as error:
        raise ValueError(
            "layers must have the structure of the parameters or be a prefix of it: "
            f"{error}"
        ) from error
    below = [jax.tree.leaves(part, is_leaf=_is_none) for part in parts]
    spread = [label for label, part in zip(labels, below, strict=True) for _ in part]
    leaves, treedef = jax.tree.flatten(params, is_leaf=_is_none)
    return spread, leaves, treedef


def _is_none(x: Any) -> bool:
    return x is None
