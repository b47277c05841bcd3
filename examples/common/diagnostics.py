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
    apart = jax.tree.map(
        lambda p, m: jnp.mean(jnp.sum((p - m) ** 2, _rest(p))), params, means
    )
    norms = jax.tree.map(lambda m: jnp.sum(m**2), means)
    return jnp.sqrt(optax.tree.sum(apart) / optax.tree.sum(norms))


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
    found = [s for s in _states(opt_state) if hasattr(s, "mu") and hasattr(s, "nu")]
    if not found:
        return {}
    count = jnp.maximum(found[0].count[0], 1).astype(jnp.float32)
    fix1, fix2 = 1 - b1**count, 1 - b2**count

    def ratio(p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
        u = (m / fix1) / (jnp.sqrt(v / fix2) + eps)
        p_norm, u_norm = (jnp.sqrt(jnp.sum(x**2, _rest(x))) for x in (p, u))
        return jnp.mean(jnp.where((p_norm > 0) & (u_norm > 0), p_norm / u_norm, 1.0))

    ratios = jax.tree.map(ratio, params, found[0].mu, found[0].nu)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): x
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


def _states(opt_state: optax.OptState) -> list[Any]:
    """All named tuples in a tree of optimizer states."""
    if not isinstance(opt_state, tuple):
        return []
    own = [opt_state] if hasattr(opt_state, "_fields") else []
    return own + [s for part in opt_state for s in _states(part)]


def _rest(x: jax.Array) -> tuple[int, ...]:
    return tuple(range(1, x.ndim))
