"""Dense averages of gradients within a worker that is a group of devices."""

from typing import Any

import optax

from slamb_jax._core import axes as _axes
from slamb_jax._core.leaves import present
from slamb_jax._core.rounding import upcast_f32
from slamb_jax.exchange import collectives as _collectives
from slamb_jax.exchange.settings import Exchange, check_exchange


def average_gradients(exchange: Exchange) -> optax.GradientTransformationExtraArgs:
    r"""Averages the gradients densely within a worker, as data parallelism does.

    .. math:: g \leftarrow \text{mean over the devices of the worker of } g

    For workers that are groups of devices with fast links. The optimizers have it as
    their first link; put it in front of :func:`mask_momentum` in a chain of your own,
    and of :func:`accumulate`, whose sum must be the same on all devices of a worker.

    Each device must pass the gradient of its own share of the batch. Where types are
    tracked (``shard_map`` with ``check_vma=True``), ``jax.grad`` with respect to
    parameters whose type does not vary over the axis has already summed over it, which
    is refused here: :func:`per_worker_step` hands over parameters whose type does.

    Args:
      exchange: its ``local_axis_name`` is the mesh axis (or axes) of a worker's
        devices; with None, the gradients pass unchanged.

    Returns:
      A :class:`optax.GradientTransformationExtraArgs` without state. Its updates are
      float32 at least, so that the links that follow do not round them.

    Raises:
      ValueError: in ``update``, for an axis that is not bound, and for gradients that
        were summed over it already where the types show it.

    Examples:
      >>> import jax, jax.numpy as jnp, optax, slamb_jax
      >>> exchange = slamb_jax.Exchange("host", local_axis_name="device")
      >>> tx = optax.chain(slamb_jax.average_gradients(exchange), optax.sgd(1.0))
      >>> update = lambda g: tx.update(g, tx.init(g))[0]
      >>> print(jax.vmap(update, axis_name="device")(jnp.array([1.0, 3.0])))
      [-2. -2.]
    """
    check_exchange(exchange)

    def update(
        updates: optax.Updates,
        state: optax.EmptyState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.EmptyState]:
        del extra_args
        axis_name = exchange.local_axis_name
        if axis_name is None:
            return updates, state
        # What was averaged already would be averaged for nothing, where types show it.
        _axes.check_local(updates, axis_name)
        rows, rebuild = present(updates, updates if params is None else params)
        # In float32: the sum of many 16-bit gradients would lose what each adds.
        wide = [upcast_f32(g) for _, g, _ in rows]
        means = _collectives.pmean(wide, axis_name, typed_same=True)
        # Means vary over the axis where the parameters do, and only there: types that
        # do not would tell a link after this that nothing is left to exchange.
        if params is not None:
            axes = _axes.tracked_axes(axis_name)
            means = [
                _axes.vary_over(mean, axes & _axes.varying_axes(p))
                for mean, (_, _, p) in zip(means, rows, strict=True)
            ]
        return rebuild(means), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)
