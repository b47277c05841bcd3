"""Partition specs of a state whose parameters are sharded over further mesh axes."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from slamb_jax._tree.layout import is_spec, mesh_axes

_UNSHARDED = PartitionSpec()


def specs_of(
    tree: chex.ArrayTree, param_specs: Any, mesh: Mesh, behind: int = 0
) -> chex.ArrayTree:
    """One spec per leaf: the parameters' in every subtree with their structure.

    The specs are of the dimensions behind the first ``behind``.

    Raises:
      ValueError: for an axis that the mesh has not, or specs that fit no subtree.
    """
    if param_specs is None:
        return jax.tree.map(lambda _: _UNSHARDED, tree)
    if unknown := [a for a in mesh_axes(param_specs) if a not in mesh.shape]:
        raise ValueError(
            f"param_specs names {unknown[0]!r}, which is not an axis of the mesh: it "
            f"has {', '.join(map(repr, mesh.axis_names))}"
        )
    treedef: Any
    specs, treedef = jax.tree.flatten(param_specs, is_leaf=is_spec)
    specs = [spec or _UNSHARDED for spec in specs]

    def is_params(x: Any) -> bool:
        if jax.tree.structure(x) != treedef:
            return False
        pairs = zip(jax.tree.leaves(x), specs, strict=True)
        return all(jnp.ndim(leaf) - behind >= len(spec) for leaf, spec in pairs)

    outer: Any
    parts, outer = jax.tree.flatten(tree, is_leaf=is_params)
    if not any(map(is_params, parts)):
        raise ValueError(
            "param_specs must have one spec for each parameter, got "
            f"{jax.tree.unflatten(treedef, specs)}: no part of the state has this "
            "structure (unbox linen's partitioned parameters with flax.linen.unbox)"
        )
    return outer.unflatten(
        [treedef.unflatten(specs) if is_params(x) else _UNSHARDED for x in parts]
    )
