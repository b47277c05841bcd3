"""Dion2: a Muon that sends and orthogonalizes some rows of its momenta."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import slamb_jax

NEWTON_SCHULZ = 3.4445, -4.7750, 2.0315  # five steps of Keller Jordan's quintic


class Dion2State(NamedTuple):
    count: jax.Array  # type: ignore[assignment]
    momenta: list[jax.Array]  # of each matrix, (rows, columns)
    adam: optax.OptState  # of the other leaves


def dion2(
    learning_rate: optax.Schedule,
    axis_name: str,
    matrices: Callable[[Any], Any],
    fraction: float = 0.25,
    momentum: float = 0.95,
    seed: int = 0,
    b2: float = 0.999,
) -> optax.GradientTransformation:
    r"""Orthogonalizes a random share S of the rows of the mean momentum.

    .. math::

      M &\leftarrow M + g, \quad
      O = \text{orthogonal part of the mean over workers of } M[S] \\
      M[S] &\leftarrow \mu M[S], \quad
      W[S] \leftarrow W[S] - lr \sqrt{\max(1, \text{columns} / \text{rows})}\,O

    The same rows on all workers. ``matrices`` gives each leaf's
    :class:`slamb_jax.directions.DimensionNumbers`; leaves that have none are stepped by
    Adam on their mean gradients, at a third of the rate. (Ahn, Amsel, Langford, 2025,
    https://arxiv.org/abs/2512.16928, which takes the largest rows and finds random ones
    nearly as good.)
    """
    adam = optax.adam(lambda count: learning_rate(count) / 3, b2=b2)

    def split(tree: Any) -> tuple[list[jax.Array], list[jax.Array], list[Any]]:
        """Matrices as (rows, columns), other leaves, and the numbers of all."""
        numbers = jax.tree.leaves(
            matrices(tree), is_leaf=lambda x: x is None or hasattr(x, "reduction_axis")
        )
        seen, rest = [], []
        for x, dimensions in zip(jax.tree.leaves(tree), numbers, strict=True):
            if dimensions is None:
                rest.append(x)
            else:
                rows, columns = rows_and_columns(x, dimensions)
                shape = math.prod(x.shape[i] for i in rows), -1
                seen.append(x.transpose(rows + columns).reshape(shape))
        return seen, rest, numbers

    def init(params: optax.Params) -> Dion2State:
        seen, rest, _ = split(params)
        zeros = [jnp.zeros(x.shape) for x in seen]
        return Dion2State(jnp.zeros([], jnp.int32), zeros, adam.init(rest))

    def update(
        grads: optax.Updates, state: Dion2State, params: Any = None
    ) -> tuple[optax.Updates, Dion2State]:
        del params
        rate, count = learning_rate(state.count), optax.safe_increment(state.count)
        seen, rest, numbers = split(grads)
        momenta = [m + g for m, g in zip(state.momenta, seen, strict=True)]
        keys = jax.random.split(
            jax.random.fold_in(jax.random.key(seed), count), len(momenta)
        )
        rows = [
            jax.random.permutation(key, len(m))[: max(1, round(fraction * len(m)))]
            for key, m in zip(keys, momenta, strict=True)
        ]
        picked = [m[i] for m, i in zip(momenta, rows, strict=True)]
        picked, rest = slamb_jax.average_parameters((picked, rest), axis_name)
        rest, adam_state = adam.update(rest, state.adam)

        def step(m: jax.Array, i: jax.Array, x: jax.Array) -> jax.Array:
            scale = rate * max(1.0, m.shape[1] / m.shape[0]) ** 0.5
            u = -scale * orthogonalize(x)
            return jnp.zeros(m.shape).at[i].set(u)

        steps = iter(map(step, momenta, rows, picked))
        others = iter(rest)
        updates = [
            next(others) if dimensions is None else back(next(steps), x, dimensions)
            for x, dimensions in zip(jax.tree.leaves(grads), numbers, strict=True)
        ]
        kept = [m.at[i].multiply(momentum) for m, i in zip(momenta, rows, strict=True)]
        updates = jax.tree.unflatten(jax.tree.structure(grads), updates)
        return updates, Dion2State(count, kept, adam_state)

    return optax.GradientTransformation(init, update)


def back(u: jax.Array, like: jax.Array, dimensions: Any) -> jax.Array:
    """A matrix as the leaf that it was."""
    rows, columns = rows_and_columns(like, dimensions)
    turned = u.reshape([like.shape[i] for i in rows + columns])
    return turned.transpose(np.argsort(rows + columns))


def rows_and_columns(x: Any, dimensions: Any) -> tuple[tuple[int, ...], ...]:
    """Which dimensions of a leaf are a matrix's rows, and which its columns."""
    both = dimensions.reduction_axis, dimensions.output_axis
    return tuple(tuple(int(i) % x.ndim for i in np.atleast_1d(axes)) for axes in both)


def orthogonalize(x: jax.Array) -> jax.Array:
    """A matrix with the same singular vectors, whose singular values are near one."""
    if x.shape[0] > x.shape[1]:
        return orthogonalize(x.T).T
    a, b, c = map(np.float32, NEWTON_SCHULZ)
    x = x / (jnp.sqrt(jnp.sum(jnp.square(x))) + 1e-7)
    for _ in range(5):
        square = x @ x.T
        x = a * x + (b * square + c * (square @ square)) @ x
    return x
