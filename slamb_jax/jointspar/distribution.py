"""The distribution over layers: what is drawn from it, and how it learns.

It is kept in logarithms, since with a small p_min the weights w of :func:`jointspar`
underflow.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from slamb_jax._core.checks import check_range

_HALVINGS = 60  # bisect an interval of logarithms to the last bit of a float32


class JointSparState(NamedTuple):
    """State of :func:`jointspar`."""

    count: jax.Array  # type: ignore[assignment]  # int32, shape []
    seed: jax.Array  # int32, shape []
    worker: jax.Array  # int32, shape []; 0 unless each worker draws for itself
    log_p: dict[str, jax.Array]  # of each layer, float32, shape []
    max_norm: jax.Array  # L, float32, shape []
    inner: optax.OptState


def active_layers(state: optax.OptState) -> dict[str, jax.Array]:
    r"""Draws the layers to train at the next step.

    :math:`Z_d \sim \operatorname{Bernoulli}(p_d)` for each layer d. Call it before the
    gradient is computed: ``update`` draws the same layers from the same state.

    Args:
      state: a state that contains one of :func:`jointspar`.

    Returns:
      For each label a bool array of shape ().

    Raises:
      ValueError: if ``state`` contains none, or several.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> from slamb_jax import Exchange, jointspar
      >>> params, layers = {"a": jnp.ones(3), "b": jnp.ones(3)}, {"a": "a", "b": "b"}
      >>> tx = jointspar.jointspar(optax.sgd(0.1), Exchange(), layers, budget=2)
      >>> active = jointspar.active_layers(tx.init(params))
      >>> sorted(active), bool(active["a"])  # s = D: all layers at every step
      (['a', 'b'], True)
    """
    link = _find(state)
    # Named, because vmap and a user's configuration may change the default generator.
    key = jax.random.key(link.seed, impl="threefry2x32")
    for number in (link.count, link.worker):
        key = jax.random.fold_in(key, number)
    names = sorted(link.log_p)
    draws = zip(names, jax.random.uniform(key, (len(names),), jnp.float32), strict=True)
    return {name: x < jnp.exp(link.log_p[name]) for name, x in draws}


def layer_probabilities(state: optax.OptState) -> dict[str, jax.Array]:
    """The probability of each layer to be active at the next step.

    Args:
      state: as for :func:`active_layers`.

    Returns:
      For each label a float32 array of shape (); their sum is the budget.

    Examples:
      >>> import jax.numpy as jnp, optax
      >>> from slamb_jax import Exchange, jointspar
      >>> params, layers = {"a": jnp.ones(3), "b": jnp.ones(3)}, {"a": "a", "b": "b"}
      >>> tx = jointspar.jointspar(optax.sgd(0.1), Exchange(), layers, budget=1)
      >>> print(jointspar.layer_probabilities(tx.init(params))["a"])
      0.5
    """
    return {name: jnp.exp(log_p) for name, log_p in _find(state).log_p.items()}


def _find(state: optax.OptState) -> JointSparState:
    leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, JointSparState))
    states = [x for x in leaves if isinstance(x, JointSparState)]
    if len(states) != 1:
        raise ValueError(f"state must have one state of jointspar, got {len(states)}")
    return states[0]


def least_probability(p_min: float | None, budget: float, layers: int) -> float:
    """p_min or its default; raises if it or budget does not suit D layers."""
    check_range("budget", budget, 0.0, layers, open_low=True)
    if p_min is None:
        return budget / layers / 2
    check_range("p_min", p_min, 0.0, budget / layers, open_low=True)
    return p_min


def project_distribution(log_w: jax.Array, budget: float, p_min: float) -> jax.Array:
    r"""Minimizes KL(q || w) over q that sum to the budget, each in [p_min, 1].

    It is :math:`q_d = \min(1, \max(p_{min}, c\,w_d))` with the only c for which the sum
    is s. Bisection on log c finds the entries that neither bound holds, from which c
    follows exactly. Takes and returns finite logarithms of any magnitude, shape (D,).
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
    # Added to each entry, because the last bit of log c is coarse if w spans much.
    exact = log_q + (rest - jax.nn.logsumexp(log_q, where=free))
    log_q = jnp.clip(jnp.where(free, exact, log_q), floor, 0)
    return jnp.where(total < log_w.size, log_q, 0)  # s = D leaves no choice


def update_distribution(
    log_p: jax.Array, norms: jax.Array, active: jax.Array, max_norm: jax.Array,
    budget: float, p_min: float | None, horizon: int,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """The next ``log_p`` and L, ``max_norm``, given the norms of the layers drawn.

    A layer whose norm is not finite counts as not drawn.
    """
    layers = log_p.size
    p_min = least_probability(p_min, budget, layers)
    norms = jnp.where(drawn := active & jnp.isfinite(norms), norms, 0)
    max_norm = jnp.maximum(max_norm, jnp.max(norms))
    rate = np.sqrt(2 * budget * np.log(layers / budget) / (horizon * layers))
    share = norms / jnp.where(max_norm > 0, max_norm, 1)
    # alpha times the loss, in which L and p_min cancel: in [0, rate].
    loss = jnp.float32(rate) * (1 - jnp.square(share * p_min * jnp.exp(-log_p)))
    log_w = jnp.where(drawn, log_p - loss * jnp.exp(-log_p), log_p)
    return project_distribution(log_w, budget, p_min), max_norm
