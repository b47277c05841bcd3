"""Barriers and platform branches of what a selection masks, each with its reason.

As in ``platform``, all functions here equal a plain reference on every platform.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from slamb_jax._core.platform import LARGE, Pair


def computed_once_on_tpu(x: jax.Array) -> jax.Array:
    """``x``, which a TPU would otherwise compute twice from arrays that it updates.

    It would copy the second moment for that: two passes over the parameters.
    """
    return lax.platform_dependent(x, tpu=lax.optimization_barrier, default=lambda x: x)


def gather_or_sum(
    gather: Callable[[jax.Array], jax.Array],
    masked_sum: Callable[[jax.Array], jax.Array],
    x: jax.Array,
) -> jax.Array:
    """The selected blocks of ``x``: a gather, which a TPU would do block by block.

    There a sum over each group, masked to one block, is a single pass.
    """
    return lax.platform_dependent(x, tpu=masked_sum, default=gather)


def scatter_or_choose(
    scatter: Callable[[jax.Array, jax.Array], jax.Array],
    choose: Callable[[jax.Array, jax.Array], jax.Array],
    packed: jax.Array,
    x: jax.Array,
) -> jax.Array:
    """``x`` with its selected blocks replaced: in place on a CPU.

    On a GPU a scatter is a kernel of its own, which needs ``x`` in memory, and on a TPU
    a loop. A choice at every element becomes part of the kernel that uses it.
    """
    return lax.platform_dependent(
        packed, x, cuda=choose, rocm=choose, tpu=choose, default=scatter
    )


Direction = Callable[..., jax.Array]  # element-wise, of scalars and two moments


def direction_for_norms(
    direction: Direction, scalars: Any, moments: Pair, *, in_parts: bool
) -> tuple[Callable[..., jax.Array], tuple[jax.Array, ...]]:
    """A leaf's direction for its norms: a function, and the arrays that it is of.

    The norms read the direction, and after them the update. Where norms are of parts of
    a leaf (``in_parts``), and on a CPU, it is computed for each: a barrier keeps the
    compiler from keeping it in memory in between. A GPU or TPU keeps it otherwise,
    since each of the kernels after the norms would read both moments for it.
    """
    large = moments[0].size >= LARGE
    if in_parts:
        if large:
            # After a barrier of the leaf's own, scalars do not become arrays that
            # leaves of one shape share.
            scalars, moments = lax.optimization_barrier((scalars, moments))
        return lambda m, v: direction(scalars, m, v), moments
    if not large:
        u = direction(scalars, *moments)
        return lambda u: u, (u,)
    u = lax.platform_dependent(
        (scalars, *moments),
        cpu=lambda given: direction(*lax.optimization_barrier(given)),
        default=lambda given: lax.optimization_barrier(direction(*given)),
    )
    return lambda u: u, (u,)


def direction_for_update(
    direction: Direction,
    scalars: Any,
    moments: Pair,
    of_norms: tuple[jax.Array, ...],
    factor: jax.Array,
    *,
    in_parts: bool,
) -> tuple[jax.Array, jax.Array]:
    """The direction once more, and the factor of the update, which the norms gave.

    ``of_norms`` are the arrays that :func:`direction_for_norms` returned.
    """
    size = moments[0].size
    if size < LARGE:
        return direction(scalars, *moments), factor
    if not in_parts:

        def anew(given: Any, kept: jax.Array) -> jax.Array:
            del kept
            # One barrier alone would be the norms' own, and what follows the same.
            return direction(*lax.optimization_barrier(lax.optimization_barrier(given)))

        given = (scalars, *moments)
        u = lax.platform_dependent(
            given, of_norms[0], cpu=anew, default=lambda _, kept: kept
        )
        return u, factor
    given = (scalars, *of_norms)  # after the norms' barrier
    if factor.size == size:  # of elements: it is no array of its own
        return direction(*lax.optimization_barrier(given)), factor
    given, factor = lax.optimization_barrier((given, factor))
    return direction(*given), factor


def kept_per_block(x: jax.Array, *, of_elements: bool) -> jax.Array:
    """One value per block, kept in memory: it is computed once for each block.

    Where blocks are single elements, it would be one more array of the leaf's size.
    """
    return x if of_elements else lax.optimization_barrier(x)
