"""The element-wise rules of a step: moments, directions, decay and freshness."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from slamb_jax._tree.checks import check_choice, check_dtype, check_range
from slamb_jax._tree.leaves import map_numbered, map_present
from slamb_jax._tree.rounding import step_seed, stochastic_round

Form = Literal["sum", "product"]
NuOf = Literal["gradient", "momentum", "larger"]


def check_moments(
    b1: Any, b2: Any, eps: Any, form: Any, bias_correction: Any,
    mu_dtype: Any, nu_of: Any, nu_dtype: Any,
) -> None:  # fmt: skip
    """Raises for a value out of range."""
    check_range("b1", b1, 0.0, 1.0, open_high=True)
    check_range("b2", b2, 0.0, 1.0, open_high=True)
    check_range("eps", eps, 0.0, open_low=True)
    check_choice("form", form, ("sum", "product"))
    check_choice("nu_of", nu_of, ("gradient", "momentum", "larger"))
    check_dtype("mu_dtype", mu_dtype)
    check_dtype("nu_dtype", nu_dtype)
    if form == "sum" and not bias_correction:
        raise ValueError(
            "bias_correction=False needs form='product', got form='sum', which is "
            "always bias-corrected"
        )


def init_moments(
    params: optax.Params, mu_dtype: DTypeLike | None, nu_dtype: DTypeLike | None
) -> tuple[optax.Updates, optax.Updates]:
    """Zeros of both moments."""
    mu = optax.tree.zeros_like(params, dtype=check_dtype("mu_dtype", mu_dtype))
    nu = optax.tree.zeros_like(params, dtype=check_dtype("nu_dtype", nu_dtype))
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
    if any(v.dtype == jnp.bfloat16 for v in jax.tree.leaves(nu)):
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


def freshness(age: jax.Array, b3: ArrayLike) -> jax.Array:
    r""":math:`r = \beta_3^\tau`, float32, one per block; exactly 1 where exchanged."""
    # exp, not pow, which takes a CPU five times as long.
    power = jnp.exp(age.astype(jnp.float32) * jnp.log(jnp.asarray(b3, jnp.float32)))
    # A power once per block, not once per element of all that uses it.
    return lax.optimization_barrier(jnp.where(age == 0, jnp.float32(1), power))


def batch_factor(r: jax.Array, n: int) -> jax.Array:
    r""":math:`r + (1 - r)/\sqrt n`."""
    return r + (1 - r) / n**0.5


def decay_at(
    weight_decay: optax.ScalarOrSchedule, count: jax.Array
) -> jax.Array | None:
    """The rate at a step counted from 0; None where it is the constant 0."""
    if isinstance(weight_decay, int | float) and weight_decay == 0:
        return None
    decay = weight_decay(count) if callable(weight_decay) else weight_decay
    return jnp.asarray(decay, jnp.float32)


def add_decay(p: jax.Array, u: jax.Array, decay: jax.Array | None) -> jax.Array:
    """``u`` with decay added, if there is any."""
    return u if decay is None else u + decay * p
