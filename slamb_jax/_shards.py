"""Updating, on each device, the shard that it has of every parameter."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from slamb_jax import _axes
from slamb_jax._checks import check_params, check_transformation
from slamb_jax._layout import (
    axes_of,
    make_layout,
    names_of,
    spread_specs,
)
from slamb_jax._leaves import map_present


def on_shards(
    tx: optax.GradientTransformation, param_specs: Any
) -> optax.GradientTransformationExtraArgs:
    r"""Updates the shard that each device has of the parameters, where they are cut.

    With :math:`x^{(s)}` the shard that device s has of a gradient, parameter or moment:

    .. math:: (u^{(s)}, state^{(s)}) \leftarrow tx(g^{(s)}, state^{(s)}, p^{(s)})

    For models that do not fit on one device, whose parameters are cut over mesh axes
    that are left to the compiler: ``jax.shard_map`` manual over the workers' axis only,
    as :func:`per_worker_step` has it with ``param_specs``. To pack or flatten a leaf
    there would make the compiler gather it. This goes on with a ``jax.shard_map`` over
    the axes in ``param_specs``, inside of which ``tx`` sees shards, and nothing is
    gathered by construction. Axes that are manual already are let alone: inside a
    ``jax.shard_map`` over all of them it is ``tx``.

    :func:`slamb` with ``param_specs`` does this by itself; it is for chains made by
    hand, and for what ``optax.inject_hyperparams`` made under ``check_vma=False``: its
    traced values must not come from outside of the ``jax.shard_map``. ``tx`` must do
    with shards: what sums over a whole leaf must sum over the mesh axes too
    (:func:`layerwise_trust_ratio` with ``param_specs`` does).

    Args:
      tx: the transformation; every leaf of its state is a number, or in a tree like
        that of the parameters.
      param_specs: a tree of ``jax.sharding.PartitionSpec`` with the structure of the
        parameters, or a prefix of it; None for a leaf that is not cut.

    Returns:
      A :class:`optax.GradientTransformationExtraArgs`; it needs ``params``.

    Raises:
      ValueError: for leaves of ``param_specs`` that are no specs; in ``update``,
        without a mesh that has the axes, and for a state that cannot be cut like the
        parameters.
      NotImplementedError: for axes left to the compiler on jax 0.7, whose XLA aborts
        on some of these programs.

    Examples:
      >>> import jax, jax.numpy as jnp, numpy as np, optax, slamb_jax
      >>> from jax.sharding import PartitionSpec as P
      >>> shards = slamb_jax.on_shards(optax.clip(1.0), P(None, "model"))
      >>> tx = optax.chain(shards, optax.sgd(0.1))
      >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("model",))
      >>> step = jax.shard_map(  # "model" is manual already: tx itself
      ...     lambda p: tx.update(9 * p, tx.init(p), p)[0],
      ...     mesh=mesh, in_specs=P(None, "model"), out_specs=P(None, "model"),
      ... )
      >>> print(step(jnp.ones((1, 4))))
      [[-0.1 -0.1 -0.1 -0.1]]
    """
    check_transformation("tx", tx)
    make_layout(param_specs, None, None)
    tx = optax.with_extra_args_support(tx)

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        free = [a for a in axes_of(param_specs) if not _is_bound(a)]
        if not free:
            return tx.update(updates, state, params, **extra_args)
        check_params(params)
        _check_jax()
        _check_mesh(free)
        specs = spread_specs(param_specs, params)
        specs = jax.tree.map(lambda spec: _only(spec, free), specs, is_leaf=_is_spec)
        cut = (
            map_present(lambda g, spec: spec, updates, specs),
            state_specs(state, specs, params),
            specs,
        )
        tracked = any(_axes.varying_axes(x) for x in jax.tree.leaves(updates))
        arrays = {k: x for k, x in extra_args.items() if _are_arrays(x)}
        others = {k: x for k, x in extra_args.items() if k not in arrays}

        def own(
            updates: Any, state: Any, params: Any, arrays: dict[str, Any]
        ) -> tuple[Any, Any]:
            return tx.update(updates, state, params, **arrays, **others)

        return jax.shard_map(
            own,
            in_specs=(*cut, PartitionSpec()),
            out_specs=cut[:2],
            axis_names=set(free),
            check_vma=tracked,
        )(updates, state, params, arrays)

    return optax.GradientTransformationExtraArgs(tx.init, update)


def state_specs(
    state: chex.ArrayTree, specs: chex.ArrayTree, params: chex.ArrayTree
) -> chex.ArrayTree:
    """One spec per leaf of a state: like the parameters where it is a tree like theirs.

    Raises:
      ValueError: for another leaf that is not a scalar.
    """
    treedef: Any = jax.tree.structure(params)
    shapes = [jnp.shape(p) for p in jax.tree.leaves(params)]

    def like_params(x: Any) -> bool:
        same = jax.tree.structure(x) == treedef
        return same and [jnp.shape(leaf) for leaf in jax.tree.leaves(x)] == shapes

    def spec(path: Any, x: Any) -> Any:
        if like_params(x):
            return specs
        if jnp.ndim(x):
            raise ValueError(
                f"state{jax.tree_util.keystr(path)} must be a scalar or in a tree like "
                f"the parameters to be cut like them, got shape {jnp.shape(x)}"
            )
        return PartitionSpec()

    return jax.tree_util.tree_map_with_path(spec, state, is_leaf=like_params)


def specs_of(
    tree: chex.ArrayTree,
    param_specs: Any,
    mesh: Mesh,
    axis_name: Any,
    behind: int = 0,
) -> chex.ArrayTree:
    """One spec per leaf: like the parameters in every part with their structure.

    The specs are of the dimensions behind the first ``behind``.
    """
    plain = PartitionSpec()
    if param_specs is None:
        return jax.tree.map(lambda _: plain, tree)
    make_layout(param_specs, None, axis_name)
    if unknown := [a for a in axes_of(param_specs) if a not in mesh.shape]:
        raise ValueError(
            f"param_specs names {unknown[0]!r}, which is not an axis of the mesh: it "
            f"has {', '.join(map(repr, mesh.axis_names))}"
        )
    treedef: Any
    specs, treedef = jax.tree.flatten(param_specs, is_leaf=_is_spec_or_none)
    specs = [spec or plain for spec in specs]

    def is_params(x: Any) -> bool:
        if jax.tree.structure(x) != treedef:
            return False
        fit = zip(jax.tree.leaves(x), specs, strict=True)
        return all(jnp.ndim(leaf) - behind >= len(spec) for leaf, spec in fit)

    outer: Any
    parts, outer = jax.tree.flatten(tree, is_leaf=is_params)
    if not any(map(is_params, parts)):
        raise ValueError(
            "param_specs must have one spec for each parameter, got "
            f"{jax.tree.unflatten(treedef, specs)}, a tree like which is not in what "
            "is to be cut"
        )
    return outer.unflatten(
        [treedef.unflatten(specs) if is_params(x) else plain for x in parts]
    )


def _is_spec_or_none(x: Any) -> bool:
    return x is None or _is_spec(x)


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def _only(spec: PartitionSpec, free: list[Any]) -> PartitionSpec:
    """The spec without the axes that are bound already."""
    left = [tuple(a for a in names_of((entry,)) if a in free) for entry in spec]
    return PartitionSpec(*(names or None for names in left))


def _is_bound(axis: Any) -> bool:
    try:
        _axes.worker_index(axis)
    except NameError:
        return False
    return True


def _check_jax() -> None:
    if not hasattr(jax.lax, "pcast"):
        raise NotImplementedError(
            "param_specs over mesh axes that are left to the compiler need a jax newer "
            f"than 0.7, got {jax.__version__}, whose compiler aborts on some of these "
            "programs: update inside jax.shard_map over all axes"
        )


def _check_mesh(axes: list[Any]) -> None:
    there = jax.sharding.get_abstract_mesh().axis_names
    if missing := [a for a in axes if a not in there]:
        raise ValueError(
            f"param_specs names the mesh axis {missing[0]!r}, and the mesh here has "
            f"{', '.join(map(repr, there)) or 'none'}: update inside "
            "slamb_jax.per_worker_step with param_specs, jax.shard_map or jax.set_mesh"
        )


def _are_arrays(tree: Any) -> bool:
    return all(isinstance(x, jax.Array) for x in jax.tree.leaves(tree))
