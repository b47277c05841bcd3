"""Compressors that send matrices as products of two thin ones."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from slamb_jax._core import axes, checks
from slamb_jax._core.axes import AxisName
from slamb_jax._core.leaves import arrays_of, chosen, present, unless
from slamb_jax.compressors.codec import Sent, check_has_axis
from slamb_jax.exchange import collectives


class LowRankState(NamedTuple):
    """State of :func:`low_rank`; the same on all workers."""

    q: optax.Updates  # float32 (columns, rank) for each leaf; empty for one sent whole


def low_rank(rank: int, axis_name: AxisName) -> optax.GradientTransformationExtraArgs:
    r"""Sends the projection of each matrix on a subspace that all workers share.

    For each leaf, seen as a matrix X of its last dimension's columns, with Q of the
    step before (random at first):

    .. math::

      P &= \text{orthogonalize}(\text{mean over workers of } X_i Q) \\
      Q_i &= X_i^T P, \quad q_i = P Q_i^T, \quad
      M = P Q^T \text{ with } Q = \text{mean over workers of } Q_i

    Two all-reduces of thin matrices. Leaves of one dimension, and those that these
    would not make smaller, are averaged whole.

    Args:
      rank: of the products, a positive integer.
      axis_name: the mesh axis (or axes) of the workers.

    Returns:
      A compressor: a :class:`optax.GradientTransformationExtraArgs` whose ``update``
      returns :class:`slamb_jax.Sent`.

    Raises:
      ValueError: for a value out of range; in ``update``, for an unbound axis.

    Examples:
      >>> import jax, jax.numpy as jnp, slamb_jax
      >>> tx = slamb_jax.compressors.low_rank(1, "data")
      >>> send = lambda x: tx.update(x, tx.init(x))[0]
      >>> x = jnp.stack([jnp.outer(jnp.arange(4.0), jnp.ones(4))] * 2)  # of rank 1
      >>> print(jnp.abs(jax.vmap(send, axis_name="data")(x).unsent).max() < 1e-5)
      True

    References:
      Vogels et al., `PowerSGD <https://arxiv.org/abs/1905.13727>`_, NeurIPS 2019.
    """
    checks.check_integer("rank", rank, 1)
    check_has_axis(axis_name)

    def init(params: optax.Params) -> LowRankState:
        checks.check_floating(params, "params")
        rows, rebuild = present(params)

        def first(index: int, x: jax.Array) -> jax.Array:
            shape = (_matrix(x)[1], rank) if _is_thinner(x, rank) else (0, rank)
            key = jax.random.fold_in(jax.random.key(0), index)
            # Of the parameters' type, which may vary over mesh axes.
            q = jax.random.normal(key, shape, jnp.float32)
            return axes.vary_over(q, axes.varying_axes(x))

        return LowRankState(rebuild([first(leaf.index, x) for leaf, x in rows]))

    def update(
        updates: optax.Updates,
        state: LowRankState,
        params: optax.Params | None = None,
        skip: jax.Array | None = None,
        **extra_args: Any,
    ) -> tuple[Sent, LowRankState]:
        del extra_args
        axes.check_local(updates, axis_name)
        checks.check_floating(updates, "updates")
        like = updates if params is None else params
        rows, rebuild = present(updates, like=like)
        xs = [x.astype(jnp.float32) for _, x in rows]
        olds = arrays_of(updates, state.q, like)
        thin = [_is_thinner(x, rank) for x in xs]
        # Of a leaf that is sent whole, x itself is all that is sent.
        ps = collectives.pmean(
            [
                x.reshape(_matrix(x)) @ q if is_thin else x
                for x, q, is_thin in zip(xs, olds, thin, strict=True)
            ],
            axis_name,
        )
        pairs = zip(ps, thin, strict=True)
        bases = [jnp.linalg.qr(p)[0] if is_thin else None for p, is_thin in pairs]
        own = [
            q if p is None else x.reshape(_matrix(x)).T @ p
            for x, q, p in zip(xs, olds, bases, strict=True)
        ]
        qs = collectives.pmean(own, axis_name)

        def product(p: jax.Array, q: jax.Array, x: jax.Array) -> jax.Array:
            return (p @ q.T).reshape(x.shape)

        means, unsent = [], []
        for x, whole, p, mine, q in zip(xs, ps, bases, own, qs, strict=True):
            means.append(whole if p is None else product(p, q, x))
            unsent.append(x - (x if p is None else product(p, mine, x)))
        new = LowRankState(unless(skip, state.q, rebuild(qs)))
        return Sent(rebuild(means), rebuild(unsent)), chosen(skip, new)

    return optax.GradientTransformationExtraArgs(init, update)


def _matrix(x: jax.Array) -> tuple[int, int]:
    """Rows and columns of an array seen as a matrix."""
    columns = x.shape[-1] if x.ndim > 1 else x.size
    return x.size // max(columns, 1), columns


def _is_thinner(x: jax.Array, rank: int) -> bool:
    rows, columns = _matrix(x)
    return rows > 1 and rank * (rows + columns) < rows * columns
