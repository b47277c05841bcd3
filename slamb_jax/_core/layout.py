"""Which leaves are stacks of layers, and over which mesh axes leaves are sharded."""

import functools
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from slamb_jax._core import axes as _axes
from slamb_jax._core import leaves as _leaves
from slamb_jax._core.checks import check_bools

Names = tuple[Hashable, ...]


def layout_of(param_specs: Any, stacked: Any) -> _leaves.LayoutOf:
    """The layout that the user gave as ``param_specs`` and ``stacked``, checked."""
    for spec in jax.tree.leaves(param_specs, is_leaf=is_spec):
        if not is_spec(spec) or not all(
            name is None or isinstance(name, str | tuple) for name in spec or ()
        ):
            raise ValueError(
                f"param_specs must have PartitionSpec or None, got {spec!r}"
            )
    if not _leaves.is_function(stacked):
        check_bools("stacked", stacked)
    return functools.partial(_lay_out, param_specs, stacked)


def _lay_out(param_specs: Any, stacked: Any, params: chex.ArrayTree) -> chex.ArrayTree:
    """The :class:`Leaf` of each parameter; None where it is None."""
    stacks = _leaves.bool_for_each("stacked", stacked, params, default=False)
    specs = broadcast_specs(param_specs, params)
    return jax.tree_util.tree_map_with_path(
        _lay_out_leaf, params, stacks, specs, is_leaf=_leaves.is_none
    )


def is_spec(x: Any) -> bool:
    """Whether ``x`` is a leaf of a tree of specs; None is an unsharded parameter."""
    return x is None or isinstance(x, PartitionSpec)


def spec_axes(entries: Iterable[Any] | None) -> Names:
    """The mesh axes in the entries of a spec."""
    groups = (_axes.as_tuple(entry) for entry in entries or ())
    return tuple(name for group in groups for name in group)


def mesh_axes(param_specs: Any) -> Names:
    """All mesh axes that a tree of specs names, sorted."""
    specs = jax.tree.leaves(param_specs, is_leaf=is_spec)
    return tuple(sorted({a for spec in specs for a in spec_axes(spec)}, key=str))


def broadcast_specs(param_specs: Any, params: chex.ArrayTree) -> chex.ArrayTree:
    """One spec per parameter, from a tree or a prefix of it."""

    def checked(path: Any, spec: Any, p: Any) -> PartitionSpec:
        spec = spec or PartitionSpec()
        if p is not None and len(spec) > jnp.ndim(p):
            raise ValueError(
                f"param_specs must have at most one entry per dimension, got {spec} "
                f"for shape {jnp.shape(p)} at params{jax.tree_util.keystr(path)}"
            )
        return spec

    specs = _leaves.broadcast_prefix("param_specs", param_specs, params, is_spec)
    return jax.tree_util.tree_map_with_path(checked, specs, params, is_leaf=is_spec)


def bound_axes(spec: PartitionSpec) -> list[Names]:
    """For each entry of a spec, the mesh axes that are bound (manual) here."""
    return [tuple(filter(_axes.is_bound, _axes.as_tuple(entry))) for entry in spec]


def state_specs(
    state: chex.ArrayTree,
    param_specs: chex.ArrayTree,
    *,
    lead: int = 0,
    shapes: Sequence[tuple[int, ...]] | None = None,
) -> chex.ArrayTree:
    """One spec per leaf of a state: in a tree like the parameters theirs, else empty.

    Such a tree has the structure of ``param_specs``, and leaves of these ``shapes`` or,
    if those are not known, of as many dimensions as the specs need. The leaves have
    ``lead`` further dimensions in front.

    Raises:
      ValueError: if no tree is like the parameters; with ``shapes``, only for another
        leaf that is not a scalar.
    """
    treedef: Any
    specs, treedef = jax.tree.flatten(param_specs, is_leaf=is_spec)

    def like_params(x: Any) -> bool:
        if jax.tree.structure(x) != treedef:
            return False
        inner = [jnp.shape(leaf)[lead:] for leaf in jax.tree.leaves(x)]
        if shapes is not None:
            return inner == list(shapes)
        return all(len(x) >= len(s or ()) for x, s in zip(inner, specs, strict=True))

    def spec(path: Any, x: Any) -> Any:
        if like_params(x):
            return treedef.unflatten([spec or PartitionSpec() for spec in specs])
        if shapes is not None and jnp.ndim(x):
            raise ValueError(
                f"state{jax.tree_util.keystr(path)} must be a scalar or in a tree like "
                f"the parameters to be sharded like them, got shape {jnp.shape(x)}"
            )
        return PartitionSpec()

    parts = jax.tree.leaves(state, is_leaf=like_params)
    if shapes is None and not any(map(like_params, parts)):
        raise ValueError(
            f"param_specs must have one spec for each parameter, got {param_specs}: no "
            "part of the state has this structure (unbox linen's partitioned "
            "parameters with flax.linen.unbox)"
        )
    return jax.tree_util.tree_map_with_path(spec, state, is_leaf=like_params)


def _lay_out_leaf(
    path: Any, p: Any, stacked: Any, spec: PartitionSpec
) -> _leaves.Leaf | None:
    if p is None:
        return None
    if stacked and not jnp.ndim(p):
        raise ValueError(
            "stacked must be False for a leaf without dimensions, got True at "
            f"params{jax.tree_util.keystr(path)}"
        )
    sharded = tuple(sorted(spec_axes(spec), key=str))
    for axis in sharded:
        if not _axes.is_bound(axis):
            raise ValueError(
                f"param_specs names the mesh axis {axis!r}, which is not bound here: "
                "update inside jax.shard_map over it, or wrap the transformation in "
                "slamb_jax.on_shards"
            )
        if _axes.tracked_axes(axis) - _axes.varying_axes(p):
            raise ValueError(
                f"param_specs has {spec} for a leaf that does not vary over the mesh "
                f"axis {axis!r}: every device holds all of it"
            )
    # What cuts a stack between its layers leaves each of them whole.
    axes = tuple(sorted(spec_axes(spec[1:] if stacked else spec), key=str))
    shards = _axes.axis_size(axes) if axes else 1
    return _leaves.Leaf(0, jnp.shape(p), bool(stacked), shards, axes, sharded)
