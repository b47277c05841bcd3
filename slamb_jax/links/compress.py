"""Error feedback: what a compressor does not send of the updates is sent later."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from slamb_jax._core import checks
from slamb_jax._core.leaves import chosen, keep_absent, map_present, unless
from slamb_jax._core.rounding import round_to
from slamb_jax.compressors.codec import Sent, in_shape
from slamb_jax.compressors.of_exchange import of_exchange
from slamb_jax.exchange.settings import Exchange
from slamb_jax.links.on_shards import on_shards


class CompressState(NamedTuple):
    """State of :func:`compress_with_error_feedback`."""

    residual: optax.Updates | None  # float32, as the updates; None if nothing is kept
    compressor: optax.OptState


def compress_with_error_feedback(
    compressor: optax.GradientTransformation, *, decay: float = 1.0
) -> optax.GradientTransformationExtraArgs:
    r"""Sends the updates through a compressor; what is not sent waits.

    With g the worker's own gradient and q what the compressor sends of x:

    .. math::

      x_i &= g_i + \gamma e_i, \quad
      u = \text{mean over workers of } q_i, \quad
      e_i \leftarrow x_i - q_i

    Put it in front of any optimizer: all workers get the same u, and their parameters
    stay equal. Before an optimizer with momentum :func:`mask_momentum` is better: what
    waits takes no memory there, and is not as old. What 16-bit gradients cannot hold of
    x and u waits, too.

    Args:
      compressor: what sends, such as :func:`slamb_jax.compressors.top_k`: an optax
        transformation that returns :class:`slamb_jax.Sent`.
      decay: :math:`\gamma` in [0, 1], the share of the residual that is kept for the
        next step. 0: what is not sent is lost, and no residual is kept.

    Returns:
      A :class:`optax.GradientTransformationExtraArgs` whose updates have the dtype of
      the gradients.

    Raises:
      ValueError: for a value out of range, and for a compressor that returns something
        else.

    Examples:
      >>> import jax, jax.numpy as jnp, optax, slamb_jax
      >>> top_k = slamb_jax.compressors.top_k(0.5, "data")
      >>> tx = optax.chain(
      ...     slamb_jax.compress_with_error_feedback(top_k), optax.sgd(1.0)
      ... )
      >>> def two_steps(g):
      ...     first, state = tx.update(g, tx.init(g))
      ...     return first, tx.update(g, state)[0]
      >>> for updates in jax.vmap(two_steps, axis_name="data")(jnp.array([[3.0, 2.0]])):
      ...     print(updates)
      [[-3. -0.]]
      [[-0. -4.]]

    References:
      Karimireddy et al., `Error feedback fixes SignSGD
      <https://arxiv.org/abs/1901.09847>`_, ICML 2019.
    """
    checks.check_transformation("compressor", compressor)
    checks.check_static("decay", decay)
    checks.check_range("decay", decay, 0.0, 1.0)
    sender = optax.with_extra_args_support(compressor)

    def init(params: optax.Params) -> CompressState:
        checks.check_floating(params, "params")
        residual = None
        if decay:  # in float32: small remainders add up in it for many steps
            residual = optax.tree.zeros_like(params, dtype=jnp.float32)
        return CompressState(residual, sender.init(params))

    def update(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        skip: jax.Array | None = None,
        **extra_args: Any,
    ) -> tuple[Any, optax.OptState]:
        extra_args |= {} if skip is None else {"skip": skip}
        # A link that keeps what is not sent keeps no residual: see without_residual.
        if not isinstance(state, CompressState):
            return sender.update(updates, state, params, **extra_args)
        residual = updates if state.residual is None else state.residual
        checks.check_gradients(updates, residual)
        # 1. What the worker has to send: its gradient, and what still waits.
        wide = map_present(lambda g: g.astype(jnp.float32), updates)
        if decay:
            wide = map_present(lambda x, e: x + decay * e, wide, state.residual)
        # 2. Sent in the gradients' dtype, which is the wire's where no payload is.
        narrow = map_present(_narrow, updates, wide)
        sent, inner = sender.update(narrow, state.compressor, params, **extra_args)
        if not isinstance(sent, Sent):
            raise ValueError(
                "compressor must return slamb_jax.Sent(mean, unsent) from its update, "
                f"got {checks.shown(sent)}: see slamb_jax.compressors"
            )
        mean, unsent = (map_present(in_shape, part, narrow) for part in sent)
        means = map_present(_narrow, updates, mean)
        # 3. What was not sent waits, and what a narrow gradient cannot hold of x and of
        # M. It keeps its place where a leaf has no gradient at this step.
        kept = None
        if decay:
            rest = map_present(_what_waits, unsent, wide, narrow, mean, means)
            kept = keep_absent(unless(skip, state.residual, rest), state.residual)
        new = CompressState(kept, unless(skip, state.compressor, inner))
        return means, chosen(skip, new)

    return optax.GradientTransformationExtraArgs(init, update)


def _narrow(g: jax.Array, x: jax.Array) -> jax.Array:
    """``x`` in the dtype of a gradient, and in its range: what is beyond it waits."""
    if g.dtype == x.dtype:
        return x
    largest = jnp.finfo(g.dtype).max.astype(x.dtype)
    # But for what is infinite, as a gradient that overflowed.
    in_range = jnp.where(jnp.isfinite(x), jnp.clip(x, -largest, largest), x)
    return round_to(in_range, g.dtype)


def _what_waits(*parts: jax.Array) -> jax.Array:
    """The residual of a leaf, float32: what was not sent, of x and of M."""
    wide = (part.astype(jnp.float32) for part in parts)
    unsent, x, narrow, mean, narrow_mean = wide
    return unsent + (x - narrow) + (mean - narrow_mean)


def without_residual(state: optax.OptState) -> optax.OptState:
    """The state of a compressor, of which a link keeps what is not sent."""
    return state.compressor if isinstance(state, CompressState) else state


def check_keeps_nothing(state: optax.OptState, params: optax.Params) -> None:
    """Raises for the state of a compressor that has a residual of its own."""
    shapes = [jnp.shape(x) for x in jax.tree.leaves(params)]
    treedef: Any = jax.tree.structure(params)

    # By shape and type: a residual may have any name, and lie anywhere in a state.
    def is_residual(x: Any) -> bool:
        leaves = jax.tree.leaves(x)
        return (
            jax.tree.structure(x) == treedef
            and [jnp.shape(leaf) for leaf in leaves] == shapes
            and all(jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in leaves)
        )

    flat = jax.tree_util.tree_leaves_with_path(state, is_leaf=is_residual)
    for path, x in flat if shapes else ():
        if is_residual(x):
            raise ValueError(
                f"compressor keeps state{jax.tree_util.keystr(path)}, a residual like "
                "the parameters. What is not sent waits in the momentum already, and "
                "would count twice: return slamb_jax.Sent(mean, unsent) alone"
            )


def randk_compress_with_error_feedback(
    exchange: Exchange,
) -> optax.GradientTransformationExtraArgs:
    r"""Exchanges a share of the updates, in few bits; what is not sent waits.

    With g the worker's own gradient, :math:`M_t` the coordinates that the exchange
    selects at step t (all of them without a selection), and Q its wire format:

    .. math::

      x_i &= g_i + e_i, \quad q_i = Q(x_i[M_t]) \\
      u &= \text{mean over workers of } q_i, \quad u[\neg M_t] = 0 \\
      e_i &\leftarrow x_i - q_i

    which is error feedback. No index is sent, since all workers know :math:`M_t`. Where
    the mean is rounded once more, the worker that rounds it for all keeps n times what
    that took, since it sends an nth of the next mean: the sum of all u is the sum of
    the mean gradients, less what waits.

    Use it by itself in front of an optimizer that has no momentum to wait in, such as
    ``optax.sgd``: all workers get the same u, and their parameters stay equal. Before
    an optimizer with momentum :func:`mask_momentum` is better: what waits takes no
    memory there, and is not as old.

    It has the name of a part of the paper, random-k with error feedback. Nothing in it
    is random, the default exchange sends all coordinates, in few bits, and as the
    compressor of :func:`mask_momentum` it keeps no residual.

    Args:
      exchange: between whom, which coordinates when (``selection``), and in what wire
        format (``payload``). It must exchange at every step.

    Returns:
      A :class:`optax.GradientTransformationExtraArgs` whose updates have the dtype of
      the gradients. It may be the ``compressor`` of :func:`mask_momentum`, which then
      keeps what is not sent in the momentum, and no residual.

    Raises:
      ValueError: for an exchange that sends nothing at most steps; in ``update``, for
        an unbound axis, and for gradients that were averaged already where the types
        show it (``shard_map`` with ``check_vma=True``).

    Examples:
      >>> import jax.numpy as jnp, optax, slamb_jax
      >>> half = slamb_jax.selections.Strided(0.5, min_size=0)
      >>> exchange = slamb_jax.Exchange(payload=None, selection=half)
      >>> tx = optax.chain(
      ...     slamb_jax.randk_compress_with_error_feedback(exchange), optax.sgd(1.0)
      ... )
      >>> params = jnp.ones((2, 2))
      >>> state = tx.init(params)
      >>> for _ in range(2):
      ...     updates, state = tx.update(jnp.ones((2, 2)), state, params)
      ...     print((updates != 0).sum())
      2
      2

    References:
      Xu et al., `SLAMB <https://proceedings.mlr.press/v202/xu23q.html>`_, ICML 2023,
      section 3: momentum masking; Stich et al., `Sparsified SGD with Memory
      <https://arxiv.org/abs/1809.07599>`_, 2018: error feedback.
    """
    return on_shards(compress_with_error_feedback(of_exchange(exchange)), exchange)
