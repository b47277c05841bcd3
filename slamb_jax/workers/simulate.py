"""Many workers on one device: the same step, batched by ``jax.vmap``."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from slamb_jax._core.axes import as_tuple
from slamb_jax._core.checks import check_integer, check_value
from slamb_jax.exchange.settings import Exchange, check_exchange
from slamb_jax.workers import guards
from slamb_jax.workers.step import Step, WorkersStep, own_step


def simulated_step(step: Step, workers: int, exchange: Exchange) -> WorkersStep:
    """Makes a jitted step of n workers, simulated on one device, from that of one.

    It has the results of :func:`per_worker_step` to rounding, in one ``jax.vmap``.
    Memory holds n states, and the activations of n gradients. They are computed one
    after the other, in the memory of one and often faster on a CPU, where ``step`` has
    ``jax.custom_batching.sequential_vmap(jax.value_and_grad(loss))(params, batch)``.
    Step counts that agree on all workers are waited for and not batched, so that
    parameters are averaged only at the steps that are due.
    Under ``jax.set_mesh`` with Explicit axes jax 0.12 does not compile it.

    Args:
      step: as for :func:`per_worker_step`.
      workers: n, at least 1.
      exchange: that of the optimizer, without ``local_axis_name`` and ``param_specs``.

    Returns:
      What :func:`per_worker_step` does, for states of :func:`simulated_replicas`.

    Raises:
      ValueError: for ``workers`` or ``exchange`` out of range; when called, for a
        ``state``, ``batch`` or ``step`` that does not fit.

    Examples:
      >>> import jax.numpy as jnp, slamb_jax
      >>> def step(state, batch):
      ...     mean = slamb_jax.average_parameters(batch.mean(), axis_name="data")
      ...     return state + mean, batch.sum()
      >>> run = slamb_jax.simulated_step(step, 128, slamb_jax.Exchange("data"))
      >>> state = slamb_jax.simulated_replicas(jnp.zeros(()), 128)
      >>> state, report = run(state, jnp.ones(256))
      >>> print(state.shape, state[0], report[0])
      (128,) 1.0 2.0
    """
    check_value(callable(step), "step", "a function", step)
    check_integer("workers", workers, 1)
    axes = as_tuple(check_exchange(exchange).axis_name)
    one_device = exchange.local_axis_name is None and exchange.param_specs is None
    if len(axes) != 1 or not one_device:
        raise ValueError(
            "exchange must have one axis_name, and neither local_axis_name nor "
            f"param_specs, where workers are simulated on one device, got {exchange!r}"
        )
    axis_name = axes[0]

    def all_workers(
        state: Any, batch: Any, key: Any, of_leaves: tuple[int | None, ...]
    ) -> tuple[Any, Any]:
        of_state = jax.tree.unflatten(jax.tree.structure(state), of_leaves)
        state = jax.tree.map(lambda x, at: x[0] if at is None else x, state, of_state)
        of_batch = jax.tree.map(lambda x: 0 if x.ndim else None, batch)

        def share(x: jax.Array) -> jax.Array:
            rows = (workers, x.shape[0] // workers) if x.ndim else ()
            return x.reshape(*rows, *x.shape[1:])

        def one_worker(state: Any, batch: Any) -> tuple[Any, Any]:
            return own_step(step, axis_name, state, batch, key)

        mapped = jax.vmap(
            one_worker, (of_state, of_batch), axis_name=axis_name, axis_size=workers
        )
        return mapped(state, jax.tree.map(share, batch))

    def place(state: Any, batch: Any, key: Any) -> tuple[Any, ...]:
        guards.check_arguments(state, batch, workers, workers)
        return state, batch, key, tuple(map(_axis_of, jax.tree.leaves(state)))

    jitted = jax.jit(all_workers, donate_argnums=0, static_argnums=3)
    return WorkersStep(jitted, place, jitted)


def _axis_of(x: Any) -> int | None:
    """The axis of the workers in a leaf; None for a count that is the same for all."""
    if len(x.shape) != 1 or not jnp.issubdtype(x.dtype, jnp.integer):
        return 0
    has_no_value = isinstance(x, jax.core.Tracer | jax.ShapeDtypeStruct)
    return None if has_no_value or not np.ptp(np.asarray(x)) else 0
