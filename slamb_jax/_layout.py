"""Which leaves are stacks of layers, and along which mesh axes leaves are cut."""

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from slamb_jax import _axes
from slamb_jax._checks import check_bools

Axes = tuple[Hashable, ...]


@dataclasses.dataclass(frozen=True)
class About:
    """What a layout says of one leaf; see :class:`slamb_jax.Leaf`."""

    stacked: bool = False
    shards: int = 1
    axes: Axes = ()

    @property
    def settings(self) -> tuple[bool, int, Axes]:
        """As :class:`slamb_jax.Leaf` takes them."""
        return self.stacked, self.shards, self.axes


@dataclasses.dataclass(frozen=True)
class Layout:
    """Both, as the user gave them: trees, prefixes of trees, or (stacks) a function."""

    param_specs: Any = None
    stacked: Any = None

    def of(self, params: chex.ArrayTree) -> chex.ArrayTree:
        """What there is to say of each parameter, where the mesh axes are bound."""
        if self.param_specs is None and self.stacked is None:
            return jax.tree.map(lambda _: About(), params)
        specs = spread_specs(self.param_specs, params)
        return jax.tree.map(_about, params, spread_stacked(self.stacked, params), specs)


WHOLE = Layout()


def make_layout(
    param_specs: Any, stacked: Any, axis_name: _axes.AxisName | None
) -> Layout:
    """A layout of checked arguments."""
    for spec in spec_leaves(param_specs):
        check_spec(spec)
    mine = axis_name if isinstance(axis_name, tuple) else (axis_name,)
    if shared := [a for a in axes_of(param_specs) if a in mine]:
        raise ValueError(
            f"param_specs must not name the axis of the workers, {shared[0]!r}: every "
            "worker has parameters of its own, cut along other axes of the mesh"
        )
    if stacked is not None and not callable(stacked):
        check_bools("stacked", stacked)
    return Layout(param_specs, stacked)


def _is_spec(x: Any) -> bool:
    return x is None or isinstance(x, PartitionSpec)


def spec_leaves(param_specs: Any) -> list[Any]:
    """The leaves of a tree of specs, None among them."""
    return jax.tree.leaves(param_specs, is_leaf=_is_spec)


def check_spec(spec: Any) -> None:
    """Raises unless ``spec`` is a spec of plain names, or None for an uncut leaf."""
    plain = _is_spec(spec) and all(
        name is None or isinstance(name, str | tuple) for name in spec or ()
    )
    if not plain:
        raise ValueError(
            "param_specs must have jax.sharding.PartitionSpec of axis names, or None, "
            f"for leaves, got {spec!r}"
        )


def names_of(entries: Any) -> Axes:
    """The mesh axes in some entries of a spec."""
    groups = (e if isinstance(e, tuple) else (e,) for e in entries)
    return tuple(name for group in groups for name in group if name is not None)


def axes_of(param_specs: Any) -> Axes:
    """All mesh axes that a tree of specs names, sorted."""
    found = {a for spec in spec_leaves(param_specs) for a in names_of(spec or ())}
    return tuple(sorted(found, key=str))


def spread_specs(param_specs: Any, params: chex.ArrayTree) -> chex.ArrayTree:
    """One spec per parameter, from a tree or a prefix of it."""

    def check(path: Any, spec: Any, p: Any) -> PartitionSpec:
        if len(spec) > jnp.ndim(p):
            raise ValueError(
                f"param_specs must have at most one entry per dimension, got {spec} "
                f"for shape {jnp.shape(p)} at params{jax.tree_util.keystr(path)}"
            )
        return spec

    specs = spread("param_specs", param_specs, params, _is_spec)
    specs = jax.tree.map(lambda s: s or PartitionSpec(), specs, is_leaf=_is_spec)
    return jax.tree_util.tree_map_with_path(check, specs, params, is_leaf=_is_spec)


def spread_stacked(stacked: Any, params: chex.ArrayTree) -> chex.ArrayTree:
    """One bool per parameter, from a tree, a prefix of it or a function."""
    tree = stacked(params) if callable(stacked) else stacked
    tree = False if tree is None else tree
    check_bools("stacked", tree)
    stacks = spread("stacked", tree, params)

    def check(path: Any, is_stack: Any, p: Any) -> bool:
        if is_stack and not jnp.ndim(p):
            raise ValueError(
                "stacked must be False for a leaf without dimensions, got True at "
                f"params{jax.tree_util.keystr(path)}"
            )
        return bool(is_stack)

    return jax.tree_util.tree_map_with_path(check, stacks, params)


def spread(
    name: str,
    tree: Any,
    params: chex.ArrayTree,
    is_leaf: Callable[[Any], bool] | None = None,
) -> chex.ArrayTree:
    """A tree like the parameters of a prefix of one; ``name`` is for the error."""
    try:
        return jax.tree.map(
            lambda x, below: jax.tree.map(lambda _: x, below),
            tree,
            params,
            is_leaf=is_leaf,
        )
    except ValueError as error:
        raise ValueError(
            f"{name} must have the structure of the parameters or a prefix of it: "
            f"{error}"
        ) from error


def _about(p: Any, stacked: bool, spec: PartitionSpec) -> About:
    cut = names_of(spec)
    for axis in cut:
        try:
            tracked = _axes.varying_axes(_axes.worker_index(axis))
        except NameError as error:
            raise ValueError(
                f"param_specs names the mesh axis {axis!r}, which is not bound here: "
                "update inside jax.shard_map over it, or wrap the transformation in "
                "slamb_jax.on_shards"
            ) from error
        if tracked - _axes.varying_axes(p):
            raise ValueError(
                f"param_specs has {spec} for a leaf that does not vary over the mesh "
                f"axis {axis!r}: it is whole on every device"
            )
    axes = names_of(spec[1:]) if stacked and len(spec) else cut
    shards = _axes.axis_size(axes) if axes else 1
    return About(stacked, shards, tuple(sorted(axes, key=str)))
