"""PowerSGD: gradients as products of two thin matrices, with error feedback."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from benchmarks.rivals.exchange import Sends, matrix_shape, mean


class PowerSGDState(NamedTuple):
    residual: Any  # float32, as params
    q: list[jax.Array]  # of each leaf that is factored: (columns, rank), float32


def powersgd(rank: int, axis_name: str, seed: int = 0) -> optax.GradientTransformation:
    r"""Averages the gradients' projections on a subspace of few dimensions.

    For each leaf, seen as a matrix, with :math:`M = g + e` and Q from the last step:

    .. math::

      P &= \text{orthogonalize}(\text{mean over workers of } M Q) \\
      Q &= \text{mean over workers of } M^T P, \quad u = P Q^T, \quad e = M - u

    Leaves of one dimension, and those that the factors would not make smaller, are
    averaged whole. It goes in front of an optimizer. (Vogels et al., 2019,
    https://arxiv.org/abs/1905.13727.)
    """

    def init(params: Any) -> PowerSGDState:
        leaves = jax.tree.leaves(params)
        keys = jax.random.split(jax.random.key(seed), len(leaves))
        q = [
            jax.random.normal(key, (matrix_shape(x.shape)[1], rank))
            for key, x in zip(keys, leaves, strict=True)
            if _factored(x.shape, rank)
        ]
        residual = optax.tree.zeros_like(params, dtype=jnp.float32)
        return PowerSGDState(residual, q)

    def update(
        updates: Any, state: PowerSGDState, params: Any = None
    ) -> tuple[Any, PowerSGDState]:
        del params
        gs, treedef = jax.tree.flatten(updates)
        es = treedef.flatten_up_to(state.residual)
        xs = [g.astype(jnp.float32) + e for g, e in zip(gs, es, strict=True)]
        thin = [_factored(x.shape, rank) for x in xs]
        ms = [
            x.reshape(matrix_shape(x.shape))
            for x, factored in zip(xs, thin, strict=True)
            if factored
        ]
        ps = [m @ q for m, q in zip(ms, state.q, strict=True)]
        whole = [x for x, factored in zip(xs, thin, strict=True) if not factored]
        ps, whole = mean((ps, whole), axis_name)
        ps = [jnp.linalg.qr(p)[0] for p in ps]
        qs = mean([m.T @ p for m, p in zip(ms, ps, strict=True)], axis_name)

        products = (p @ q.T for p, q in zip(ps, qs, strict=True))
        rest = iter(whole)
        us = [
            (next(products) if factored else next(rest)).reshape(x.shape)
            for x, factored in zip(xs, thin, strict=True)
        ]
        es = [
            x - u if factored else jnp.zeros_like(x)
            for x, u, factored in zip(xs, us, thin, strict=True)
        ]
        us = [u.astype(g.dtype) for u, g in zip(us, gs, strict=True)]
        return treedef.unflatten(us), PowerSGDState(treedef.unflatten(es), qs)

    return optax.GradientTransformation(init, update)


def _factored(shape: tuple[int, ...], rank: int) -> bool:
    rows, columns = matrix_shape(shape)
    return rows > 1 and rank * (rows + columns) < rows * columns


def powersgd_sends(params: Any, workers: int, step: int, rank: int) -> Sends:
    """Float32 means of P and of what is not factored, and then of Q."""
    del workers, step
    leaves = jax.tree.leaves(params)
    thin = [matrix_shape(x.shape) for x in leaves if _factored(x.shape, rank)]
    whole = sum(math.prod(x.shape) for x in leaves if not _factored(x.shape, rank))
    p, q = (rank * sum(sizes) for sizes in zip(*thin, strict=True))
    return [("all-reduce", 4 * (p + whole)), ("all-reduce", 4 * q)]
