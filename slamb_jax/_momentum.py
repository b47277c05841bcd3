"""Momentum of which only a share is exchanged, and Adam's direction from it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from slamb_jax import _axes
from slamb_jax._bfloat16 import round_at_random, step_salt
from slamb_jax._checks import (
    check_bool,
    check_choice,
    check_floating,
    check_gradients,
    check_range,
    check_transformation,
)
from slamb_jax._leaves import keep_absent, map_numbered, map_present

FORMS = ("sum", "product")
SQUARED = ("gradient", "momentum", "larger")


class MaskMomentumState(NamedTuple):
    """State of :func:`mask_momentum`."""

    count: jax.Array  # type: ignore[assignment]  # int32, shape []
    mu: optax.Updates  # first moment, as params, float32 or mu_dtype
    nu: optax.Updates  # second moment, as params, float32 or nu_dtype
    compressor: optax.OptState


def mask_momentum(
    compressor: optax.GradientTransformation,
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-6,
    *,
    form: str = "sum",
    bias_correction: bool = True,
    mu_dtype: Any = None,
    overlap: bool = False,
    nu_of: str = "gradient",
    nu_dtype: Any = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Adam's direction from a momentum that a compressor exchanges in part.

    With the worker's own gradient g, step :math:`t = 1, 2, \ldots`:

    .. math::

      m &\leftarrow \text{compressor}(\beta_1 m + (1-\beta_1) g) \\
      v &\leftarrow \beta_2 v + (1-\beta_2) g^2 \\
      u &= \frac{m/(1-\beta_1^t)}{\sqrt{v/(1-\beta_2^t)} + \varepsilon}
        \quad\text{(product form)} \\
      u &= \frac{m}{\sqrt{v} + \varepsilon}
        \cdot\frac{\sqrt{1-\beta_2^t}}{1-\beta_1^t} \quad\text{(sum form)}

    What the compressor returns is stored as m: coordinates it let through unsent keep
    accumulating there, which is SLAMB's local error compensation. v is never sent.

    ``nu_of="momentum"`` has the second moment of m as the compressor left it,

    .. math:: v \leftarrow \beta_2 v + (1-\beta_2) m^2

    which the workers agree on as far as they agree on m. That of their own gradients
    differs from worker to worker, most in the first steps, and their parameters part
    even where all of m is exchanged. It is also the less noisy of the two, and what
    rounding adds to a small coordinate of m is in it and not blown up by it.
    ``nu_of="larger"`` has that of the larger of the two,

    .. math:: v \leftarrow \beta_2 v + (1-\beta_2) \max(g^2, m^2)

    which is the gradient's but where a worker's own gradient is next to nothing and
    the mean that it was sent is not: of a ReLU that its few samples leave off, or a row
    of an embedding that they do not have. There m over the root of v is without bound,
    and here at most :math:`1/\sqrt{1-\beta_2}`. Both are departures from the paper, and
    from Adam.

    ``overlap=True`` hands the compressor m as the last step left it, before this
    step's gradient is known,

    .. math:: m \leftarrow \beta_1\,\text{compressor}(m) + (1-\beta_1) g

    so that the exchange can run behind the forward and backward pass. What was
    exchanged then holds one gradient that is the worker's own, whole leaves too, at
    age 0; the mean of m over the workers is what it was: nothing is lost, all of it is
    one step late. What waits for the gradient as a whole, a conditional as
    :func:`skip_not_finite` and :func:`accumulate` have it, leaves nothing to hide
    behind; numbers and bytes are the same there.

    Args:
      compressor: takes m and returns m with its chosen coordinates averaged:
        ``randk_compress_with_error_feedback(..., keep_residual=False)``. Any optax
        transformation that keeps shapes serves; ``optax.identity()`` gives Adam.
      b1: decay rate of the first moment, in [0, 1).
      b2: decay rate of the second moment, in [0, 1).
      eps: added to the root of the second moment, positive.
      form: ``"sum"`` or ``"product"``: where eps stands, see above.
      bias_correction: False leaves out both powers of t (product form only).
      mu_dtype: dtype of m, and so of what travels; None is float32.
      nu_of: what v is the second moment of, ``"gradient"``, ``"momentum"`` or
        ``"larger"``.
      nu_dtype: dtype of v, None (float32) or bfloat16, to which it is rounded at
        random: a change of :math:`1 - \beta_2` of itself would round to none.
      overlap: exchange m before the gradient is added, not after it.

    Returns:
      A :class:`optax.GradientTransformationExtraArgs` whose updates have the dtype of
      the parameters, where they are given, else of the gradients.

    Raises:
      ValueError: for a value out of range; in ``update``, for gradients of another
        shape or kind than the parameters, or that do not vary over a mesh axis over
        which m does.

    Examples:
      >>> import jax.numpy as jnp, slamb_jax
      >>> compressor = slamb_jax.randk_compress_with_error_feedback(keep_residual=False)
      >>> tx = slamb_jax.mask_momentum(compressor)
      >>> params = jnp.ones(3)
      >>> updates, state = tx.update(jnp.array([1.0, -2.0, 0.0]), tx.init(params))
      >>> print(updates.round(3))
      [ 1. -1.  0.]

    References:
      Xu et al., `SLAMB <https://proceedings.mlr.press/v202/xu23q.html>`_, ICML 2023:
      momentum masking and local error compensation.
    """
    check_range("b1", b1, 0.0, 1.0, open_high=True)
    check_range("b2", b2, 0.0, 1.0, open_high=True)
    check_range("eps", eps, 0.0, open_low=True)
    check_choice("form", form, FORMS)
    check_bool("overlap", overlap)
    check_choice("nu_of", nu_of, SQUARED)
    if form == "sum" and not bias_correction:
        raise ValueError(
            "bias_correction=False needs form='product', got form='sum', which is "
            "always bias-corrected"
        )
    dtype = momentum_dtype(mu_dtype)
    short = is_short(nu_dtype)
    check_transformation("compressor", compressor)
    compressor = optax.with_extra_args_support(compressor)

    def init(params: optax.Params) -> MaskMomentumState:
        check_floating(params, "params")
        mu = optax.tree.zeros_like(params, dtype=dtype)
        nu = optax.tree.zeros_like(params, dtype=jnp.bfloat16 if short else jnp.float32)
        return MaskMomentumState(jnp.zeros([], jnp.int32), mu, nu, compressor.init(mu))

    def update(
        updates: optax.Updates,
        state: MaskMomentumState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, MaskMomentumState]:
        check_gradients(updates, state.mu)
        _axes.check_local_like(updates, state.mu)
        step = optax.safe_increment(state.count)
        b1_, rest1 = _decay(b1)
        b2_, rest2 = _decay(b2)
        g = map_present(lambda g: g.astype(jnp.float32), updates)
        mu = map_present(lambda g, m: m, updates, state.mu)
        if overlap:
            mu, inner = compressor.update(mu, state.compressor, params, **extra_args)
        mu = map_present(
            lambda g, m: (b1_ * m.astype(jnp.float32) + rest1 * g).astype(dtype),
            g,
            mu,
        )
        if not overlap:
            mu, inner = compressor.update(mu, state.compressor, params, **extra_args)
        nu = map_present(
            lambda x, v: b2_ * v.astype(jnp.float32) + rest2 * x,
            map_present(lambda g, m: _square(nu_of, g, m), g, mu),
            state.nu,
        )
        if short:
            nu = map_numbered(
                lambda leaf, v: round_at_random(v, step_salt(step, leaf.index)),
                nu,
                like=params,
            )
        at = corrections(form, step, b1, b2, eps, bias_correction)
        u = map_present(
            lambda m, v, like: direction(at, m, v).astype(like.dtype),
            mu,
            nu,
            updates if params is None else params,
        )
        new_state = MaskMomentumState(
            step, keep_absent(mu, state.mu), keep_absent(nu, state.nu), inner
        )
        return u, new_state

    return optax.GradientTransformationExtraArgs(init, update)


def _square(nu_of: str, g: jax.Array, m: jax.Array) -> jax.Array:
    """What v is the mean of, in float32."""
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
    form: str, step: jax.Array, b1: Any, b2: Any, eps: Any, bias_correction: bool
) -> Corrections:
    r"""From :math:`1-\beta_1^t` and :math:`1-\beta_2^t`, rounded as in optax."""
    t = step.astype(jnp.float32)
    fix1, fix2 = 1 - _decay(b1)[0] ** t, 1 - _decay(b2)[0] ** t
    if not bias_correction:
        fix1 = fix2 = jnp.float32(1)
    eps = jnp.asarray(eps, jnp.float32)
    if form == "product":
        return Corrections(1 / fix1, 1 / fix2, eps)
    return Corrections(jnp.sqrt(fix2) / fix1, None, eps)


def direction(at: Corrections, m: jax.Array, v: jax.Array) -> jax.Array:
    """Adam's direction u, in float32."""
    m = at.m * m.astype(jnp.float32)
    v = v.astype(jnp.float32)
    return m / (jnp.sqrt(v if at.v is None else at.v * v) + at.eps)


def _decay(b: Any) -> tuple[jax.Array, jax.Array]:
    """The decay b and the rest, 1 - b, in float32."""
    return jnp.asarray(b, jnp.float32), jnp.asarray(1 - b, jnp.float32)


def is_short(nu_dtype: Any) -> bool:
    """Whether v is bfloat16 and not float32, as None is."""
    try:
        dtype = jnp.dtype(jnp.float32 if nu_dtype is None else nu_dtype)
    except TypeError:
        dtype = None
    if dtype not in (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)):
        raise ValueError(
            f"nu_dtype must be None, float32 or bfloat16, got {nu_dtype!r}"
        )
    return dtype == jnp.dtype(jnp.bfloat16)


def momentum_dtype(mu_dtype: Any) -> jnp.dtype:
    """The dtype of m; None is float32."""
    allowed = (jnp.float32, jnp.bfloat16, jnp.float16)
    try:
        dtype = jnp.dtype(jnp.float32 if mu_dtype is None else mu_dtype)
    except TypeError:
        dtype = None
    if dtype not in [jnp.dtype(d) for d in allowed]:
        raise ValueError(
            f"mu_dtype must be None, float32, bfloat16 or float16, got {mu_dtype!r}"
        )
    return dtype
