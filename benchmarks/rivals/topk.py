"""Top-k sparsified gradients with error feedback, in front of any optimizer."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from benchmarks.rivals.exchange import Rival, Sends, gather, scatter


class TopkState(NamedTuple):
    residual: optax.Updates  # float32, as params


def topk(
    optimizer: optax.GradientTransformation, axis_name: str, ratio: float
) -> Rival:
    r"""``optimizer`` on what each worker's k largest elements of a leaf make together.

    With :math:`x = g + e` and T its :math:`\lceil ratio \cdot d\rceil` largest
    elements by magnitude: u = mean over workers of x on T, e = x off T. Each worker
    chooses its own T, so indices are communicated too, and what a worker receives
    grows with the workers. (Stich et al., 2018, https://arxiv.org/abs/1809.07599.)
    """

    def init(params: optax.Params) -> TopkState:
        return TopkState(optax.tree.zeros_like(params, dtype=jnp.float32))

    def update(
        updates: optax.Updates, state: TopkState, params: Any = None
    ) -> tuple[optax.Updates, TopkState]:
        xs = jax.tree.map(
            lambda g, e: (g.astype(jnp.float32) + e).reshape(-1),
            updates,
            state.residual,
        )
        places = jax.tree.map(lambda x: jax.lax.top_k(jnp.abs(x), k_of(x))[1], xs)
        values = jax.tree.map(lambda x, i: x[i], xs, places)

        def mean(g: jax.Array, values: jax.Array, places: jax.Array) -> jax.Array:
            total = scatter(values[:, None], places[:, None], g.size)
            return (total / len(values)).reshape(g.shape).astype(g.dtype)

        alls = gather(values, axis_name), gather(places, axis_name)
        residual = jax.tree.map(
            lambda g, x, i: x.at[i].set(0.0).reshape(g.shape), updates, xs, places
        )
        return jax.tree.map(mean, updates, *alls), TopkState(residual)

    def k_of(x: Any) -> int:
        return min(x.size, math.ceil(ratio * x.size))

    def sends(params: optax.Params, workers: int, step: int) -> Sends:
        k = sum(map(k_of, jax.tree.leaves(params)))
        return 2 * [("all-gather", 4 * k)]  # float32 values and int32 indices

    link = optax.GradientTransformation(init, update)
    return Rival(optax.chain(link, optimizer), sends)
