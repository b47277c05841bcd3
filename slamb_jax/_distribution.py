"""The distribution over layers that JointSpar learns: a bandit's step, in logs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from slamb_jax._checks import check_integer, check_range

_HALVINGS = 60  # of an interval of logarithms: down to the last bit of a float32


def check_budget(budget: Any, p_min: Any, layers: int) -> None:
    """Raises unless ``0 < budget <= D`` and ``0 < p_min <= budget / D``."""
    check_range("budget", budget, 0.0, layers, open_low=True)
    check_range("p_min", p_min, 0.0, 1.0, open_low=True)
    known = not (isinstance(budget, jax.Array) or isinstance(p_min, jax.Array))
    if known and p_min > budget / layers:
        raise ValueError(
            f"p_min must not exceed budget / D = {budget!r} / {layers} = "
            f"{budget / layers:g}, got {p_min!r}: D layers of that probability are "
            "more than the budget"
        )


def project_distribution(log_w: jax.Array, budget: float, p_min: float) -> jax.Array:
    r"""The distribution nearest to weights w, in relative entropy, within a budget.

    .. math::

      \operatorname{argmin}_q \Big\{ \sum_d q_d \log \frac{q_d}{w_d} - q_d + w_d :
        \sum_d q_d = s,\ p_{min} \le q_d \le 1 \Big\}

    The minimiser is :math:`q_d = \min(1, \max(p_{min}, c\,w_d))` with the one c that
    makes the sum s: found by bisection on log c, then exactly from the entries that
    neither bound holds. (To clip and then rescale leaves the budget.)

    Args:
      log_w: logarithms of the weights, shape (D,), finite, of any magnitude.
      budget: s in (0, D], the sum.
      p_min: the least probability, in (0, s/D].

    Returns:
      Logarithms of q, shape (D,), in the dtype of ``log_w``; exactly 0 for q = 1.

    Raises:
      ValueError: for a ``log_w`` that is not a vector with elements, and for
        ``budget`` or ``p_min`` out of range.

    Examples:
      >>> import jax.numpy as jnp, slamb_jax
      >>> w = jnp.array([0.5, 0.02, 8.0])
      >>> q = jnp.exp(slamb_jax.project_distribution(jnp.log(w), 1.5, 0.1))
      >>> print(q.round(3))
      [0.4 0.1 1. ]

    References:
      Liu & Mozafari, `Communication-efficient Distributed Learning for Large Batch
      Optimization <https://proceedings.mlr.press/v162/liu22n.html>`_, ICML 2022.
    """
    if log_w.ndim != 1 or not log_w.size:
        raise ValueError(f"log_w must have shape (D,), D > 0, got {log_w.shape}")
    check_budget(budget, p_min, log_w.size)
    log_w = log_w - jnp.max(log_w)
    floor = jnp.log(jnp.asarray(p_min, log_w.dtype))
    total = jnp.asarray(budget, log_w.dtype)

    def clipped(log_c: jax.Array) -> jax.Array:
        return jnp.clip(log_w + log_c, floor, 0)

    def halve(_: int, ends: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = ends
        middle = low + (high - low) / 2
        less = jnp.sum(jnp.exp(clipped(middle))) < total
        return jnp.where(less, middle, low), jnp.where(less, high, middle)

    ends = floor + 0 * log_w[0], -jnp.min(log_w)  # all at p_min; all at 1
    _, log_c = jax.lax.fori_loop(0, _HALVINGS, halve, ends)
    at = log_w + log_c
    free = (at > floor) & (at < 0)
    held = jnp.where(free, 0, jnp.exp(clipped(log_c)))
    missing = jnp.log(jnp.maximum(total - jnp.sum(held), jnp.exp(floor)))
    # Added to each, not to log c, whose last bit may be much where w spans much.
    exact = at + (missing - jax.nn.logsumexp(at, where=free))
    log_q = jnp.clip(jnp.where(free, exact, at), floor, 0)
    return jnp.where(total < log_w.size, log_q, 0)  # s = D leaves no choice


def update_distribution(
    log_p: jax.Array,
    norms: jax.Array,
    active: jax.Array,
    max_norm: jax.Array,
    *,
    budget: float,
    p_min: float,
    horizon: int,
) -> tuple[jax.Array, jax.Array]:
    r"""JointSpar's step of the distribution over layers, from the drawn ones' norms.

    With the layers S that were drawn, :math:`L \leftarrow \max(L, \max_S \|g_d\|)` and

    .. math::

      l_d &= -\|g_d\|^2 / p_d^2 + L^2 / p_{min}^2 \\
      w_d &= p_d \exp(-\alpha l_d / p_d) \text{ for } d \in S,
        \quad p_d \text{ otherwise}, \\
      \alpha &= \frac{p_{min}^2}{L^2} \sqrt{\frac{2 s \log(D/s)}{T D}} \\
      p &\leftarrow \operatorname{argmin}_q \{ \operatorname{KL}(q \| w) :
        \textstyle\sum_d q_d = s,\ p_{min} \le q_d \le 1 \}

    in logarithms: with p_min small, w itself underflows. The minimum is
    :func:`project_distribution`'s. A norm that is not finite counts as not drawn.

    Args:
      log_p: logarithms of the probabilities, float32, shape (D,).
      norms: :math:`\|g_d\|` of the raw gradients, float32, shape (D,); looked at
        where ``active``.
      active: which layers were drawn, bool, shape (D,).
      max_norm: L so far, float32, shape ().
      budget: s in (0, D], the expected number of layers drawn.
      p_min: the least probability, in (0, s/D].
      horizon: T, the number of steps over which the regret is balanced, positive.

    Returns:
      The new ``log_p`` and ``max_norm``.

    Raises:
      ValueError: for an argument out of range.

    Examples:
      >>> import jax.numpy as jnp, slamb_jax
      >>> log_p, norms = jnp.log(jnp.full(4, 0.5)), jnp.array([3.0, 1.0, 1.0, 1.0])
      >>> log_p, max_norm = slamb_jax.update_distribution(
      ...     log_p, norms, jnp.ones(4, bool), jnp.float32(0.0),
      ...     budget=2.0, p_min=0.25, horizon=10,
      ... )
      >>> print(jnp.exp(log_p).round(3), max_norm)
      [0.545 0.485 0.485 0.485] 3.0

    References:
      Liu & Mozafari, `Communication-efficient Distributed Learning for Large Batch
      Optimization <https://proceedings.mlr.press/v162/liu22n.html>`_, ICML 2022. The
      paper leaves :math:`\alpha` open; this is the value that balances its regret.
    """
    check_integer("horizon", horizon, 1)
    layers = log_p.size
    check_budget(budget, p_min, layers)
    drawn = active & jnp.isfinite(norms)
    norms = jnp.where(drawn, norms, 0)
    max_norm = jnp.maximum(max_norm, jnp.max(norms))
    rate = np.sqrt(2 * budget * np.log(layers / budget) / (horizon * layers))
    share = norms / jnp.where(max_norm > 0, max_norm, 1)
    # alpha l_d, in which L and p_min cancel: in [0, rate].
    loss = jnp.float32(rate) * (1 - jnp.square(share * p_min * jnp.exp(-log_p)))
    log_w = jnp.where(drawn, log_p - loss * jnp.exp(-log_p), log_p)
    return project_distribution(log_w, budget, p_min), max_norm
