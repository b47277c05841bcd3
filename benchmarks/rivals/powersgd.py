"""PowerSGD: gradients as products of two thin matrices, with error feedback."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from benchmarks.rivals.exchange import Rival, Sends, matrix_shape, mean


class PowerSGDState(NamedTuple):
    residual: optax.Updates  # float32, as params
    q: dict[int, jax.Array]  # by a leaf's number: (columns, rank), float32


def powersgd(
    optimizer: optax.GradientTransformation, axis_name: str, rank: int
) -> Rival:
    """``optimizer`` on :func:`average_low_rank`."""

    def sends(params: optax.Params, workers: int, step: int) -> Sends:
        shapes = [x.shape for x in jax.tree.leaves(params)]
        thin = [matrix_shape(shape) for shape in shapes if _factored(shape, rank)]
        rest = sum(math.prod(shape) for shape in shapes if not _factored(shape, rank))
        p, q = (rank * sum(sizes) for sizes in zip(*thin, strict=True))
        return [("all-reduce", 4 * (p + rest)), ("all-reduce", 4 * q)]

    link = average_low_rank(rank, axis_name)
    return Rival(optax.chain(link, optimizer), sends)


def average_low_rank(
    rank: int, axis_name: str, seed: int = 0
) -> optax.GradientTransformation:
    r"""Averages the gradients' projections on a subspace of few dimensions.

    For each leaf, seen as a matrix, with :math:`M = g + e` and Q from the last step:

    .. math::

      P &= \text{orthogonalize}(\text{mean over workers of } M Q) \\
      Q &= \text{mean over workers of } M^T P, \quad u = P Q^T, \quad e = M - u

    Leaves of one dimension, and those that the factors would not make smaller, are
    averaged densely. (Vogels et al., 2019, https://arxiv.org/abs/1905.13727.)
    """

    def init(params: optax.Params) -> PowerSGDState:
        leaves = jax.tree.leaves(params)
        keys = jax.random.split(jax.random.key(seed), len(leaves))
        q = {
            i: jax.random.normal(keys[i], (matrix_shape(x.shape)[1], rank))
            for i, x in enumerate(leaves)
            if _factored(x.shape, rank)
        }
        return PowerSGDState(optax.tree.zeros_like(params, dtype=jnp.float32), q)

    def update(
        updates: optax.Updates,
        state: PowerSGDState,
        params: optax.Params | None = None,
    ) -> tuple[optax.Updates, PowerSGDState]:
        del params
        treedef: Any
        gs, treedef = jax.tree.flatten(updates)
        es = treedef.flatten_up_to(state.residual)
        xs = [g.astype(jnp.float32) + e for g, e in zip(gs, es, strict=True)]
        ms = {i: xs[i].reshape(matrix_shape(xs[i].shape)) for i in state.q}
        rest = {i: x for i, x in enumerate(xs) if i not in ms}
        ps, rest = mean(({i: m @ state.q[i] for i, m in ms.items()}, rest), axis_name)
        ps = {i: jnp.linalg.qr(p)[0] for i, p in ps.items()}
        qs = mean({i: m.T @ ps[i] for i, m in ms.items()}, axis_name)
        us = rest | {i: (ps[i] @ qs[i].T).reshape(xs[i].shape) for i in ms}
        es = [x - us[i] if i in ms else jnp.zeros_like(x) for i, x in enumerate(xs)]
        out = [us[i].astype(g.dtype) for i, g in enumerate(gs)]
        return treedef.unflatten(out), PowerSGDState(treedef.unflatten(es), qs)

    return optax.GradientTransformation(init, update)


def _factored(shape: tuple[int, ...], rank: int) -> bool:
    rows, columns = matrix_shape(shape)
    return rows > 1 and rank * (rows + columns) < rows * columns
