"""Adam's direction of a leaf, which its norms read, and behind them its update.

Where norms are of parts of a leaf, and on a CPU, it is computed for each: there a
barrier keeps the compiler from keeping it in memory in between. A GPU or TPU keeps it
otherwise, since each of the kernels behind the norms would read both moments for it.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
from jax import lax

from slamb_jax._leaves import Leaf
from slamb_jax.links.moments import Corrections, adam_direction
from slamb_jax.links.norms import LeafTerms

_LARGE = 2**16  # elements: below, what a barrier saves is not worth one


class Given(NamedTuple):
    """What the direction is computed from."""

    at: Corrections
    m: jax.Array
    v: jax.Array


def for_norms(
    given: Given, leaf: Leaf, age: jax.Array | None
) -> tuple[Callable[..., jax.Array], tuple[jax.Array, ...]]:
    """The direction as an element-wise function, and the arrays that it is of.

    ``age`` is None for a dense leaf, whose norms are of all of it.
    """
    large = leaf.size >= _LARGE
    if age is not None:
        # Behind a barrier of this leaf's the scalars do not become arrays that leaves
        # of one shape share.
        at, m, v = lax.optimization_barrier(given) if large else given
        return lambda m, v: adam_direction(at, m, v), (m, v)
    u = _kept(given) if large else adam_direction(*given)
    return lambda u: u, (u,)


def for_update(
    given: Given, term: LeafTerms, factor: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The direction once more, and the factor of the update, which the norms gave."""
    size = term.leaf.size
    if size < _LARGE:
        return adam_direction(*given), factor
    if term.age is None:
        return _anew_on_cpu(given, *term.rest), factor
    given = Given(given.at, *term.rest)  # behind the norms' barrier
    if factor.size == size:  # of elements: it is no array of its own
        return adam_direction(*lax.optimization_barrier(given)), factor
    given, factor = lax.optimization_barrier((given, factor))
    return adam_direction(*given), factor


def _kept(given: Given) -> jax.Array:
    return lax.platform_dependent(
        given,
        cpu=lambda given: adam_direction(*lax.optimization_barrier(given)),
        default=lambda given: lax.optimization_barrier(adam_direction(*given)),
    )


def _anew_on_cpu(given: Given, kept: jax.Array) -> jax.Array:
    def anew(given: Given, kept: jax.Array) -> jax.Array:
        del kept
        # One barrier alone would be that of the norms, and what is behind it the same.
        twice = lax.optimization_barrier(lax.optimization_barrier(given))
        return adam_direction(*twice)

    return lax.platform_dependent(given, kept, cpu=anew, default=lambda _, kept: kept)
