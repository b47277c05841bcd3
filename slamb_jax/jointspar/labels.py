"""The layer that each parameter belongs to."""

from typing import Any

import chex
import jax
from jax.tree_util import PyTreeDef

from slamb_jax._tree.layout import broadcast_prefix

Layers = Any  # a tree of labels, or a function of the parameters that returns one


def leaf_labels(
    layers: Layers, params: chex.ArrayTree
) -> tuple[list[str | None], PyTreeDef]:
    """The label of each leaf, where None counts as a leaf, and the leaves' treedef."""
    labels = broadcast_prefix("layers", _resolve(layers, params), params, _is_none)
    treedef: Any = jax.tree.structure(params, is_leaf=_is_none)
    return treedef.flatten_up_to(labels), treedef


def layer_names(layers: Layers, params: chex.ArrayTree) -> list[str]:
    """The distinct labels, sorted.

    Raises:
      ValueError: if there are none; if a label is not a string or has no parameters
        (unless ``params`` is empty); and if ``layers`` does not fit ``params``.
    """
    labels = _resolve(layers, params)
    names = sorted(set(jax.tree.leaves(labels)))
    if not names:
        raise ValueError(f"layers must label at least one layer, got {labels!r}")
    missing = set(names) - set(leaf_labels(labels, params)[0])
    if missing and jax.tree.leaves(params):
        raise ValueError(
            f"layers names {', '.join(map(repr, sorted(missing)))}, of which there "
            "are no parameters"
        )
    return names


def _resolve(layers: Layers, params: chex.ArrayTree) -> chex.ArrayTree:
    tree = layers(params) if callable(layers) else layers
    for path, label in jax.tree_util.tree_leaves_with_path(tree):
        if not isinstance(label, str):
            raise ValueError(
                "layers must have strings or None for labels, got "
                f"{label!r} at layers{jax.tree_util.keystr(path)}"
            )
    return tree


def _is_none(x: object) -> bool:
    return x is None
