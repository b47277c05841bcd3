"""Muon's direction: the momentum of every matrix, orthogonalized."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike
from optax.contrib import MuonDimensionNumbers as DimensionNumbers

from slamb_jax._core import checks
from slamb_jax._core.layout import bound_axes, broadcast_specs, is_spec
from slamb_jax._core.leaves import broadcast_prefix, is_function, map_present
from slamb_jax.exchange.collectives import gather_shards, own_shard

#: Of Keller Jordan's quintic, steepest at zero.
NS_COEFFS = (3.4445, -4.7750, 2.0315)

Parts = tuple[tuple[int, ...], tuple[int, ...]]  # the dimensions of rows; of columns
Matrices = Any  # a tree of dimension numbers, None for others; or a function


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
    checks.check_static("ns_coeffs", ns_coeffs)
    checks.check_integer("ns_steps", ns_steps, 1)
    checks.check_range("eps", eps, 0.0, open_low=True, holds=checks.SMALL)
    check_matrices("weight_dimension_numbers", weight_dimension_numbers)
    if consistent_rms is not None:
        checks.check_range("consistent_rms", consistent_rms, 0.0, open_low=True)
    # Constants of the program, one row for each step.
    coeffs = np.asarray(ns_coeffs, np.float32)
    if coeffs.ndim == 1:
        coeffs = np.broadcast_to(coeffs, (ns_steps, *coeffs.shape))
    if coeffs.shape[1:] != (3,) or len(coeffs) < ns_steps:
        raise ValueError(
            "ns_coeffs must be three numbers, or three for each of "
            f"ns_steps={ns_steps} steps, got {ns_coeffs!r}"
        )
    steps = coeffs[-ns_steps:]

    def direction(
        m: jax.Array, dimensions: DimensionNumbers | None, spec: PartitionSpec
    ) -> jax.Array:
        m = m.astype(jnp.float32)
        if dimensions is None or not m.size:
            return m
        # Only what a matrix spans is gathered: a stack that is sharded by layers, or
        # attention by heads, is orthogonalized where it lies.
        parts = rows_and_columns(m.shape, dimensions)
        of_matrix = sum(parts, ())
        axes = [x if i in of_matrix else () for i, x in enumerate(bound_axes(spec))]
        m = gather_shards(m, axes)
        sharding = jax.typeof(m).sharding
        step = functools.partial(orthogonalize_each, parts=parts)
        if any(sharding.spec):  # on a mesh with Explicit axes: left to the compiler
            step = jax.sharding.auto_axes(step, out_sharding=sharding)
        return own_shard(step(m), axes)

    def orthogonalize_each(m: jax.Array, parts: Parts) -> jax.Array:
        # 1. A batch of matrices: rows and columns go last.
        of_matrix = sum(parts, ())
        last = range(-len(of_matrix), 0)
        rows, columns = (math.prod(m.shape[i] for i in part) for part in parts)
        turned = jnp.moveaxis(m, of_matrix, last)
        # 2. All of the batch in one product each, whatever their number.
        x = turned.reshape(-1, rows, columns)
        x = jax.vmap(lambda x: orthogonalize(x, steps, eps))(x)
        # 3. Scaled, so that one learning rate suits matrices of any shape.
        scale: Any = max(1.0, columns / rows) ** 0.5
        if consistent_rms is not None:
            scale = max(rows, columns) ** 0.5 * consistent_rms
        x = jnp.asarray(scale, jnp.float32) * x
        return jnp.moveaxis(x.reshape(turned.shape), last, of_matrix)

    def update(
        updates: optax.Updates,
        state: optax.EmptyState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.EmptyState]:
        del params, extra_args
        checks.check_real(updates, "updates")
        # Leaves that are no matrices pass: an optimizer gives them another direction.
        numbers = matrices(weight_dimension_numbers, updates, param_specs)
        specs = broadcast_specs(param_specs, updates)
        return map_present(direction, updates, numbers, specs), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def matrices(numbers: Matrices, params: optax.Params, param_specs: Any = None) -> Any:
    """A tree of the dimension numbers of each leaf; None for those of no matrices.

    A function that chooses them sees the shapes of whole leaves, also among shards.
    """
    if is_function(numbers):
        # On shapes alone: nothing is gathered to choose.
        specs = broadcast_specs(param_specs, params)
        axes = jax.tree.map(bound_axes, specs, is_leaf=is_spec)
        whole = functools.partial(map_present, gather_shards)
        numbers = numbers(jax.eval_shape(lambda x: whole(x, axes), params))
    if numbers is None:
        two = DimensionNumbers()
        return jax.tree.map(lambda x: two if x.ndim == 2 else None, params)
    check_matrices("weight_dimension_numbers", numbers)
    return broadcast_prefix("weight_dimension_numbers", numbers, params, _is_numbers)


def check_matrices(name: str, numbers: Matrices) -> None:
    """Raises unless it is a tree of dimension numbers and None, or a function."""
    checks.check_static(name, numbers)
    if is_function(numbers):
        return
    for x in jax.tree.leaves(numbers, is_leaf=_is_numbers):
        if not _is_numbers(x):
            got = checks.shown(x)
            raise ValueError(f"{name} must have DimensionNumbers or None, got {got}")


def _is_numbers(x: Any) -> bool:
    return x is None or isinstance(x, DimensionNumbers)


def rows_and_columns(shape: tuple[int, ...], dimensions: DimensionNumbers) -> Parts:
    """Which dimensions are a matrix's rows, and which its columns."""
    ndim = len(shape)
    rows, columns = (
        tuple(axis % ndim for axis in ((x,) if isinstance(x, int) else x))
        for x in (dimensions.reduction_axis, dimensions.output_axis)
    )
    # A dimension of both would be its own row and column.
    if len({*rows, *columns}) < len(rows) + len(columns):
        raise ValueError(
            "weight_dimension_numbers must name each dimension once, got "
            f"{dimensions!r} for shape {shape}"
        )
    return rows, columns


def orthogonalize(x: jax.Array, steps: np.ndarray, eps: ArrayLike) -> jax.Array:
    """A matrix with the same singular vectors, whose singular values are near one."""
    # X X^T is then of the shorter side.
    if x.shape[0] > x.shape[1]:
        return orthogonalize(x.T, steps, eps).T
    # The iteration converges where no singular value is above 1, as none now is.
    x = x / (jnp.sqrt(jnp.sum(jnp.square(x))) + jnp.asarray(eps, jnp.float32))
    for a, b, c in steps:
        square = x @ x.T
        x = a * x + (b * square + c * (square @ square)) @ x
    return x
