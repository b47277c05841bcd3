"""Updating every worker's replica inside one program of all workers."""

from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from slamb_jax._axes import as_tuple, step_of_workers
from slamb_jax._checks import check_params, check_transformation
from slamb_jax.exchange import Exchange
from slamb_jax.workers.mesh import indexable_mesh, workers_on
from slamb_jax.workers.replicas import check_leading_sizes, state_shardings
from slamb_jax.workers.simulate import simulated_replicas


def on_workers(
    tx: optax.GradientTransformation, mesh: Mesh, exchange: Exchange
) -> optax.GradientTransformationExtraArgs:
    """Updates the replica of every worker, for a trainer that jits its own step.

    Such a trainer calls ``tx.update(grads, state, params)`` in one ``jax.jit`` over
    global arrays, where no axis of workers is bound and XLA averages gradients by
    itself. Give it parameters with a leading axis of workers, as :func:`replicate`
    makes them, and a loss that maps one worker's over that axis (``jax.vmap``,
    ``nnx.vmap``): then gradients have that axis too, and XLA has nothing to average.
    This enters a ``jax.shard_map`` over the workers, inside which ``tx`` updates one
    worker's own replica and sends what its exchange says. Where the step is yours,
    :func:`per_worker_step` needs no such loss.

    The gradients must be those of the sum of the workers' losses, as if each were
    alone. Of their mean they are n times smaller: put ``optax.scale(n)`` first in
    ``tx``.

    Args:
      tx: the transformation, of one worker.
      mesh: the device mesh.
      exchange: that of the optimizer in ``tx``; without ``local_axis_name``, since a
        group's devices would each have a gradient of their own.

    Returns:
      A :class:`optax.GradientTransformationExtraArgs` over trees whose leaves have a
      leading axis of n workers. Its state has it too, sharded over the workers, and
      begins equal on all of them. Arrays among the extra arguments are the same for
      all workers.

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
    n = workers_on(mesh, exchange)
    if exchange.local_axis_name is not None:
        raise ValueError(
            "local_axis_name must be None here, where each worker has one gradient, "
            f"got {exchange!r}: use slamb_jax.per_worker_step"
        )
    mesh = indexable_mesh(mesh)
    tx = optax.with_extra_args_support(tx)
    of_worker = PartitionSpec(exchange.axis_name)
    partly: dict[str, Any] = {}
    if exchange.param_specs is not None:  # the others' axes are left to the compiler
        partly = {"axis_names": set(as_tuple(exchange.axis_name))}

    def init(params: optax.Params) -> optax.OptState:
        _check_replicas("params", params, n)

        def of_all(params: optax.Params) -> optax.OptState:
            first = jax.tree.map(lambda x: x[0], params)
            return simulated_replicas(tx.init(first), n)

        like = jax.eval_shape(of_all, params)
        there = state_shardings(like, mesh, exchange, behind=1)
        return jax.jit(of_all, out_shardings=there)(params)

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        check_params(params)
        for name, tree in (("updates", updates), ("state", state), ("params", params)):
            _check_replicas(name, tree, n)
        arrays = {k: x for k, x in extra_args.items() if _are_arrays(x)}
        others = {k: x for k, x in extra_args.items() if k not in arrays}

        def one_worker(replicas: Any, arrays: dict[str, Any]) -> Any:
            own = jax.tree.map(lambda x: jnp.squeeze(x, 0), replicas)
            with step_of_workers(exchange.axis_name):
                new = tx.update(*own, **arrays, **others)
            return jax.tree.map(lambda x: jnp.expand_dims(x, 0), new)

        return jax.shard_map(
            one_worker,
            mesh=mesh,
            in_specs=(of_worker, PartitionSpec()),
            out_specs=of_worker,
            **partly,
        )((updates, state, params), arrays)

    return optax.GradientTransformationExtraArgs(init, update)


def _check_replicas(name: str, tree: chex.ArrayTree, n: int) -> None:
    check_leading_sizes(name, tree, lambda size: size == n, f"{n} replicas")


def _are_arrays(tree: Any) -> bool:
    return all(isinstance(x, jax.Array) for x in jax.tree.leaves(tree))
