"""Updating every worker's replica inside one program of all workers."""

from typing import Any

import jax
import optax
from jax.sharding import Mesh, PartitionSpec

from slamb_jax._core.checks import check_params, check_transformation
from slamb_jax._core.leaves import arrays_among
from slamb_jax.exchange.settings import Exchange
from slamb_jax.workers import guards
from slamb_jax.workers import mesh as meshes
from slamb_jax.workers.step import over_workers


def on_workers(
    tx: optax.GradientTransformation, mesh: Mesh, exchange: Exchange
) -> optax.GradientTransformationExtraArgs:
    """Updates the replica of every worker, for a trainer that jits its own step.

    Such a trainer updates in one ``jax.jit`` over global arrays, where no axis of
    workers is bound and XLA averages gradients by itself. Give it parameters of
    :func:`replicate`, and a loss that maps one worker's loss over their leading axis
    (``jax.vmap``, ``nnx.vmap``): gradients have that axis too, and XLA has nothing to
    average. They must be those of the sum of the workers' losses: before those of the
    mean put ``optax.scale(n)``. A step of your own needs no such loss under
    :func:`per_worker_step`.

    Args:
      tx: the transformation, of one worker. Random keys in its state are the same on
        all, as their steps must be.
      mesh: the device mesh.
      exchange: that of the optimizer in ``tx``; without ``local_axis_name``, since each
        device of a group would have a gradient of its own.

    Returns:
      A :class:`optax.GradientTransformationExtraArgs` over trees and a state whose
      leaves have a leading axis of n workers. Arrays among the extra arguments are the
      same for all workers.

    Raises:
      ValueError: if the mesh lacks an axis of the exchange, or the exchange has
        groups; in ``init`` and ``update``, for leaves without that leading axis.

    Examples:
      >>> import jax, jax.numpy as jnp, optax, slamb_jax
      >>> mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
      >>> exchange = slamb_jax.Exchange("data")
      >>> tx = slamb_jax.on_workers(slamb_jax.sgd(0.125, exchange), mesh, exchange)
      >>> params = slamb_jax.replicate(jnp.ones(3), mesh, exchange)
      >>> state = tx.init(params)
      >>> loss = jax.vmap(lambda p, x: jnp.mean((x @ p) ** 2))
      >>> @jax.jit
      ... def step(params, state, x):  # (4, 2, 3): of each worker its own rows
      ...     grads = jax.grad(lambda p: loss(p, x).sum())(params)
      ...     updates, state = tx.update(grads, state, params)
      ...     return optax.apply_updates(params, updates), state
      >>> params, state = step(params, state, jnp.ones((4, 2, 3)))
      >>> print(slamb_jax.consolidate(params))
      [0.25 0.25 0.25]
    """
    check_transformation("tx", tx)
    n, mesh = meshes.workers_on(mesh, exchange)
    if exchange.local_axis_name is not None:
        raise ValueError(
            "local_axis_name must be None here, where each worker has one gradient, "
            f"got {exchange!r}: use slamb_jax.per_worker_step"
        )
    tx = optax.with_extra_args_support(tx)

    def init(params: optax.Params) -> optax.OptState:
        meshes.check_replicas("params", params, n)

        of_all = over_workers(tx.init, mesh, exchange, ())
        with meshes.using(mesh):
            like = jax.eval_shape(of_all, params)
            guards.check_wrappers(like)
            there = meshes.state_shardings(like, mesh, exchange, lead=1)
            leaves = jax.tree.leaves(params)
            if any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
                return jax.tree.map(meshes.device_put_global, like, there)
            return jax.jit(of_all, out_shardings=there)(params)

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        check_params(params)
        for name, tree in (("updates", updates), ("state", state), ("params", params)):
            meshes.check_replicas(name, tree, n)
        arrays, others = arrays_among(extra_args)

        def of_one(trees: tuple[Any, ...], arrays: dict[str, Any]) -> Any:
            return tx.update(*trees, **arrays, **others)

        of_all = over_workers(of_one, mesh, exchange, (PartitionSpec(),))
        with meshes.using(mesh):
            return of_all((updates, state, params), arrays)

    return optax.GradientTransformationExtraArgs(init, update)
