"""Averaging the parameters of replicas that drift apart."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

from slamb_jax._tree import axes as _axes
from slamb_jax._tree.checks import check_params
from slamb_jax._tree.leaves import Leaf, keep_absent, leaves_of, present
from slamb_jax.exchange.blocks import (
    Blocks,
    SelectionAtStep,
    map_rows,
    means_over_workers,
)
from slamb_jax.exchange.means import exchange_means
from slamb_jax.exchange.settings import Exchange, check_exchange
from slamb_jax.links.shards import on_shards


class AverageParametersState(NamedTuple):
    """State of :func:`average_parameters_every`."""

    count: jax.Array  # type: ignore[assignment]  # int32, shape []
    anchor: optax.Params | None = None  # float32, as params; see there
    outer: optax.OptState | None = None  # the outer optimizer's


def average_parameters_every(
    exchange: Exchange,
) -> optax.GradientTransformationExtraArgs:
    r"""Averages the parameters over the workers every H steps, after the update.

    The last link of a chain, behind any optimizer. With the step
    :math:`t = 1, 2, \ldots`:

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

    **Rolling**, the default for H above 1: each step averages the coordinates
    :math:`R_t`, a share 1/H of them and all of the small leaves; each coordinate has
    its turn once in H steps. As many bytes at every step, and no conditional.

    **In codes.** With an ``average_payload`` the difference to the anchor a, the last
    average, is exchanged; all workers keep the anchor (one more copy of the
    parameters):

    .. math::

      d = p + u - a, \quad a \leftarrow a + \text{mean over workers of } Q(d),
      \quad p + u \leftarrow a + (d - Q(d))

    A worker keeps what rounding took of its own difference in its parameters, and sends
    it the next time; what rounding took of the mean is lost. (With ``"ternary"`` that
    keeps small, noisy coordinates of the mean from moving: AdamW ended lower so than
    with it sent again, Muon higher.) All workers must begin with the same parameters,
    as with :func:`replicate`; the anchor stays bit-identical on all.

    **Overlap.** With ``overlap`` in the exchange the parameters are averaged as the
    last step left them, and this step's update is added behind: :math:`p` stands for
    :math:`p + u` above, and :math:`p + u \leftarrow \ldots + u`. Then the exchange does
    not wait for this step's gradient, and can run behind the forward and backward pass.

    **Outer optimizer.** With ``outer`` the difference is the gradient of an optimizer
    that all workers run alike, at steps H, 2H, ...:

    .. math::

      a \leftarrow a + \text{outer}(-\text{mean over workers of } Q(d)),
      \quad p + u \leftarrow a + (d - Q(d))

    Behind local AdamW (``average_payload=None``) that is DiLoCo with
    ``outer=optax.sgd(0.7, momentum=0.9, nesterov=True)``, behind Muon MuLoCo, with a
    single worker SNOO, and with ``outer=None, rolling=False`` local SGD.

    Args:
      exchange: between whom, how often (``sync_every``; None: never), whether all at
        once (``rolling``), in what wire format (``average_payload``), and by which
        ``outer`` optimizer.

    Returns:
      A :class:`optax.GradientTransformationExtraArgs`; it needs ``params``.

    Raises:
      ValueError: in ``update``, without ``params`` or for an unbound axis.

    Examples:
      >>> import jax, jax.numpy as jnp, optax, slamb_jax
      >>> exchange = slamb_jax.Exchange("data", average_payload=None)
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
      Douillard et al., `DiLoCo <https://arxiv.org/abs/2311.08105>`_, 2023;
      Thérien et al., `MuLoCo <https://arxiv.org/abs/2505.23725>`_, 2025; Kallusky et
      al., `SNOO <https://arxiv.org/abs/2510.15830>`_, 2025.
    """
    check_exchange(exchange)
    sync_every, outer = exchange.sync_every, exchange.outer

    def init(params: optax.Params) -> AverageParametersState:
        anchor = outer_state = None
        if exchange.keeps_anchor:
            anchor = jax.tree.map(_copy_f32, params)
        if outer is not None:
            outer_state = outer.init(anchor)
        return AverageParametersState(jnp.zeros([], jnp.int32), anchor, outer_state)

    def update(
        updates: optax.Updates,
        state: AverageParametersState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, AverageParametersState]:
        del extra_args
        check_params(params)
        step, kept = optax.safe_increment(state.count), state[1:]
        n = _axes.axis_size(exchange.axis_name)
        if sync_every is None or (n == 1 and outer is None):
            return updates, AverageParametersState(step, *kept)

        def average(updates: optax.Updates, params: optax.Params, kept: Any) -> Any:
            return _averaged(updates, params, kept, exchange, step)

        def keep(updates: optax.Updates, params: optax.Params, kept: Any) -> Any:
            del params
            return updates, kept

        due = exchange.averages_at(step)
        if due is True:  # at every step
            updates, kept = average(updates, params, kept)
        else:
            updates, kept = _axes.cond(due, average, keep, updates, params, kept)
        return updates, AverageParametersState(step, *kept)

    tx = optax.GradientTransformationExtraArgs(init, update)
    return tx if exchange.param_specs is None else on_shards(tx, exchange)


def _averaged(
    updates: optax.Updates,
    params: optax.Params,
    kept: tuple[optax.Params | None, optax.OptState | None],
    exchange: Exchange,
    step: jax.Array,
) -> tuple[optax.Updates, tuple[Any, Any]]:
    """The updates that take each replica to the average; anchor and outer state."""
    anchor, outer_state = kept
    rows, rebuild = present(updates, params, like=params, layout=exchange.layout)
    leaves, us, ps = ([row[i] for row in rows] for i in range(3))
    blocks = _blocks(leaves, params, exchange, step)
    difference = functools.partial(_difference, exchange=exchange)
    if anchor is None:
        new = [_stepped(p, u, p.dtype, exchange) for u, p in zip(us, ps, strict=True)]
        packed = map_rows(Blocks.pack, blocks, new)
        means = means_over_workers(packed, leaves, exchange, None, step)
        there = map_rows(Blocks.unpack, blocks, means, new)
        return rebuild(map_rows(difference, there, ps, us)), (None, None)

    old = [row[2] for row in present(updates, anchor, like=params)[0]]
    new = [_stepped(p, u, jnp.float32, exchange) for u, p in zip(us, ps, strict=True)]
    ahead = map_rows(
        Blocks.pack, blocks, [x - a for x, a in zip(new, old, strict=True)]
    )
    found = exchange_means(
        ahead, leaves, exchange, exchange.average_payload, step, with_errors=True
    )
    if exchange.outer is None:
        anchors = [
            a + m
            for a, m in zip(
                map_rows(Blocks.pack, blocks, old), found.means, strict=True
            )
        ]
    else:
        grads = keep_absent(
            rebuild([-m for m in found.means]), optax.tree.zeros_like(anchor)
        )
        moved, outer_state = exchange.outer.update(grads, outer_state, anchor)
        moved = [row[2] for row in present(updates, moved, like=params)[0]]
        anchors = [a + m for a, m in zip(old, moved, strict=True)]
    there = [
        a + (d - sent) for a, d, sent in zip(anchors, ahead, found.sent, strict=True)
    ]
    there = map_rows(Blocks.unpack, blocks, there, new)
    anchor = keep_absent(rebuild(map_rows(Blocks.unpack, blocks, anchors, old)), anchor)
    return rebuild(map_rows(difference, there, ps, us)), (anchor, outer_state)


def _blocks(
    leaves: Sequence[Leaf], params: optax.Params, exchange: Exchange, step: jax.Array
) -> list[Blocks]:
    """The blocks of each leaf that are averaged."""
    if not exchange.in_turn:
        return [Blocks(1, None, jnp.ones(0, bool))] * len(leaves)
    selection = exchange.average_selection(leaves_of(params, exchange.layout))
    at_step = SelectionAtStep(selection, step)
    return [at_step.blocks(leaf) for leaf in leaves]


def _stepped(
    p: jax.Array, u: jax.Array, dtype: DTypeLike, exchange: Exchange
) -> jax.Array:
    """What is averaged: the parameters behind this step, or before it."""
    p = p.astype(dtype)
    return p if exchange.overlap else p + u.astype(dtype)


def _difference(
    there: jax.Array, p: jax.Array, u: jax.Array, exchange: Exchange
) -> jax.Array:
    """The update from p to there, and with ``overlap`` this step's, in u's dtype."""
    wide = jnp.float32 if p.dtype.itemsize < 4 else p.dtype
    moved = there.astype(wide) - p.astype(wide)
    return (moved + u.astype(wide) if exchange.overlap else moved).astype(u.dtype)


def _copy_f32(p: Any) -> jax.Array:
    """A copy, since buffers may be donated; zeros for a ``ShapeDtypeStruct``."""
    if isinstance(p, jax.ShapeDtypeStruct):
        return jnp.zeros(p.shape, jnp.float32)
    return jnp.array(p, jnp.float32, copy=True)
