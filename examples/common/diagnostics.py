"""How far the replicas are apart, and LAMB's trust ratio of every layer."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from examples.common.options import Options
from examples.common.processes import replicated

Leaves = dict[str, jax.Array]


def spread(params: optax.Params) -> jax.Array:
    r"""Distance of the replicas from their mean, relative to its norm.

    :math:`\sqrt{\frac1n\sum_i\|p_i-\bar p\|^2}\,/\,\|\bar p\|`
    """
    means = jax.tree.map(lambda p: jnp.mean(p, 0, keepdims=True), params)
    apart = optax.tree.norm(optax.tree.sub(params, means))
    n = len(jax.tree.leaves(params)[0])
    return apart / (n**0.5 * optax.tree.norm(means))


def trust_ratios(
    opt_state: optax.OptState,
    params: optax.Params,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
) -> Leaves:
    r"""By leaf :math:`\|p\|/\|u\|` with Adam's u from m and v, mean over replicas.

    Parameters and state have a leading replica axis. This is LAMB's ratio of a leaf,
    without decay; SLAMB has two, of its fresh and of its stale coordinates.
    """

    def has_moments(state: object) -> bool:
        return hasattr(state, "mu") and hasattr(state, "nu")

    states = jax.tree.leaves(opt_state, is_leaf=has_moments)
    if not (found := [state for state in states if has_moments(state)]):
        return {}

    def ratio(p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
        p_norm, u_norm = optax.tree.norm(p), optax.tree.norm(m / (jnp.sqrt(v) + eps))
        return jnp.where((p_norm > 0) & (u_norm > 0), p_norm / u_norm, 1.0)

    count = jnp.maximum(found[0].count[0], 1)
    mu = optax.tree.bias_correction(found[0].mu, b1, count)
    nu = optax.tree.bias_correction(found[0].nu, b2, count)
    ratios = jax.tree.map(jax.vmap(ratio), params, mu, nu)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): jnp.mean(x)
        for path, x in jax.tree_util.tree_leaves_with_path(ratios)
    }


def diagnose(
    options: Options, mesh: Mesh
) -> Callable[[optax.Params, optax.OptState], dict[str, Any]]:
    """A function of parameters and optimizer state, for logs.

    It sums over all workers, so call it seldom: the bytes counted leave it out.
    """
    decays = {name: getattr(options, name) for name in ("b1", "b2", "eps")}
    decays = {name: x for name, x in decays.items() if x is not None}

    def both(params: optax.Params, opt_state: optax.OptState) -> dict[str, Any]:
        ratios: Leaves = {}
        if options.optimizer in ("lamb", "slamb"):
            ratios = trust_ratios(opt_state, params, **decays)
        return {"replica_spread": spread(params), "trust_ratio": ratios}

    run = jax.jit(both, out_shardings=replicated(mesh))
    return lambda params, opt_state: jax.tree.map(float, run(params, opt_state))
