"""Momentum of which a share is exchanged, and what an optimizer does with it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike, DTypeLike

from slamb_jax._checks import (
    check_bool,
    check_floating,
    check_gradients,
    check_transformation,
)
from slamb_jax._leaves import keep_absent, map_present
from slamb_jax._rounding import next_step
from slamb_jax.exchange import Exchange, check_exchange
from slamb_jax.links.compression import (
    RandkCompressState,
    randk_compress_with_error_feedback,
)
from slamb_jax.links.moments import (
    Decays,
    bias,
    check_first_moment,
    decays,
    init_moment,
    update_first_moment,
    weights,
)
from slamb_jax.links.shards import on_shards


class MaskMomentumState(NamedTuple):
    """State of :func:`mask_momentum`."""

    count: jax.Array  # type: ignore[assignment]  # int32, shape []
    mu: optax.Updates  # the momentum, as params, float32 or mu_dtype
    compressor: optax.OptState
    direction: optax.OptState


def mask_momentum(
    exchange: Exchange,
    direction: optax.GradientTransformation | None = None,
    b1: Decays = 0.9,
    *,
    nesterov: bool = False,
    bias_correction: bool = True,
    mu_dtype: DTypeLike | None = None,
    compressor: optax.GradientTransformation | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""A momentum of which a share is exchanged, and the direction taken from it.

    With the worker's own gradient g, step :math:`t = 1, 2, \ldots`:

    .. math::

      m &\leftarrow \text{compressor}(\beta_1 m + (1-\beta_1) g) \\
      \hat m &= m / (1-\beta_1^t) \\
      u &= \text{direction}(\hat m)

    What the compressor returns is stored as m: coordinates that it did not exchange
    keep accumulating there, which is SLAMB's local error compensation. Nothing of the
    direction is exchanged.

    With ``nesterov`` the direction gets
    :math:`\beta_1 m / (1-\beta_1^{t+1}) + (1-\beta_1) g / (1-\beta_1^t)`.

    With ``overlap`` in the exchange, the compressor gets m as the last step left it,

    .. math:: m \leftarrow \beta_1\,\text{compressor}(m) + (1-\beta_1) g

    so that the exchange can run behind the forward and backward pass. The mean of m
    over the workers is the same; what is exchanged is one step older. In a conditional
    on the step (:func:`accumulate`) there is nothing left to hide the exchange behind;
    numbers and bytes are the same there.

    Args:
      exchange: what is exchanged of m, between whom, and when.
      direction: what is done with the momentum: one of
        :mod:`slamb_jax.directions`, or any optax transformation that takes a momentum
        as its updates. If its ``update`` has an argument ``grad``, it gets the
        worker's own gradient as well. None: the momentum itself, for links behind.
      b1: decay rate of the momentum, in [0, 1); or a tree of them, a prefix of it, or a
        function of the parameters that returns one.
      nesterov: look one step ahead, with the worker's own gradient.
      bias_correction: False leaves out the powers of t.
      mu_dtype: dtype of m: None (float32) or bfloat16. Without a ``payload`` it is also
        the wire format.
      compressor: any optax transformation that takes m and returns it exchanged,
        with the same shapes; ``optax.identity()`` keeps it local. None:
        ``randk_compress_with_error_feedback(exchange, keep_residual=False)``. It
        must not keep what it does not send, which stays in m.

    Returns:
      A :class:`optax.GradientTransformationExtraArgs`. Its direction gets float32
      whatever the dtype of the parameters, so that the links behind it do not round.

    Raises:
      ValueError: for a value out of range; in ``init``, for a compressor of this
        library that keeps a residual; in ``update``, for gradients of another
        shape or kind than the parameters, or that do not vary over a mesh axis over
        which m does.

    Examples:
      >>> import jax.numpy as jnp, optax, slamb_jax
      >>> exchange = slamb_jax.Exchange()
      >>> tx = slamb_jax.mask_momentum(exchange, optax.scale_by_sign())
      >>> params = jnp.ones(3)
      >>> updates, state = tx.update(jnp.array([1.0, -2.0, 0.0]), tx.init(params))
      >>> print(updates)
      [ 1. -1.  0.]

    References:
      Xu et al., `SLAMB <https://proceedings.mlr.press/v202/xu23q.html>`_, ICML 2023:
      momentum masking and local error compensation.
    """
    check_exchange(exchange)
    check_first_moment(b1, mu_dtype)
    check_bool("nesterov", nesterov)
    check_bool("bias_correction", bias_correction)
    if compressor is None:
        compressor = randk_compress_with_error_feedback(exchange, keep_residual=False)
    if direction is None:
        direction = optax.identity()
    check_transformation("compressor", compressor)
    check_transformation("direction", direction)
    inner = optax.with_extra_args_support(compressor)
    then = optax.with_extra_args_support(direction)

    def init(params: optax.Params) -> MaskMomentumState:
        check_floating(params, "params")
        mu = init_moment(params, "mu_dtype", mu_dtype)
        count = jnp.zeros([], jnp.int32)
        compressor_state = inner.init(mu)
        _check_compressor(compressor_state, exchange)
        return MaskMomentumState(count, mu, compressor_state, then.init(params))

    def update(
        updates: optax.Updates,
        state: MaskMomentumState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, MaskMomentumState]:
        check_gradients(updates, state.mu)
        step = next_step(state.count)

        def compress(mu: optax.Updates) -> tuple[optax.Updates, optax.OptState]:
            return inner.update(mu, state.compressor, params, **extra_args)

        b = decays(b1, state.mu)
        mu, compressor_state = update_first_moment(
            updates,
            state.mu,
            compress,
            b,
            overlap=exchange.overlap,
            skip=extra_args.get("skip"),
        )

        def corrected(m: jax.Array, b: ArrayLike, step: jax.Array) -> jax.Array:
            m = m.astype(jnp.float32)
            return m / bias(b, step) if bias_correction else m

        def ahead(g: jax.Array, m: jax.Array, b: ArrayLike) -> jax.Array:
            keep, new = weights(b)
            behind = next_step(step)
            return keep * corrected(m, b, behind) + new * corrected(g, b, step)

        if nesterov:
            given = map_present(ahead, updates, mu, b)
        else:
            given = map_present(lambda m, b: corrected(m, b, step), mu, b)
        u, direction_state = then.update(
            given, state.direction, params, **(extra_args | {"grad": updates})
        )
        mu = keep_absent(mu, state.mu)
        return u, MaskMomentumState(step, mu, compressor_state, direction_state)

    tx = optax.GradientTransformationExtraArgs(init, update)
    return tx if exchange.param_specs is None else on_shards(tx, exchange)


def _check_compressor(state: optax.OptState, exchange: Exchange) -> None:
    """Raises for a residual beside m, which keeps what is not sent already."""

    def is_own(x: object) -> bool:
        return isinstance(x, RandkCompressState)

    for x in filter(is_own, jax.tree.leaves(state, is_leaf=is_own)):
        if x.residual is not None and not exchange.keeps_rounding_error:
            raise ValueError(
                "compressor keeps a residual of what it does not send, and so does m, "
                "which would count it twice: give "
                "randk_compress_with_error_feedback(exchange, keep_residual=False)"
            )
