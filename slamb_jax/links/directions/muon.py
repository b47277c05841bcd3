"""Muon's direction: the momentum of every matrix, orthogonalized."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from slamb_jax._core.checks import (
    SMALL,
    check_integer,
    check_range,
    check_real,
    check_static,
)
from slamb_jax._core.layout import bound_axes, broadcast_specs
from slamb_jax._core.leaves import present
from slamb_jax.exchange.collectives import gather_shards, own_shard
from slamb_jax.links.directions._matrices import (
    DimensionNumbers,
    Matrices,
    as_matrices,
    check_matrices,
    matrices,
    orthogonalize,
    rows_and_columns,
)

NS_COEFFS = (3.4445, -4.7750, 2.0315)
"""Of Keller Jordan's quintic, steepest at zero."""


def muon(
    ns_coeffs: tuple[float, ...] | tuple[tuple[float, ...], ...] = NS_COEFFS,
    ns_steps: int = 5,
    eps: ArrayLike = 1e-8,
    *,
    weight_dimension_numbers: Matrices = None,
    consistent_rms: ArrayLike | None = None,
    param_specs: Any = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Orthogonalizes the momentum of every matrix by Newton-Schulz iteration.

    For a matrix X of r rows and c columns, the momentum, with :math:`r \le c` (else
    transposed):

    .. math::

      X &\leftarrow X / (\|X\|_F + \varepsilon) \\
      X &\leftarrow a X + (b A + c A^2) X, \quad A = X X^T, \quad \text{ns\_steps times}
      \\
      u &= \sqrt{\max(1, c_{out} / r_{in})}\; X

    All singular values of u end near one.

    Args:
      ns_coeffs: a, b and c, for each step or the same for all.
      ns_steps: how many iterations; with coefficients for each, the last ones.
      eps: added to the norm, positive.
      weight_dimension_numbers: a tree of :class:`DimensionNumbers` like the parameters,
        a prefix of it, or a function of them that returns one; None in it for a leaf
        that passes unchanged. None: leaves of two dimensions.
      consistent_rms: scale by :math:`\sqrt{\max(r_{in}, c_{out})}` times this instead.
      param_specs: how leaves are sharded over mesh axes, as in :class:`Exchange`. Each
        device gathers the rows and columns of its matrices, orthogonalizes the whole
        matrices and keeps its own shards. None: every shard counts as a matrix.

    Returns:
      A direction without state, for :func:`slamb_jax.mask_momentum`.

    Raises:
      ValueError: for a value out of range, and for dimensions that overlap.

    Examples:
      >>> import jax.numpy as jnp, slamb_jax
      >>> exchange = slamb_jax.Exchange()
      >>> tx = slamb_jax.mask_momentum(exchange, slamb_jax.directions.muon(), 0.95)
      >>> params = jnp.ones((2, 2))
      >>> updates, _ = tx.update(jnp.array([[3.0, 0.0], [0.0, 1.0]]), tx.init(params))
      >>> print(jnp.abs(updates).round())
      [[1. 0.]
       [0. 1.]]

    References:
      Jordan et al., `Muon <https://kellerjordan.github.io/posts/muon/>`_, 2024; Liu et
      al., `Muon is Scalable for LLM Training <https://arxiv.org/abs/2502.16982>`_,
      2025: ``consistent_rms``.
    """
    check_static("ns_coeffs", ns_coeffs)
    check_integer("ns_steps", ns_steps, 1)
    check_range("eps", eps, 0.0, open_low=True, holds=SMALL)
    check_matrices("weight_dimension_numbers", weight_dimension_numbers)
    if consistent_rms is not None:
        check_range("consistent_rms", consistent_rms, 0.0, open_low=True)
    steps = _of_steps(ns_coeffs, ns_steps)

    def direction(
        m: jax.Array, dimensions: DimensionNumbers | None, spec: PartitionSpec
    ) -> jax.Array:
        m = m.astype(jnp.float32)
        if dimensions is None or not m.size:
            return m
        # Only what a matrix spans is gathered: a stack that is sharded by layers, or
        # attention by heads, is orthogonalized where it lies.
        of_matrix = sum(rows_and_columns(m.shape, dimensions), ())
        axes = [x if i in of_matrix else () for i, x in enumerate(bound_axes(spec))]
        m = gather_shards(m, axes)
        there = jax.typeof(m).sharding
        of = functools.partial(whole, dimensions=dimensions)
        if any(there.spec):  # on a mesh with Explicit axes: left to the compiler
            of = jax.sharding.auto_axes(of, out_sharding=there)
        return own_shard(of(m), axes)

    def whole(m: jax.Array, dimensions: DimensionNumbers) -> jax.Array:
        order, sizes = as_matrices(m.shape, dimensions)
        turned = m.transpose(order)
        # A batch of matrices in one product each, whatever their number.
        x = jax.vmap(lambda x: orthogonalize(x, steps, eps))(turned.reshape(sizes))
        _, rows, columns = sizes
        scale: Any = max(1.0, columns / rows) ** 0.5
        if consistent_rms is not None:
            scale = max(rows, columns) ** 0.5 * consistent_rms
        x = jnp.asarray(scale, jnp.float32) * x
        return x.reshape(turned.shape).transpose(np.argsort(order))

    def update(
        updates: optax.Updates,
        state: optax.EmptyState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.EmptyState]:
        del params, extra_args
        check_real(updates, "updates")
        rows, rebuild = present(updates, broadcast_specs(param_specs, updates))
        numbers = matrices(weight_dimension_numbers, updates, param_specs)
        return rebuild([direction(m, numbers[x.index], at) for x, m, at in rows]), state

    return optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)


def _of_steps(ns_coeffs: Any, ns_steps: int) -> np.ndarray:
    """The coefficients of each step; raises for another number of them."""
    coeffs = np.asarray(ns_coeffs, np.float32)
    if coeffs.ndim == 1:
        coeffs = np.broadcast_to(coeffs, (ns_steps, *coeffs.shape))
    if coeffs.shape[1:] != (3,) or len(coeffs) < ns_steps:
        raise ValueError(
            "ns_coeffs must be three numbers, or three for each of "
            f"ns_steps={ns_steps} steps, got {ns_coeffs!r}"
        )
    return coeffs[-ns_steps:]
