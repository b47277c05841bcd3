"""Top-k sparsified gradients with error feedback, in front of any optimizer."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from benchmarks.rivals.exchange import Sends, gather


class TopkState(NamedTuple):
    residual: Any  # float32, as params


def topk_with_error_feedback(
    ratio: float, axis_name: str
) -> optax.GradientTransformation:
    r"""Averages what each worker's k largest elements of a leaf make together.

    With :math:`x = g + e` and T its :math:`\lceil ratio \cdot d\rceil` largest
    elements by magnitude: u = mean over workers of x on T, e = x off T. Each worker
    chooses its own T, so indices travel, and what arrives grows with the workers.
    (Stich et al., 2018, https://arxiv.org/abs/1809.07599.)
    """

    def init(params: Any) -> TopkState:
        return TopkState(optax.tree.zeros_like(params, dtype=jnp.float32))

    def update(
        updates: Any, state: TopkState, params: Any = None
    ) -> tuple[Any, TopkState]:
        del params
        gs, treedef = jax.tree.flatten(updates)
        xs = [
            (g.astype(jnp.float32) + e).reshape(-1)
            for g, e in zip(gs, treedef.flatten_up_to(state.residual), strict=True)
        ]
        chosen = [jax.lax.top_k(jnp.abs(x), _k(x.size, ratio))[1] for x in xs]
        values = [x[i] for x, i in zip(xs, chosen, strict=True)]
        ends = [sum(i.size for i in chosen[: j + 1]) for j in range(len(chosen))]
        all_values = jnp.split(gather(jnp.concatenate(values), axis_name), ends, 1)
        all_chosen = jnp.split(gather(jnp.concatenate(chosen), axis_name), ends, 1)

        def combine(g: jax.Array, v: jax.Array, i: jax.Array) -> jax.Array:
            total = jnp.zeros(g.size).at[i.reshape(-1)].add(v.reshape(-1))
            return (total / len(v)).reshape(g.shape).astype(g.dtype)

        means = map(combine, gs, all_values, all_chosen)
        rest = [
            x.at[i].set(0.0).reshape(g.shape)
            for g, x, i in zip(gs, xs, chosen, strict=True)
        ]
        return treedef.unflatten(means), TopkState(treedef.unflatten(rest))

    return optax.GradientTransformation(init, update)


def _k(size: int, ratio: float) -> int:
    return min(size, math.ceil(ratio * size))


def topk_sends(params: Any, workers: int, step: int, ratio: float) -> Sends:
    """All-gathers of k float32 values and k int32 indices."""
    del workers, step
    k = sum(_k(math.prod(x.shape), ratio) for x in jax.tree.leaves(params))
    return 2 * [("all-gather", 4 * k)]
