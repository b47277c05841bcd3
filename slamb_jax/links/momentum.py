"""Momentum of which a share is exchanged, and Adam's direction from it."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike, DTypeLike

from slamb_jax._tree.axes import check_local_like
from slamb_jax._tree.checks import (
    check_choice,
    check_floating,
    check_gradients,
    check_range,
    check_transformation,
)
from slamb_jax._tree.leaves import keep_absent, map_numbered, map_present
from slamb_jax._tree.rounding import (
    is_bfloat16,
    momentum_dtype,
    step_seed,
    stochastic_round,
)
from slamb_jax.exchange.settings import Exchange, check_exchange
from slamb_jax.links.compression import randk_compress_with_error_feedback
from slamb_jax.links.shards import on_shards

Form = Literal["sum", "product"]
NuOf = Literal["gradient", "momentum", "larger"]


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
        check_local_like(updates, state.mu)
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

    return on_shards(optax.GradientTransformationExtraArgs(init, update), exchange)


def check_moments(
    b1: ArrayLike,
    b2: ArrayLike,
    eps: ArrayLike,
    form: str,
    bias_correction: bool,
    mu_dtype: DTypeLike | None,
    nu_of: str,
    nu_dtype: DTypeLike | None,
) -> None:
    """Raises for a value out of range."""
    check_range("b1", b1, 0.0, 1.0, open_high=True)
    check_range("b2", b2, 0.0, 1.0, open_high=True)
    check_range("eps", eps, 0.0, open_low=True)
    check_choice("form", form, ("sum", "product"))
    check_choice("nu_of", nu_of, ("gradient", "momentum", "larger"))
    momentum_dtype(mu_dtype)
    is_bfloat16(nu_dtype)
    if form == "sum" and not bias_correction:
        raise ValueError(
            "bias_correction=False needs form='product', got form='sum', which is "
            "always bias-corrected"
        )


def init_moments(
    params: optax.Params, mu_dtype: DTypeLike | None, nu_dtype: DTypeLike | None
) -> tuple[optax.Updates, optax.Updates]:
    """Zeros of both moments."""
    mu = optax.tree.zeros_like(params, dtype=momentum_dtype(mu_dtype))
    short = is_bfloat16(nu_dtype)
    nu = optax.tree.zeros_like(params, dtype=jnp.bfloat16 if short else jnp.float32)
    return mu, nu


def update_moments(
    updates: optax.Updates,
    mu: optax.Updates,
    nu: optax.Updates,
    step: jax.Array,
    compress: Callable[[optax.Updates], tuple[optax.Updates, Any]],
    b1: ArrayLike,
    b2: ArrayLike,
    nu_of: NuOf,
    *,
    overlap: bool,
) -> tuple[optax.Updates, optax.Updates, Any]:
    """Both moments, m exchanged, with None for missing gradients; compress's state."""
    keep1, new1 = _weights(b1)
    keep2, new2 = _weights(b2)

    def first(g: jax.Array, m: jax.Array) -> jax.Array:
        return (keep1 * m.astype(jnp.float32) + new1 * g).astype(m.dtype)

    def second(g: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
        return keep2 * v.astype(jnp.float32) + new2 * _square(nu_of, g, m)

    g = map_present(lambda g: g.astype(jnp.float32), updates)
    mu = map_present(lambda g, m: m, updates, mu)
    if overlap:
        mu, state = compress(mu)
        mu = map_present(first, g, mu)
    else:
        mu, state = compress(map_present(first, g, mu))
    new_nu = map_present(second, g, mu, nu)
    short = any(v.dtype == jnp.bfloat16 for v in jax.tree.leaves(nu))
    if short:
        new_nu = map_numbered(
            lambda leaf, v: stochastic_round(v, step_seed(step, leaf.index)),
            new_nu,
            like=nu,
        )
    return mu, new_nu, state


def _square(nu_of: NuOf, g: jax.Array, m: jax.Array) -> jax.Array:
    """The term of the second moment, in float32."""
    m = m.astype(jnp.float32)
    if nu_of == "larger":
        return jnp.square(jnp.maximum(jnp.abs(g), jnp.abs(m)))
    return jnp.square(g if nu_of == "gradient" else m)


class Corrections(NamedTuple):
    """The scalars of a step: the factors of bias correction, and eps."""

    m: jax.Array
    v: jax.Array | None  # None in the sum form, which has a single factor
    eps: jax.Array


def corrections(
    form: Form,
    step: jax.Array,
    b1: ArrayLike,
    b2: ArrayLike,
    eps: ArrayLike,
    bias_correction: bool,
) -> Corrections:
    r"""From :math:`1-\beta_1^t` and :math:`1-\beta_2^t`, rounded as in optax."""
    t = step.astype(jnp.float32)
    fix1, fix2 = 1 - _weights(b1)[0] ** t, 1 - _weights(b2)[0] ** t
    if not bias_correction:
        fix1 = fix2 = jnp.float32(1)
    eps = jnp.asarray(eps, jnp.float32)
    if form == "product":
        return Corrections(1 / fix1, 1 / fix2, eps)
    return Corrections(jnp.sqrt(fix2) / fix1, None, eps)


def adam_direction(at: Corrections, m: jax.Array, v: jax.Array) -> jax.Array:
    """Adam's direction u, in float32."""
    m = at.m * m.astype(jnp.float32)
    v = v.astype(jnp.float32)
    return m / (jnp.sqrt(v if at.v is None else at.v * v) + at.eps)


def _weights(b: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """The decay b and 1 - b, in float32."""
    return jnp.asarray(b, jnp.float32), jnp.asarray(1 - b, jnp.float32)
