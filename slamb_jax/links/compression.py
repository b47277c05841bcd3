"""Random-k compression with error feedback: a share of the updates is exchanged."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from slamb_jax._axes import check_local
from slamb_jax._checks import check_bool, check_floating
from slamb_jax._ex.compress import compress
from slamb_jax._layout import mesh_axes
from slamb_jax._rounding import next_step
from slamb_jax._skip import Skip
from slamb_jax.exchange import Exchange, check_exchange
from slamb_jax.links.shards import on_shards


class RandkCompressState(NamedTuple):
    """State of :func:`randk_compress_with_error_feedback`."""

    count: jax.Array  # type: ignore[assignment]  # int32, shape []
    residual: optax.Updates | None  # float32, as updates; None if nothing is kept


def randk_compress_with_error_feedback(
    exchange: Exchange, *, keep_residual: bool = True
) -> optax.GradientTransformationExtraArgs:
    r"""Averages a selected share of the updates over the workers; the rest waits.

    With :math:`M_t` the coordinates that the exchange selects at step t:

    .. math::

      x &= g + e \\
      u[M_t] &= \text{mean over workers of } x[M_t], \quad u[\neg M_t] = 0 \\
      e &= x - (\text{what this worker sent})

    which is classical error feedback and goes in front of any optimizer. With
    ``keep_residual=False`` there is no :math:`e` and the rest passes through,
    :math:`u[\neg M_t] = g[\neg M_t]`: that is how :func:`mask_momentum` uses it, whose
    momentum is the memory. No indices are communicated: every worker knows
    :math:`M_t`.

    Args:
      exchange: between whom, which coordinates when, and in what wire format.
      keep_residual: hold what was not sent in a residual, which is added at the next
        step. False: it passes through, and a residual is kept only of a payload with
        ``error_feedback``, of what rounding took:
        :math:`x[M_t] = (g + e)[M_t]`, :math:`e[M_t] = (x - Q(x))[M_t]`.

    Returns:
      A :class:`optax.GradientTransformationExtraArgs`. A residual is float32 and also
      keeps what rounding took of what the worker sent, and with a quantizer n times
      what it took of the means that this worker rounded for all, since the worker
      sends an nth of the next.

    Raises:
      ValueError: in ``update``, if an axis is not bound, or if the updates were
        averaged already and the types show it (``shard_map`` with ``check_vma=True``).

    Examples:
      >>> import jax.numpy as jnp, optax, slamb_jax
      >>> exchange = slamb_jax.Exchange(compress_ratio=0.5, min_size=0)
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
      Xu et al., `SLAMB: Accelerated Large Batch Training with Sparse Communication
      <https://proceedings.mlr.press/v202/xu23q.html>`_, ICML 2023; Stich et al.,
      `Sparsified SGD with Memory <https://arxiv.org/abs/1809.07599>`_, 2018.
    """
    check_exchange(exchange)
    check_bool("keep_residual", keep_residual)
    if keep_residual and not exchange.exchanges_momentum:
        raise ValueError(
            "keep_residual=True needs a compress_ratio above 0 in the exchange, got "
            f"{exchange!r}: all updates would wait for ever"
        )

    def init(params: optax.Params) -> RandkCompressState:
        check_floating(params, "params")
        residual = None
        if keep_residual or exchange.keeps_rounding_error:
            residual = optax.tree.zeros_like(params, dtype=jnp.float32)
        return RandkCompressState(jnp.zeros([], jnp.int32), residual)

    def update(
        updates: optax.Updates,
        state: RandkCompressState,
        params: optax.Params | None = None,
        skip: Skip | None = None,
        **extra_args: object,
    ) -> tuple[optax.Updates, RandkCompressState]:
        del extra_args
        check_local(updates, exchange.axis_name, mesh_axes(exchange.param_specs))
        step = next_step(state.count)
        updates, residual = compress(
            exchange, updates, state.residual, step, params,
            keep_residual=keep_residual, skip=skip,
        )  # fmt: skip
        return updates, RandkCompressState(step, residual)

    tx = optax.GradientTransformationExtraArgs(init, update)
    return tx if exchange.param_specs is None else on_shards(tx, exchange)
