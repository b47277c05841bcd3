"""Averaging the parameters of replicas that drift apart."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from slamb_jax._tree import axes as _axes
from slamb_jax._tree.checks import check_params
from slamb_jax._tree.leaves import present
from slamb_jax.exchange.blocks import means_over_workers
from slamb_jax.exchange.settings import Exchange, check_exchange
from slamb_jax.links.anchor import copy_f32, towards_anchor
from slamb_jax.links.shards import on_shards


class AverageParametersState(NamedTuple):
    """State of :func:`average_parameters_every`."""

    count: jax.Array  # type: ignore[assignment]  # int32, shape []
    anchor: optax.Params | None = None  # float32, as params; with average_payload


def average_parameters_every(
    exchange: Exchange,
) -> optax.GradientTransformationExtraArgs:
    r"""Averages the parameters over the workers every H steps, after the update.

    The last link of a chain. With the step :math:`t = 1, 2, \ldots`:

    .. math::

      u \leftarrow \begin{cases}
        \text{mean over workers of } (p + u) - p & t \bmod H = 1 \bmod H \\
        u & \text{otherwise}
      \end{cases}

    so at steps 1, H + 1, 2H + 1, ... (H = 1: at every step; in the authors' code that
    never fires). The exchange stands in a conditional: at other steps nothing is sent.
    An optax transformation returns updates, not parameters, so the replicas then agree
    to rounding; where they must be bit-identical, overwrite them with
    :func:`average_parameters`. Moments are not averaged. The step count must be the
    same on all workers.

    With an ``average_payload`` the difference to the anchor a, the last average, is
    exchanged; all workers keep the anchor (one more copy of the parameters):

    .. math::

      d = p + u - a, \quad a \leftarrow a + \text{mean over workers of } Q(d),
      \quad p + u \leftarrow a + (d - Q(d))

    A worker keeps what rounding took of its own difference in its parameters, and sends
    it the next time; the mean of the parameters is unchanged but for the rounding of
    the mean itself. All workers must begin with the same parameters, as with
    :func:`replicate`; the anchor stays bit-identical on all.

    Args:
      exchange: between whom, how often (``sync_every``; None: never), and in what wire
        format (``average_payload``).

    Returns:
      A :class:`optax.GradientTransformationExtraArgs`; it needs ``params``.

    Raises:
      ValueError: in ``update``, without ``params`` or for an unbound axis.

    Examples:
      >>> import jax, jax.numpy as jnp, slamb_jax
      >>> tx = slamb_jax.average_parameters_every(
      ...     slamb_jax.Exchange("data", sync_every=100)
      ... )
      >>> def step(p):
      ...     u, _ = tx.update(jnp.zeros_like(p), tx.init(p), p)
      ...     return p + u
      >>> print(jax.vmap(step, axis_name="data")(jnp.array([1.0, 3.0])))
      [2. 2.]

    References:
      Xu et al., `SLAMB <https://proceedings.mlr.press/v202/xu23q.html>`_, ICML 2023.
    """
    check_exchange(exchange)
    sync_every = exchange.sync_every

    def init(params: optax.Params) -> AverageParametersState:
        anchor = None
        if exchange.average_payload is not None:
            anchor = jax.tree.map(copy_f32, params)
        return AverageParametersState(jnp.zeros([], jnp.int32), anchor)

    def update(
        updates: optax.Updates,
        state: AverageParametersState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, AverageParametersState]:
        del extra_args
        check_params(params)
        step, anchor = optax.safe_increment(state.count), state.anchor
        n = _axes.axis_size(exchange.axis_name)
        if sync_every is None or n == 1:
            return updates, AverageParametersState(step, anchor)

        def average(updates: optax.Updates, params: optax.Params, anchor: Any) -> Any:
            if anchor is None:
                return _towards_mean(updates, params, exchange, step), None
            return towards_anchor(updates, params, anchor, exchange, step)

        def keep(updates: optax.Updates, params: optax.Params, anchor: Any) -> Any:
            del params
            return updates, anchor

        if sync_every == 1:
            updates, anchor = average(updates, params, anchor)
        else:
            due = state.count % sync_every == 0
            updates, anchor = _axes.cond(due, average, keep, updates, params, anchor)
        return updates, AverageParametersState(step, anchor)

    tx = optax.GradientTransformationExtraArgs(init, update)
    return tx if exchange.param_specs is None else on_shards(tx, exchange)


def _towards_mean(
    updates: optax.Updates, params: optax.Params, exchange: Exchange, step: jax.Array
) -> optax.Updates:
    """The updates that take each replica to the mean."""
    rows, rebuild = present(updates, params, like=params, layout=exchange.layout)
    new = [p + u.astype(p.dtype) for _, u, p in rows]
    means = means_over_workers(new, [leaf for leaf, *_ in rows], exchange, None, step)
    return rebuild(
        [_difference(m, p, u) for m, (_, u, p) in zip(means, rows, strict=True)]
    )


def _difference(mean: jax.Array, p: jax.Array, u: jax.Array) -> jax.Array:
    """The update from p to the mean, in the dtype of u."""
    wide = jnp.float32 if p.dtype.itemsize < 4 else p.dtype
    return (mean.astype(wide) - p.astype(wide)).astype(u.dtype)
