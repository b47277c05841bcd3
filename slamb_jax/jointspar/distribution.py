"""The distribution over layers that JointSpar learns: a bandit's step, in logarithms.

The formulas are those of :func:`slamb_jax.jointspar.jointspar`. A step in p itself
underflows: with a small p_min the weights w are tiny.
"""

import jax
import jax.numpy as jnp
import numpy as np

from slamb_jax._checks import check_range

_ROUNDING = 1e-6  # of s / D as the caller computed it, in float32 say
_HALVINGS = 60  # of an interval of logarithms: down to the last bit of a float32


def least_probability(p_min: float | None, budget: float, layers: int) -> float:
    """p_min, or its default; raises unless budget and p_min suit the D layers."""
    check_range("budget", budget, 0.0, layers, open_low=True)
    if p_min is None:
        return budget / layers / 2
    if p_min > budget / layers * (1 + _ROUNDING):
        raise ValueError(
            f"p_min must not exceed budget / D = {budget!r} / {layers} = "
            f"{budget / layers:g}, got {p_min!r}: D layers of that probability are "
            "more than the budget"
        )
    return min(p_min, budget / layers)


def project_distribution(log_w: jax.Array, budget: float, p_min: float) -> jax.Array:
    r"""Minimises KL(q || w) over q that sum to the budget, each in [p_min, 1].

    The minimiser is :math:`q_d = \min(1, \max(p_{min}, c\,w_d))` with the one c that
    makes the sum s: found by bisection on log c, then exactly from the entries that
    neither bound holds. (To clip and then rescale leaves the budget.) Takes and returns
    logarithms, shape (D,), finite, of any magnitude.
    """
    log_w = log_w - jnp.max(log_w)
    floor = jnp.log(jnp.asarray(p_min, log_w.dtype))
    total = jnp.asarray(budget, log_w.dtype)

    def clipped(log_c: jax.Array) -> jax.Array:
        return jnp.clip(log_w + log_c, floor, 0)

    def halve(_: int, ends: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = ends
        middle = low + (high - low) / 2
        is_low = jnp.sum(jnp.exp(clipped(middle))) < total
        return jnp.where(is_low, middle, low), jnp.where(is_low, high, middle)

    ends = floor + 0 * log_w[0], -jnp.min(log_w)  # all at p_min; all at 1
    _, log_c = jax.lax.fori_loop(0, _HALVINGS, halve, ends)
    log_q = log_w + log_c
    free = (log_q > floor) & (log_q < 0)
    bounded = jnp.where(free, 0, jnp.exp(clipped(log_c)))
    rest = jnp.log(jnp.maximum(total - jnp.sum(bounded), jnp.exp(floor)))
    # Added to each entry and not to log c, whose last bit is coarse if w spans much.
    exact = log_q + (rest - jax.nn.logsumexp(log_q, where=free))
    log_q = jnp.clip(jnp.where(free, exact, log_q), floor, 0)
    return jnp.where(total < log_w.size, log_q, 0)  # s = D leaves no choice


def update_distribution(
    log_p: jax.Array,
    norms: jax.Array,
    active: jax.Array,
    max_norm: jax.Array,
    *,
    budget: float,
    p_min: float | None,
    horizon: int,
) -> tuple[jax.Array, jax.Array]:
    """The next ``log_p`` and L, from the norms of the layers drawn.

    A norm that is not finite counts as not drawn. All of shape (D,), ``max_norm`` ().
    """
    layers = log_p.size
    p_min = least_probability(p_min, budget, layers)
    drawn = active & jnp.isfinite(norms)
    norms = jnp.where(drawn, norms, 0)
    max_norm = jnp.maximum(max_norm, jnp.max(norms))
    rate = np.sqrt(2 * budget * np.log(layers / budget) / (horizon * layers))
    share = norms / jnp.where(max_norm > 0, max_norm, 1)
    # alpha times the loss, in which L and p_min cancel: in [0, rate].
    loss = jnp.float32(rate) * (1 - jnp.square(share * p_min * jnp.exp(-log_p)))
    log_w = jnp.where(drawn, log_p - loss * jnp.exp(-log_p), log_p)
    return project_distribution(log_w, budget, p_min), max_norm
