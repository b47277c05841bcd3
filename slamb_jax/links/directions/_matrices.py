"""Parameters as matrices, and the matrices with all singular values near one."""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from slamb_jax._core.checks import check_static, shown
from slamb_jax._core.layout import bound_axes, broadcast_specs, is_spec
from slamb_jax._core.leaves import is_function, map_present
from slamb_jax.exchange.collectives import gather_shards


class DimensionNumbers(NamedTuple):
    """Which dimensions of a parameter are a matrix's rows, and which its columns.

    The others are a batch of matrices. ``optax.contrib.MuonDimensionNumbers`` has the
    same fields and serves as well.
    """

    reduction_axis: int | Sequence[int] = 0
    output_axis: int | Sequence[int] = 1


Matrices = Any  # a tree of dimension numbers, None for others; or a function


def matrices(
    numbers: Matrices, params: optax.Params, param_specs: Any = None
) -> list[DimensionNumbers | None]:
    """The dimension numbers of each leaf; None for those that are no matrices.

    A function that chooses them sees the shapes of whole leaves, also among shards.
    """
    if is_function(numbers):
        specs = broadcast_specs(param_specs, params)
        axes = jax.tree.map(bound_axes, specs, is_leaf=is_spec)
        whole = functools.partial(map_present, gather_shards)
        numbers = numbers(jax.eval_shape(lambda x: whole(x, axes), params))
    if numbers is None:
        return [
            DimensionNumbers() if x.ndim == 2 else None for x in jax.tree.leaves(params)
        ]

    check_matrices("weight_dimension_numbers", numbers)
    prefix: Any
    found, prefix = jax.tree.flatten(numbers, is_leaf=_is_numbers)
    try:
        below = prefix.flatten_up_to(params)
    except ValueError as error:
        raise ValueError(
            "weight_dimension_numbers must have the structure of the parameters or a "
            f"prefix of it: {error}"
        ) from error
    return [
        x for x, part in zip(found, below, strict=True) for _ in jax.tree.leaves(part)
    ]


def check_matrices(name: str, numbers: Matrices) -> None:
    """Raises unless it is a tree of dimension numbers and None, or a function."""
    check_static(name, numbers)
    if is_function(numbers):
        return
    for x in jax.tree.leaves(numbers, is_leaf=_is_numbers):
        if not _is_numbers(x):
            raise ValueError(
                f"{name} must have DimensionNumbers or None for leaves, got {shown(x)}"
            )


def _is_numbers(x: Any) -> bool:
    return x is None or hasattr(x, "reduction_axis")


def as_matrices(
    shape: tuple[int, ...], dimensions: DimensionNumbers
) -> tuple[tuple[int, ...], tuple[int, int, int]]:
    """The order of dimensions that makes a batch of matrices, and its shape."""
    rows, columns = rows_and_columns(shape, dimensions)
    batch = tuple(i for i in range(len(shape)) if i not in (*rows, *columns))
    parts = (batch, rows, columns)
    b, r, c = (math.prod(shape[i] for i in part) for part in parts)
    return (*batch, *rows, *columns), (b, r, c)


def rows_and_columns(
    shape: tuple[int, ...], dimensions: DimensionNumbers
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Which dimensions are a matrix's rows, and which its columns."""
    ndim = len(shape)
    rows, columns = (
        tuple(axis % ndim for axis in ((x,) if isinstance(x, int) else x))
        for x in (dimensions.reduction_axis, dimensions.output_axis)
    )
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
    x = x / (jnp.sqrt(jnp.sum(jnp.square(x))) + jnp.asarray(eps, jnp.float32))
    for a, b, c in steps:
        square = x @ x.T
        x = a * x + (b * square + c * (square @ square)) @ x
    return x
