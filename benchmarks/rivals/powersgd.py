"""PowerSGD: gradients as products of two thin matrices, with error feedback."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from benchmarks.rivals.exchange import Rival, Sends, elements, matrix_shape, mean


class PowerSGDState(NamedTuple):
    residual: optax.Updates  # float32, as params
    q: dict[int, jax.Array]  # by a leaf's number: (columns, rank), float32


def powersgd(
    optimizer: optax.GradientTransformation, axis_name: str, rank: int, seed: int = 0
) -> Rival:
    r"""``optimizer`` on gradients' projections on a subspace of few dimensions.

    For each leaf, seen as a matrix, with :math:`M = g + e` and Q from the last step:

    .. math::

      P &= \text{orthogonalize}(\text{mean over workers of } M Q) \\
      Q &= \text{mean over workers of } M^T P, \quad u = P Q^T, \quad e = M - u

    Leaves of one dimension, and those that the factors would not make smaller, are
    averaged densely. (Vogels et al., 2019, https://arxiv.org/abs/1905.13727.)
    """

    def factored(params: optax.Params) -> dict[int, tuple[int, int]]:
        """By number, rows and columns of the leaves that are sent as factors."""
        shapes = [matrix_shape(x.shape) for x in jax.tree.leaves(params)]
        return {
            i: (rows, columns)
            for i, (rows, columns) in enumerate(shapes)
            if rows > 1 and rank * (rows + columns) < rows * columns
        }

    def init(params: optax.Params) -> PowerSGDState:
        keys = jax.random.split(jax.random.key(seed), len(jax.tree.leaves(params)))
        q = {
            i: jax.random.normal(keys[i], (columns, rank))
            for i, (_, columns) in factored(params).items()
        }
        return PowerSGDState(optax.tree.zeros_like(params, dtype=jnp.float32), q)

    def update(
        updates: optax.Updates, state: PowerSGDState, params: Any = None
    ) -> tuple[optax.Updates, PowerSGDState]:
        treedef: Any
        gs, treedef = jax.tree.flatten(updates)
        es = jax.tree.leaves(state.residual)
        xs = [g.astype(jnp.float32) + e for g, e in zip(gs, es, strict=True)]
        ms = {i: xs[i].reshape(shape) for i, shape in factored(updates).items()}
        rest = {i: x for i, x in enumerate(xs) if i not in ms}
        ps, rest = mean(({i: m @ state.q[i] for i, m in ms.items()}, rest), axis_name)
        ps = {i: jnp.linalg.qr(p)[0] for i, p in ps.items()}
        qs = mean({i: m.T @ ps[i] for i, m in ms.items()}, axis_name)
        us = rest | {i: (ps[i] @ qs[i].T).reshape(xs[i].shape) for i in ms}
        es = [x - us[i] if i in ms else jnp.zeros_like(x) for i, x in enumerate(xs)]
        out = [us[i].astype(g.dtype) for i, g in enumerate(gs)]
        return treedef.unflatten(out), PowerSGDState(treedef.unflatten(es), qs)

    def sends(params: optax.Params, workers: int, step: int) -> Sends:
        thin = factored(params).values()
        rest = elements(params) - sum(rows * columns for rows, columns in thin)
        p, q = (rank * sum(sizes) for sizes in zip(*thin, strict=True))
        return [("all-reduce", 4 * (p + rest)), ("all-reduce", 4 * q)]

    link = optax.GradientTransformation(init, update)
    return Rival(optax.chain(link, optimizer), sends)
