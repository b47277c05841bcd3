"""Compressors that send matrices as products of two thin ones."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from slamb_jax._core import axes, checks
from slamb_jax._core.axes import AxisName
from slamb_jax._core.leaves import chosen, present, unless
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

        qs = []
        for leaf, x in rows:
            size, columns = _matrix(x)
            # Of a leaf that is sent whole, since two thin ones are no smaller: empty.
            is_thinner = size > 1 and rank * (size + columns) < size * columns
            key = jax.random.fold_in(jax.random.key(0), leaf.index)
            shape = columns if is_thinner else 0, rank
            q = jax.random.normal(key, shape, jnp.float32)
            # Of the parameters' type, which may vary over mesh axes.
            qs.append(axes.vary_over(q, axes.varying_axes(x)))
        return LowRankState(rebuild(qs))

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
        rows, rebuild = present(updates, state.q, like=like)
        xs = [x.astype(jnp.float32) for _, x, _ in rows]
        olds = [q for *_, q in rows]
        pairs = list(zip(xs, olds, strict=True))
        # 1. The mean of X Q; or, of a leaf that is sent whole, of all that is sent.
        left = [x.reshape(_matrix(x)) @ q if q.size else x for x, q in pairs]
        ps = collectives.pmean(left, axis_name)
        # 2. P, the same on all workers, and the mean of X^T P.
        ps = [
            jnp.linalg.qr(p)[0] if q.size else p for p, q in zip(ps, olds, strict=True)
        ]
        own = [
            x.reshape(_matrix(x)).T @ p if q.size else q
            for (x, q), p in zip(pairs, ps, strict=True)
        ]
        qs = collectives.pmean(own, axis_name)
        # 3. What their products stand for, of all workers and of this one.
        means, unsent = [], []
        for x, p, mine, q in zip(xs, ps, own, qs, strict=True):
            means.append((p @ q.T).reshape(x.shape) if q.size else p)
            sent = (p @ mine.T).reshape(x.shape) if q.size else x
            unsent.append(x - sent)
        new = LowRankState(unless(skip, state.q, rebuild(qs)))
        return Sent(rebuild(means), rebuild(unsent)), chosen(skip, new)

    return optax.GradientTransformationExtraArgs(init, update)


def _matrix(x: jax.Array) -> tuple[int, int]:
    """Rows and columns of an array seen as a matrix."""
    columns = x.shape[-1] if x.ndim > 1 else x.size
    return x.size // max(columns, 1), columns
