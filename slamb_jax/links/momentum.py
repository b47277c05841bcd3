"""Momentum of which a share is exchanged, and Adam's direction from it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike, DTypeLike

from slamb_jax._tree.checks import (
    check_floating,
    check_gradients,
    check_transformation,
)
from slamb_jax._tree.leaves import keep_absent, map_present
from slamb_jax.exchange.settings import Exchange, check_exchange
from slamb_jax.links.compression import randk_compress_with_error_feedback
from slamb_jax.links.moments import (
    Form,
    NuOf,
    adam_direction,
    check_moments,
    corrections,
    init_moments,
    update_moments,
)
from slamb_jax.links.shards import on_shards


class MaskMomentumState(NamedTuple):
    """State of :func:`mask_momentum`."""

    count: jax.Array  # type: ignore[assignment]  # int32, shape []
    mu: optax.Updates  # first moment, as params, float32 or mu_dtype
    nu: optax.Updates  # second moment, as params, float32 or nu_dtype
    compressor: optax.OptState


def mask_momentum(
    exchange: Exchange,
    b1: ArrayLike = 0.9,
    b2: ArrayLike = 0.999,
    eps: ArrayLike = 1e-6,
    *,
    form: Form = "sum",
    bias_correction: bool = True,
    mu_dtype: DTypeLike | None = None,
    nu_of: NuOf = "gradient",
    nu_dtype: DTypeLike | None = None,
    compressor: optax.GradientTransformation | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Adam's direction from a momentum of which a share is exchanged.

    With the worker's own gradient g, step :math:`t = 1, 2, \ldots`:

    .. math::

      m &\leftarrow \text{compressor}(\beta_1 m + (1-\beta_1) g) \\
      v &\leftarrow \beta_2 v + (1-\beta_2) g^2 \\
      u &= \frac{m/(1-\beta_1^t)}{\sqrt{v/(1-\beta_2^t)} + \varepsilon}
        \quad\text{(product form)} \\
      u &= \frac{m}{\sqrt{v} + \varepsilon}
        \cdot\frac{\sqrt{1-\beta_2^t}}{1-\beta_1^t} \quad\text{(sum form)}

    What the compressor returns is stored as m: coordinates that it did not exchange
    keep accumulating there, which is SLAMB's local error compensation. v is never sent.

    ``nu_of="momentum"`` takes the second moment of m after its exchange,

    .. math:: v \leftarrow \beta_2 v + (1-\beta_2) m^2

    on which the workers agree as far as they agree on m, while those of their own
    gradients differ, most in the first steps. It is also less noisy.
    ``nu_of="larger"`` takes that of the larger of the two,

    .. math:: v \leftarrow \beta_2 v + (1-\beta_2) \max(g^2, m^2)

    which differs from the gradient's where a worker's own gradient is next to nothing
    and the mean momentum is not: under a ReLU that is off for its few samples, or for a
    row of an embedding that they lack. There m over the root of v has no bound, and
    here at most :math:`1/\sqrt{1-\beta_2}`. Both depart from the paper, and from Adam.

    With ``overlap`` in the exchange, the compressor gets m as the last step left it,

    .. math:: m \leftarrow \beta_1\,\text{compressor}(m) + (1-\beta_1) g

    so that the exchange can run behind the forward and backward pass. The mean of m
    over the workers is the same; what is exchanged is one step older. Behind a
    conditional on the gradient (:func:`skip_not_finite`, :func:`accumulate`) there is
    nothing left to hide the exchange behind; numbers and bytes are the same there.

    Args:
      exchange: what is exchanged of m, between whom, and when.
      b1: decay rate of the first moment, in [0, 1).
      b2: decay rate of the second moment, in [0, 1).
      eps: added to the root of the second moment, positive.
      form: ``"sum"`` or ``"product"``: where eps stands, see above.
      bias_correction: False leaves out both powers of t (product form only).
      mu_dtype: dtype of m: None (float32) or bfloat16. Without a ``payload`` it is also
        the wire format.
      nu_of: what v is the second moment of: ``"gradient"``, ``"momentum"`` or
        ``"larger"``.
      nu_dtype: dtype of v: None (float32) or bfloat16, with stochastic rounding: a
        change of :math:`1 - \beta_2` of itself would round to none.
      compressor: any optax transformation that takes m and returns it exchanged,
        with the same shapes; ``optax.identity()`` gives Adam. None:
        ``randk_compress_with_error_feedback(exchange, keep_residual=False)``. One that
        keeps a residual of its own counts what it did not send twice.

    Returns:
      A :class:`optax.GradientTransformationExtraArgs`. Its updates are float32 whatever
      the dtype of the parameters, so that the links behind it do not round them;
      :func:`elementwise_rescale` returns the dtype of the parameters.

    Raises:
      ValueError: for a value out of range; in ``update``, for gradients of another
        shape or kind than the parameters, or that do not vary over a mesh axis over
        which m does.

    Examples:
      >>> import jax.numpy as jnp, slamb_jax
      >>> tx = slamb_jax.mask_momentum(slamb_jax.Exchange())
      >>> params = jnp.ones(3)
      >>> updates, state = tx.update(jnp.array([1.0, -2.0, 0.0]), tx.init(params))
      >>> print(updates.round(3))
      [ 1. -1.  0.]

    References:
      Xu et al., `SLAMB <https://proceedings.mlr.press/v202/xu23q.html>`_, ICML 2023:
      momentum masking and local error compensation.
    """
    check_exchange(exchange)
    check_moments(b1, b2, eps, form, bias_correction, mu_dtype, nu_of, nu_dtype)
    if compressor is None:
        compressor = randk_compress_with_error_feedback(exchange, keep_residual=False)
    check_transformation("compressor", compressor)
    inner = optax.with_extra_args_support(compressor)

    def init(params: optax.Params) -> MaskMomentumState:
        check_floating(params, "params")
        mu, nu = init_moments(params, mu_dtype, nu_dtype)
        return MaskMomentumState(jnp.zeros([], jnp.int32), mu, nu, inner.init(mu))

    def update(
        updates: optax.Updates,
        state: MaskMomentumState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, MaskMomentumState]:
        check_gradients(updates, state.mu)
        step = optax.safe_increment(state.count)

        def compress(mu: optax.Updates) -> tuple[optax.Updates, optax.OptState]:
            return inner.update(mu, state.compressor, params, **extra_args)

        mu, nu, compressor_state = update_moments(
            updates, state.mu, state.nu, step, compress, b1, b2, nu_of,
            overlap=exchange.overlap,
        )  # fmt: skip
        at = corrections(form, step, b1, b2, eps, bias_correction)
        u = map_present(lambda m, v: adam_direction(at, m, v), mu, nu)
        mu, nu = keep_absent(mu, state.mu), keep_absent(nu, state.nu)
        return u, MaskMomentumState(step, mu, nu, compressor_state)

    tx = optax.GradientTransformationExtraArgs(init, update)
    return tx if exchange.param_specs is None else on_shards(tx, exchange)
