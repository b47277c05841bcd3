"""Top-k sparsified gradients with error feedback, in front of any optimizer."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from benchmarks.rivals.exchange import Rival, Sends, gather


class TopkState(NamedTuple):
    residual: optax.Updates  # float32, as params


def topk(
    optimizer: optax.GradientTransformation, axis_name: str, ratio: float
) -> Rival:
    """``optimizer`` on :func:`topk_with_error_feedback`."""

    def sends(params: optax.Params, workers: int, step: int) -> Sends:
        k = sum(_k(math.prod(x.shape), ratio) for x in jax.tree.leaves(params))
        return 2 * [("all-gather", 4 * k)]  # float32 values and int32 indices

    link = topk_with_error_feedback(ratio, axis_name)
    return Rival(optax.chain(link, optimizer), sends)


def topk_with_error_feedback(
    ratio: float, axis_name: str
) -> optax.GradientTransformation:
    r"""Averages what each worker's k largest elements of a leaf make together.

    With :math:`x = g + e` and T its :math:`\lceil ratio \cdot d\rceil` largest
    elements by magnitude: u = mean over workers of x on T, e = x off T. Each worker
    chooses its own T, so indices are communicated too, and what a worker receives
    grows with the workers. (Stich et al., 2018, https://arxiv.org/abs/1809.07599.)
    """

    def init(params: optax.Params) -> TopkState:
        return TopkState(optax.tree.zeros_like(params, dtype=jnp.float32))

    def update(
        updates: optax.Updates, state: TopkState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, TopkState]:
        del params
        xs = jax.tree.map(
            lambda g, e: (g.astype(jnp.float32) + e).reshape(-1),
            updates,
            state.residual,
        )
        places = jax.tree.map(
            lambda x: jax.lax.top_k(jnp.abs(x), _k(x.size, ratio))[1], xs
        )
        values = jax.tree.map(lambda x, i: x[i], xs, places)
        means = jax.tree.map(
            _mean_of, updates, gather(values, axis_name), gather(places, axis_name)
        )
        residual = jax.tree.map(
            lambda g, x, i: x.at[i].set(0.0).reshape(g.shape), updates, xs, places
        )
        return means, TopkState(residual)

    return optax.GradientTransformation(init, update)


def _mean_of(like: jax.Array, values: jax.Array, places: jax.Array) -> jax.Array:
    """The mean of n workers' sparse arrays, in the shape and dtype of ``like``."""
    total = jnp.zeros(like.size).at[places.reshape(-1)].add(values.reshape(-1))
    return (total / len(values)).reshape(like.shape).astype(like.dtype)


def _k(size: int, ratio: float) -> int:
    return min(size, math.ceil(ratio * size))
