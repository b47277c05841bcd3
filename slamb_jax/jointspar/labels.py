"""The layer that each parameter belongs to."""

from typing import Any

import chex
import jax
from jax.tree_util import PyTreeDef

from slamb_jax._layout import broadcast_prefix
from slamb_jax._leaves import is_none

Layers = Any  # a tree of labels, or a function of the parameters that returns one


def leaf_labels(
    layers: Layers, params: chex.ArrayTree
) -> tuple[list[str | None], PyTreeDef]:
    """The label of each leaf, where None counts as a leaf, and the leaves' treedef."""
    tree = layers(params) if callable(layers) else layers
    for path, label in jax.tree_util.tree_leaves_with_path(tree):
        if not isinstance(label, str):
            raise ValueError(
                "layers must have strings or None for labels, got "
                f"{label!r} at layers{jax.tree_util.keystr(path)}"
            )
    labels = broadcast_prefix("layers", tree, params, is_none)
    treedef: Any = jax.tree.structure(params, is_leaf=is_none)
    return treedef.flatten_up_to(labels), treedef


def layer_names(layers: Layers, params: chex.ArrayTree) -> list[str]:
    """The distinct labels, sorted; each must have parameters if there are any."""
    tree = layers(params) if callable(layers) else layers
    used, _ = leaf_labels(tree, params)
    names = sorted(set(jax.tree.leaves(tree)))
    if not names:
        raise ValueError(f"layers must label at least one layer, got {tree!r}")
    missing = [repr(name) for name in names if name not in used]
    if missing and jax.tree.leaves(params):
        raise ValueError(
            f"layers names {', '.join(missing)}, of which there are no parameters"
        )
    return names
