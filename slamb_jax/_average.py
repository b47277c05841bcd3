"""Averaging the parameters of replicas that drift apart."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from slamb_jax import _collectives
from slamb_jax._checks import check_axis_name, check_integer, check_params
from slamb_jax._leaves import map_present


class AverageParametersState(NamedTuple):
    """State of :func:`average_parameters_every`."""

    count: jax.Array  # type: ignore[assignment]  # int32, shape []


def average_parameters_every(
    sync_every: int | None, axis_name: _collectives.AxisName | None
) -> optax.GradientTransformationExtraArgs:
    r"""Averages the parameters over the workers every H steps, after the update.

    The last link of a chain. With the step :math:`t = 1, 2, \ldots`:

    .. math::

      u \leftarrow \begin{cases}
        \text{mean over workers of } (p + u) - p & t \bmod H = 1 \bmod H \\
        u & \text{otherwise}
      \end{cases}

    so at steps 1, H + 1, 2H + 1, ... (``sync_every=1``: at every step; in the
    authors' code that never fires). The exchange stands in a real conditional: at
    other steps nothing is sent. Since an optax transformation returns updates, not
    parameters, the replicas then agree to rounding; where they must be equal to the
    last bit, overwrite them with :func:`average_parameters`. Moments are not averaged.

    The step count must be the same on all workers. Under ``vmap`` with a batched
    count both branches are computed.

    Args:
      sync_every: H, a positive integer; None for never.
      axis_name: the mesh axis (or axes) of the workers; None for a single one.

    Returns:
      A :class:`optax.GradientTransformationExtraArgs`; it needs ``params``.

    Raises:
      ValueError: for ``sync_every`` out of range; in ``update``, without ``params``
        or for an unbound axis.

    Examples:
      >>> import jax, jax.numpy as jnp, slamb_jax
      >>> tx = slamb_jax.average_parameters_every(100, "data")
      >>> def step(p):
      ...     u, _ = tx.update(jnp.zeros_like(p), tx.init(p), p)
      ...     return p + u
      >>> print(jax.vmap(step, axis_name="data")(jnp.array([1.0, 3.0])))
      [2. 2.]

    References:
      Xu et al., `SLAMB <https://proceedings.mlr.press/v202/xu23q.html>`_, ICML 2023.
    """
    if sync_every is not None:
        check_integer("sync_every", sync_every, 1)
    check_axis_name(axis_name)

    def init(params: optax.Params) -> AverageParametersState:
        del params
        return AverageParametersState(jnp.zeros([], jnp.int32))

    def update(
        updates: optax.Updates,
        state: AverageParametersState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, AverageParametersState]:
        del extra_args
        check_params(params)
        new_state = AverageParametersState(optax.safe_increment(state.count))
        n = _collectives.axis_size(axis_name)
        if sync_every is None or n == 1:
            return updates, new_state

        def average(updates: optax.Updates, params: optax.Params) -> optax.Updates:
            return _towards_mean(updates, params, axis_name)

        def keep(updates: optax.Updates, params: optax.Params) -> optax.Updates:
            del params
            return updates

        if sync_every == 1:
            return average(updates, params), new_state
        due = state.count % sync_every == 0
        return _collectives.cond(due, average, keep, updates, params), new_state

    return optax.GradientTransformationExtraArgs(init, update)


def average_parameters(
    params: optax.Params, axis_name: _collectives.AxisName | None
) -> optax.Params:
    """The mean of the replicas: the same bits on every worker.

    Call it where ``axis_name`` is bound. Leaves that are not floating point (counts,
    keys) are returned as they are. Sums in float32 at least. Under
    ``check_vma=True`` the result's type says that it no longer varies over the axis.

    Args:
      params: a tree of arrays, each worker's own.
      axis_name: the mesh axis (or axes) of the workers; None for a single one.

    Returns:
      A tree like ``params``.

    Raises:
      ValueError: if ``axis_name`` is not bound.

    Examples:
      >>> import functools, jax, jax.numpy as jnp, slamb_jax
      >>> mean = functools.partial(slamb_jax.average_parameters, axis_name="data")
      >>> print(jax.vmap(mean, axis_name="data")(jnp.array([1.0, 2.0, 6.0])))
      [3. 3. 3.]
    """
    return _collectives.agreed_mean(params, axis_name)


def _towards_mean(
    updates: optax.Updates, params: optax.Params, axis_name: _collectives.AxisName
) -> optax.Updates:
    """The updates that take each replica to the mean of where all would go."""
    there = map_present(lambda u, p: p + u.astype(p.dtype), updates, params)
    places, treedef = jax.tree.flatten(there)
    mean = jax.tree.unflatten(treedef, _collectives.mean_over(places, axis_name))
    return map_present(_step_between, updates, mean, params)


def _step_between(u: jax.Array, mean: jax.Array, p: jax.Array) -> jax.Array:
    return (_collectives.widened(mean) - _collectives.widened(p)).astype(u.dtype)
