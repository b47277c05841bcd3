"""The element-wise rules of a step: moments, directions, decay and freshness."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from slamb_jax._checks import check_choice, check_dtype, check_range
from slamb_jax._layout import broadcast_prefix
from slamb_jax._leaves import Leaf, map_numbered, map_present
from slamb_jax._rounding import step_seed, stochastic_round
from slamb_jax._skip import Skip, unless

Form = Literal["sum", "product"]
NuOf = Literal["gradient", "momentum"]
OwnOrShared = Literal["gradient", "momentum", "shared"]


Decays: TypeAlias = ArrayLike | chex.ArrayTree | Callable[[optax.Params], Any]


def check_first_moment(b1: Any, mu_dtype: Any) -> None:
    """Raises for a value out of range."""
    if not callable(b1):
        jax.tree.map(lambda b: check_range("b1", b, 0.0, 1.0, open_high=True), b1)
    check_dtype("mu_dtype", mu_dtype)


def decays(b1: Decays, params: optax.Params) -> chex.ArrayTree:
    """The decay rate of each parameter."""
    return broadcast_prefix("b1", b1(params) if callable(b1) else b1, params)


def check_second_moment(
    b2: Any, eps: Any, form: Any, bias_correction: Any, nu_of: Any, nu_dtype: Any
) -> None:
    """Raises for a value out of range."""
    check_range("b2", b2, 0.0, 1.0, open_high=True)
    check_range("eps", eps, 0.0, open_low=True)
    check_choice("form", form, ("sum", "product"))
    check_choice("nu_of", nu_of, ("gradient", "momentum", "shared"))
    check_dtype("nu_dtype", nu_dtype)
    if form == "sum" and not bias_correction:
        raise ValueError(
            "bias_correction=False needs form='product', got form='sum', which is "
            "always bias-corrected"
        )


def init_moment(
    params: optax.Params, name: str, dtype: DTypeLike | None
) -> optax.Updates:
    """Zeros; ``name`` is the argument that gives the dtype."""
    return optax.tree.zeros_like(params, dtype=check_dtype(name, dtype))


def update_first_moment(
    updates: optax.Updates,
    mu: optax.Updates,
    compress: Callable[[optax.Updates], tuple[optax.Updates, Any]],
    b1: chex.ArrayTree,
    *,
    overlap: bool,
    skip: Skip | None,
) -> tuple[optax.Updates, Any]:
    """m, exchanged, with None for missing gradients; compress's state."""

    def add(g: jax.Array, m: jax.Array, b: ArrayLike) -> jax.Array:
        keep, new = weights(b)
        wide = keep * m.astype(jnp.float32) + new * g.astype(jnp.float32)
        return wide.astype(m.dtype)

    mu = map_present(lambda g, m: m, updates, mu)
    if overlap:
        exchanged, state = compress(mu)
        new = unless(skip, exchanged, map_present(add, updates, exchanged, b1))
    else:
        new, state = compress(unless(skip, mu, map_present(add, updates, mu, b1)))
    return unless(skip, mu, new), state


def update_second_moment(
    updates: optax.Updates,
    mu: optax.Updates,
    nu: optax.Updates,
    step: jax.Array,
    b2: ArrayLike,
    nu_of: NuOf,
    skip: Skip | None,
) -> optax.Updates:
    """v, with None for missing gradients."""
    keep, new = weights(b2)

    def add(g: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
        square = jnp.square((g if nu_of == "gradient" else m).astype(jnp.float32))
        return keep * v.astype(jnp.float32) + new * square

    new_nu = map_present(add, updates, mu, nu)
    if any(v.dtype == jnp.bfloat16 for v in jax.tree.leaves(nu)):
        new_nu = map_numbered(
            lambda leaf, v: stochastic_round(v, step_seed(step, leaf.index)),
            new_nu,
            like=nu,
        )
    if skip is not None:
        return skip.choose(nu, new_nu)
    return map_present(_computed_once, new_nu)


def _computed_once(nu: jax.Array) -> jax.Array:
    """A TPU would compute it twice from the old one, and copy it for that.

    Where a step may be skipped it does not, and keeps more behind a barrier.
    """
    return lax.platform_dependent(nu, tpu=lax.optimization_barrier, default=lambda x: x)


class Corrections(NamedTuple):
    """The scalars of a step: the factors of bias correction, and eps."""

    m: jax.Array | None  # None: m is corrected already
    v: jax.Array | None  # None in the sum form, which has a single factor
    eps: jax.Array
    eps_root: jax.Array | None = None


def corrections(
    form: Form,
    step: jax.Array,
    b1: ArrayLike | None,
    b2: ArrayLike,
    eps: ArrayLike,
    bias_correction: bool,
) -> Corrections:
    """Those of :func:`bias` for both moments; ``b1=None``: of the second alone."""
    fix1, fix2 = None if b1 is None else bias(b1, step), bias(b2, step)
    if not bias_correction:
        fix1, fix2 = None if b1 is None else jnp.float32(1), jnp.float32(1)
    eps = jnp.asarray(eps, jnp.float32)
    if form == "product":
        return Corrections(None if fix1 is None else 1 / fix1, 1 / fix2, eps)
    root = jnp.sqrt(fix2)
    return Corrections(root if fix1 is None else root / fix1, None, eps)


def bias(b: ArrayLike, step: jax.Array) -> jax.Array:
    r""":math:`1-\beta^t`, rounded as in optax."""
    return 1 - weights(b)[0] ** step.astype(jnp.float32)


def adam_direction(at: Corrections, m: jax.Array, v: jax.Array) -> jax.Array:
    """Adam's direction u, in float32."""
    m, v = m.astype(jnp.float32), v.astype(jnp.float32)
    m = m if at.m is None else at.m * m
    v = v if at.v is None else at.v * v
    return m / (jnp.sqrt(v if at.eps_root is None else v + at.eps_root) + at.eps)


def weights(b: ArrayLike) -> tuple[jax.Array, jax.Array]:
    """The decay b and 1 - b, in float32; of a number constants of the program."""
    as_array = jnp.asarray if isinstance(b, jax.Array) else np.asarray
    both = as_array(b, np.float32), as_array(1 - b, np.float32)
    return cast(tuple[jax.Array, jax.Array], both)


def freshness(age: jax.Array, b3: ArrayLike, leaf: Leaf) -> jax.Array:
    r""":math:`r = \beta_3^\tau`, float32, one per block; exactly 1 where exchanged."""
    # exp, not pow, which takes a CPU five times as long. It comes last: XLA computes it
    # once per block, but what follows it once per element of all that uses it.
    power = age.astype(jnp.float32) * jnp.log(jnp.asarray(b3, jnp.float32))
    fresh = jnp.exp(jnp.where(age == 0, jnp.float32(0), power))
    # Where blocks are elements, it would be kept in memory instead.
    return lax.optimization_barrier(fresh) if len(age) < leaf.size else fresh


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
