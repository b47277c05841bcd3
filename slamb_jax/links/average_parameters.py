"""Averages of parameters that drift apart, where workers step by themselves."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from slamb_jax._core import axes as _axes
from slamb_jax._core.checks import check_params, check_real, check_transformation
from slamb_jax._core.leaves import (
    chosen,
    keep_absent,
    map_present,
    next_step,
    present,
    unless,
)
from slamb_jax._core.rounding import copied, upcast_f32
from slamb_jax.compressors.codec import Sent
from slamb_jax.exchange import collectives as _collectives
from slamb_jax.exchange.mean import mean_over_workers
from slamb_jax.exchange.settings import Exchange, check_exchange
from slamb_jax.links.on_shards import on_shards


class AverageParametersState(NamedTuple):
    """State of :func:`average_parameters_every`; the same on all workers."""

    count: jax.Array  # type: ignore[assignment]  # int32, shape []
    anchor: optax.Params | None = None  # float32, as params: the last average
    outer: optax.OptState | None = None  # the outer optimizer's
    compressor: optax.OptState | None = None  # a worker's own, as its residual


def average_parameters_every(
    exchange: Exchange, *, compressor: optax.GradientTransformation | None = None
) -> optax.GradientTransformationExtraArgs:
    r"""Averages the parameters over the workers every H steps, after the update.

    The last link of a chain, after any optimizer whose workers step by themselves. They
    should draw from the same data: the mean of their steps is not the step along the
    mean gradient. At the steps :math:`t = 1, H + 1, 2H + 1, \ldots` (H = 1: at every
    step; in the authors' code that never fires)

    .. math:: p + u \leftarrow \text{mean over workers of } (p + u)

    The exchange stands in a conditional: at other steps nothing is sent. An optax
    transformation returns updates, not parameters, so the replicas then agree to
    rounding; where they must be bit-identical, overwrite them with
    :func:`average_parameters`. Moments are not averaged. The step count must be the
    same on all workers.

    **Outer optimizer.** With ``outer`` the difference to the last average a is the
    gradient of an optimizer that all workers run alike, at steps H, 2H, ...:

    .. math::

      d = p + u - a, \quad
      a \leftarrow a + \text{outer}(-\text{mean over workers of } Q(d)),
      \quad p + u \leftarrow a

    with Q the wire format of the ``payload``. After local AdamW in float32 that is
    DiLoCo with ``outer=optax.sgd(0.7, momentum=0.9, nesterov=True)``, after Muon
    MuLoCo, and with a single worker SNOO. With a ``compressor`` of the largest
    coordinates of d, and a residual for the others, it is SparseLoCo. All workers must
    begin with the same parameters, as with :func:`replicate`. They keep a: one more
    copy of the parameters.

    Args:
      exchange: between whom, how often (``sync_every``; None: never), in what wire
        format (``payload``), and by which ``outer`` optimizer.
      compressor: what sends the difference d to the last average: any optax
        transformation that returns its mean over the workers, such as
        :func:`compress_with_error_feedback`. It needs an ``outer`` optimizer, and
        ``payload=None``.

    Returns:
      A :class:`optax.GradientTransformationExtraArgs`; it needs ``params``.

    Raises:
      ValueError: for a payload without an outer optimizer, which would round the
        parameters; for a compressor without one, or beside a payload; in
        ``update``, without ``params`` or for an unbound axis.

    Examples:
      >>> import jax, jax.numpy as jnp, optax, slamb_jax
      >>> exchange = slamb_jax.Exchange("data", payload=None)
      >>> tx = optax.chain(
      ...     optax.sgd(1e-3), slamb_jax.average_parameters_every(exchange)
      ... )
      >>> def step(p):
      ...     u, _ = tx.update(jnp.zeros_like(p), tx.init(p), p)
      ...     return p + u
      >>> print(jax.vmap(step, axis_name="data")(jnp.array([1.0, 3.0])).round(3))
      [2. 2.]

    References:
      Xu et al., `SLAMB <https://proceedings.mlr.press/v202/xu23q.html>`_, ICML 2023;
      Douillard et al., `DiLoCo <https://arxiv.org/abs/2311.08105>`_, 2023; Thérien et
      al., `MuLoCo <https://arxiv.org/abs/2505.23725>`_, 2025; Kallusky et al., `SNOO
      <https://arxiv.org/abs/2510.15830>`_, 2025.
    """
    check_exchange(exchange)
    outer = exchange.outer
    sender = _sender(exchange, compressor)

    def init(params: optax.Params) -> AverageParametersState:
        count = jnp.zeros([], jnp.int32)
        if outer is None:
            return AverageParametersState(count)
        # In float32, since an outer step may be smaller than 16 bits can tell.
        check_real(params, "params")
        anchor = jax.tree.map(lambda p: copied(p, jnp.float32), params)
        sends = None if sender is None else sender.init(anchor)
        return AverageParametersState(count, anchor, outer.init(anchor), sends)

    def average(
        updates: optax.Updates,
        params: optax.Params,
        state: AverageParametersState,
        skip: jax.Array | None,
    ) -> tuple[optax.Updates, AverageParametersState]:
        """Updates that end in the average of one step, and the state after it."""
        if outer is None:
            # In the parameters' own dtype: codes would lose what they learned.
            ahead = map_present(lambda u, p: p + u.astype(p.dtype), updates, params)
            means = _mean(exchange, ahead, params, None, state.count)
            return map_present(_move, updates, means, params), state
        # With an outer optimizer they end in the next anchor.
        # 1. The mean over the workers of how far each went from the anchor.
        moves = map_present(_move_from_anchor, updates, params, state.anchor)
        sends = state.compressor
        if sender is None:
            means = _mean(exchange, moves, params, exchange.payload, state.count)
        else:
            means, sends = sender.update(moves, sends, params)
            if isinstance(means, Sent):
                raise ValueError(
                    "compressor must return the mean alone, got slamb_jax.Sent: give "
                    "compress_with_error_feedback(compressor), which keeps the rest"
                )
        # 2. From the anchor along it by a step of the outer optimizer: all workers
        # alike, on the same mean, so that its state is the same on all. Leaves without
        # a gradient keep their anchor: their difference is nothing.
        zeros = optax.tree.zeros_like(state.anchor)
        grads = keep_absent(map_present(jnp.negative, means), zeros)
        steps, outer_state = outer.update(grads, state.outer, state.anchor)
        anchor = map_present(lambda _, a, x: a + x, updates, state.anchor, steps)
        # 3. The parameters move there.
        u = map_present(_move, updates, anchor, params)
        anchor = keep_absent(anchor, state.anchor)
        new = state._replace(anchor=anchor, outer=outer_state, compressor=sends)
        return u, unless(skip, state, new)

    def update(
        updates: optax.Updates,
        state: AverageParametersState,
        params: optax.Params | None = None,
        skip: jax.Array | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, AverageParametersState]:
        del extra_args
        check_params(params)
        check_real(updates, "updates")
        check_real(params, "params")
        # Where types show several workers, no axis to average over would be a mistake.
        if exchange.axis_name is None:
            _axes.check_local(updates, None, exchange.shard_axes)
        step = next_step(state.count)
        # The count goes on at every step, skipped ones apart, and is the same on all
        # workers: of the conditional below one branch has a collective, in which a
        # worker would wait for ever for another that took the other branch.
        state = state._replace(count=unless(skip, state.count, step))
        # The mean of one is itself; an outer optimizer steps even for one worker.
        alone = outer is None and _axes.axis_size(exchange.axis_name) == 1
        if exchange.sync_every is None or alone:
            return updates, chosen(skip, state)
        now = functools.partial(average, skip=skip)
        due = exchange.averages_at(step)
        if due is True:  # at every step
            u, state = now(updates, params, state)
        else:
            u, state = _axes.cond(
                due, now, lambda u, _, state: (u, state), updates, params, state
            )
        return u, chosen(skip, state)

    return on_shards(optax.GradientTransformationExtraArgs(init, update), exchange)


def _sender(
    exchange: Exchange, compressor: optax.GradientTransformation | None
) -> optax.GradientTransformationExtraArgs | None:
    """What sends in place of the exchange; raises for what cannot go together."""
    rounds = exchange.payload is not None and exchange.selection is None
    if exchange.outer is None and rounds:
        raise ValueError(
            f"payload={exchange.payload!r} would round parameters: give payload=None"
        )
    if compressor is None:
        return None
    check_transformation("compressor", compressor)
    if exchange.outer is None or rounds:
        raise ValueError(
            f"compressor needs an outer optimizer and payload=None, got {exchange!r}"
        )
    return optax.with_extra_args_support(compressor)


def _mean(
    exchange: Exchange,
    tree: optax.Updates,
    params: optax.Params,
    payload: str | None,
    step: jax.Array,
) -> optax.Updates:
    """The mean over the workers of a tree like the updates, in a wire format."""
    rows, rebuild = present(tree, like=params, layout=exchange.layout)
    leaves, xs = [leaf for leaf, _ in rows], [x for _, x in rows]
    return rebuild(mean_over_workers(xs, leaves, exchange, payload, step).means)


def _move_from_anchor(u: jax.Array, p: jax.Array, anchor: jax.Array) -> jax.Array:
    """How far a parameter goes from its anchor, in float32."""
    return _difference(p.astype(anchor.dtype) + u.astype(anchor.dtype), anchor)


def _move(u: jax.Array, to: jax.Array, p: jax.Array) -> jax.Array:
    """From p to there, in u's dtype."""
    # The difference in float32: it is small, and p may be of 16 bits.
    wide = upcast_f32(p)
    return _difference(to.astype(wide.dtype), wide).astype(u.dtype)


def _difference(x: jax.Array, y: jax.Array) -> jax.Array:
    """``x - y``; 0 where they are equal, infinities too, as in a mask of -inf."""
    return jnp.where(x == y, jnp.zeros_like(x), x - y)


def average_parameters(
    params: optax.Params, axis_name: _axes.AxisName | None
) -> optax.Params:
    """The mean of the replicas: the same bits on every worker.

    Call it where ``axis_name`` is bound. Leaves that are neither floating point nor
    complex (counts, keys) are returned as they are. Sums in float32 at least. Under
    ``check_vma=True`` the types of the means do not vary over the axis.

    Args:
      params: a tree of arrays, each worker's own.
      axis_name: the mesh axis (or axes) to average over; None for a single worker.

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
    if axis_name is None:
        return params
    leaves, treedef = jax.tree.flatten(params)
    places = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.inexact)]
    # In float32 at least: a sum of many 16-bit numbers loses what each adds.
    wide = [upcast_f32(leaves[i]) for i in places]
    means = _collectives.pmean(wide, axis_name, typed_same=True)
    for i, mean in zip(places, means, strict=True):
        leaves[i] = mean.astype(leaves[i].dtype)
    return jax.tree.unflatten(treedef, leaves)
