"""Updating, on each device, the shard that it holds of every parameter."""

from typing import Any

import jax
import optax
from jax.sharding import PartitionSpec

from slamb_jax._core import axes as _axes
from slamb_jax._core.checks import check_params, check_transformation
from slamb_jax._core.layout import broadcast_specs, is_spec, state_specs
from slamb_jax._core.leaves import arrays_among, chosen, map_present, unless
from slamb_jax.exchange.settings import Exchange, check_exchange


def on_shards(
    tx: optax.GradientTransformation, exchange: Exchange
) -> optax.GradientTransformationExtraArgs:
    r"""Updates the shard that each device holds of every parameter.

    With :math:`x^{(s)}` the shard on device s of a gradient, parameter or moment:

    .. math:: (u^{(s)}, state^{(s)}) \leftarrow tx(g^{(s)}, state^{(s)}, p^{(s)})

    For models that do not fit on one device, whose parameters are sharded over mesh
    axes that are left to the compiler: ``jax.shard_map`` manual over the workers' axis
    only, as :func:`per_worker_step` runs them. There, packing or flattening a leaf
    makes the compiler gather it. This enters a ``jax.shard_map`` over the axes in
    ``param_specs``, inside which ``tx`` sees shards, and nothing is gathered by
    construction. Axes that are manual already are left alone: inside a
    ``jax.shard_map`` over all of them it is ``tx``.

    The links of this library do this by themselves; it is for other transformations,
    and for ``optax.inject_hyperparams`` under ``check_vma=False``, whose traced values
    must not come from outside the ``jax.shard_map``. ``tx`` must be right on shards:
    what sums over a whole leaf must sum over its mesh axes, too, as
    :func:`layerwise_trust_ratio` does.

    Args:
      tx: the transformation; every leaf of its state is a number, or in a tree like
        that of the parameters.
      exchange: its ``param_specs`` say how the parameters are sharded; with None, this
        returns ``tx``.

    Returns:
      A :class:`optax.GradientTransformationExtraArgs`; it needs ``params``.

    Raises:
      ValueError: in ``update``, without a mesh that has the axes, and for a state that
        cannot be sharded like the parameters.

    Examples:
      >>> import jax, jax.numpy as jnp, numpy as np, optax, slamb_jax
      >>> from jax.sharding import PartitionSpec as P
      >>> exchange = slamb_jax.Exchange(param_specs=P(None, "model"))
      >>> tx = optax.chain(
      ...     slamb_jax.on_shards(optax.clip(1.0), exchange), optax.sgd(0.1)
      ... )
      >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("model",))
      >>> step = jax.shard_map(  # "model" is manual already: tx itself
      ...     lambda p: tx.update(9 * p, tx.init(p), p)[0],
      ...     mesh=mesh, in_specs=P(None, "model"), out_specs=P(None, "model"),
      ... )
      >>> print(step(jnp.ones((1, 4))))
      [[-0.1 -0.1 -0.1 -0.1]]
    """
    check_transformation("tx", tx)
    param_specs = check_exchange(exchange).param_specs
    tx = optax.with_extra_args_support(tx)
    if param_specs is None:
        return tx

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        # Axes that are manual here need nothing: tx sees shards already.
        auto = [a for a in exchange.shard_axes if not _axes.is_bound(a)]
        if not auto:
            return tx.update(updates, state, params, **extra_args)
        check_params(params)
        names = jax.sharding.get_abstract_mesh().axis_names
        if missing := [a for a in auto if a not in names]:
            raise ValueError(
                f"param_specs names the mesh axis {missing[0]!r}, and the mesh here "
                f"has {', '.join(map(repr, names)) or 'none'}: update inside "
                "slamb_jax.per_worker_step, jax.shard_map or jax.set_mesh"
            )

        # A shard_map that is manual over some axes takes specs of these alone.
        def restrict(spec: PartitionSpec) -> PartitionSpec:
            kept = [[a for a in _axes.as_tuple(entry) if a in auto] for entry in spec]
            return PartitionSpec(*(tuple(names) or None for names in kept))

        specs = broadcast_specs(param_specs, params)
        specs = jax.tree.map(restrict, specs, is_leaf=is_spec)
        # These tell where in the state there are trees like the parameters.
        shapes = [p.shape for p in jax.tree.leaves(params)]
        sharded = (
            map_present(lambda g, spec: spec, updates, specs),
            state_specs(state, specs, shapes=shapes),
            specs,
        )
        # The inner shard_map checks types where the outer one does.
        tracked = any(_axes.varying_axes(x) for x in jax.tree.leaves(updates))
        # Extra arguments that are arrays enter as arguments, since a shard_map must not
        # close over values of the outer one.
        arrays, others = arrays_among(extra_args)

        def own(
            updates: Any, state: Any, params: Any, arrays: dict[str, Any]
        ) -> tuple[Any, Any]:
            u, new = tx.update(updates, state, params, **arrays, **others)
            # The mark that a link has chosen its state cannot leave the shard_map,
            # whose results have the structure of the state.
            return u, unless(arrays.get("skip"), state, new)

        u, new = jax.shard_map(
            own,
            in_specs=(*sharded, PartitionSpec()),
            out_specs=sharded[:2],
            axis_names=set(auto),
            check_vma=tracked,
        )(updates, state, params, arrays)
        return u, chosen(arrays.get("skip"), new)

    return optax.GradientTransformationExtraArgs(tx.init, update)
