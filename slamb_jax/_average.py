"""Averaging the parameters of replicas that drift apart."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from slamb_jax import _axes, _collectives
from slamb_jax._checks import check_apart, check_integer, check_params
from slamb_jax._exchange import Route, exchange, means_of
from slamb_jax._leaves import map_present
from slamb_jax._quantize import Payload, check_payload


class AverageParametersState(NamedTuple):
    """State of :func:`average_parameters_every`."""

    count: jax.Array  # type: ignore[assignment]  # int32, shape []
    anchor: optax.Params | None = None  # float32, as params; only with a payload


def average_parameters_every(
    sync_every: int | None,
    axis_name: _axes.AxisName | None,
    *,
    local_axis_name: _axes.AxisName | None = None,
    payload: Payload = None,
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

    With a ``payload`` of fewer bits what travels is the difference to the anchor a, the
    last average, which all workers keep (one more copy of the parameters):

    .. math::

      d = p + u - a, \quad a \leftarrow a + \text{mean over workers of } Q(d),
      \quad p + u \leftarrow a + (d - Q(d))

    What rounding took of its own a worker keeps in its parameters and sends the next
    time; the mean of the parameters stays what it was, but for the rounding of the mean
    itself. All workers must begin with the same parameters, as :func:`replicate` has
    it; the anchor stays the same on all to the last bit.

    Args:
      sync_every: H, a positive integer; None for never.
      axis_name: the mesh axis (or axes) of the workers; None for a single one.
      local_axis_name: the mesh axis (or axes) of the devices within a worker, if it is
        a group of several, which then each exchange a slice.
      payload: what travels: None for the parameters as they are; ``"bfloat16"``,
        ``"float16"`` or codes, as in :func:`randk_compress_with_error_feedback`.

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
    check_apart(axis_name, local_axis_name)
    route = Route(axis_name, local_axis_name, check_payload("payload", payload))

    def init(params: optax.Params) -> AverageParametersState:
        anchor = None if payload is None else jax.tree.map(_anchor, params)
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
        n = _axes.axis_size(axis_name)
        if sync_every is None or n == 1:
            return updates, AverageParametersState(step, anchor)

        def average(updates: optax.Updates, params: optax.Params, anchor: Any) -> Any:
            if anchor is None:
                return _towards_mean(updates, params, route, step), None
            return _towards_anchor(updates, params, anchor, route, step)

        def keep(updates: optax.Updates, params: optax.Params, anchor: Any) -> Any:
            del params
            return updates, anchor

        if sync_every == 1:
            updates, anchor = average(updates, params, anchor)
        else:
            due = state.count % sync_every == 0
            updates, anchor = _axes.cond(due, average, keep, updates, params, anchor)
        return updates, AverageParametersState(step, anchor)

    return optax.GradientTransformationExtraArgs(init, update)


def average_parameters(
    params: optax.Params, axis_name: _axes.AxisName | None
) -> optax.Params:
    """The mean of the replicas: the same bits on every worker.

    Call it where ``axis_name`` is bound. Leaves that are not floating point (counts,
    keys) are returned as they are, with the types that they have. Sums in float32 at
    least. Under ``check_vma=True`` the types of the means say that they no longer vary
    over the axis.

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
    updates: optax.Updates, params: optax.Params, route: Route, step: jax.Array
) -> optax.Updates:
    """The updates that take each replica to the mean of where all would go."""
    there = map_present(lambda u, p: p + u.astype(p.dtype), updates, params)
    places, treedef = jax.tree.flatten(there)
    mean = jax.tree.unflatten(treedef, means_of(places, route, step))
    return map_present(_step_between, updates, mean, params)


def _step_between(u: jax.Array, mean: jax.Array, p: jax.Array) -> jax.Array:
    return (_collectives.widened(mean) - _collectives.widened(p)).astype(u.dtype)


def _anchor(p: Any) -> jax.Array:
    """A copy, for buffers may be donated; of zeros where there is but a shape."""
    if isinstance(p, jax.ShapeDtypeStruct):
        return jnp.zeros(p.shape, jnp.float32)
    return jnp.array(p, jnp.float32, copy=True)


def _towards_anchor(
    updates: optax.Updates,
    params: optax.Params,
    anchor: optax.Params,
    route: Route,
    step: jax.Array,
) -> tuple[optax.Updates, optax.Params]:
    """The updates that take each replica near the new anchor, and that anchor."""
    treedef: Any
    us, treedef = jax.tree.flatten(updates, is_leaf=lambda x: x is None)
    ps, anchors = treedef.flatten_up_to(params), treedef.flatten_up_to(anchor)
    here = [i for i, u in enumerate(us) if u is not None]
    wide = {i: ps[i].astype(jnp.float32) for i in here}
    away = [wide[i] + us[i].astype(jnp.float32) - anchors[i] for i in here]
    found = exchange(away, route, step)
    for i, d, mean, sent in zip(here, away, found.means, found.sent, strict=True):
        anchors[i] = anchors[i] + mean
        us[i] = (anchors[i] + (d - sent) - wide[i]).astype(us[i].dtype)
    return treedef.unflatten(us), treedef.unflatten(anchors)
