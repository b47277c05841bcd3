"""SLAMB's trust ratios of a layer: of the exchanged coordinates, and of the others."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from slamb_jax._core import axes as _axes
from slamb_jax._core.leaves import Leaf
from slamb_jax._core.moments import Form
from slamb_jax.exchange import collectives as _collectives
from slamb_jax.exchange.blocks import AtStep, Blocks
from slamb_jax.links.layerwise_trust_ratio import Squares, ratio_of, squares_of

# From this share on, the rest as a difference would lose too many digits.
_NEARLY_ALL = 0.9

Bounds = tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class LeafTerms:
    """The terms of a leaf's trust ratios: its parameters, and its direction.

    ``direction(p, *rest)`` is element-wise: it is computed for parts of the leaf, too.
    ``age`` is None for a dense leaf.
    """

    leaf: Leaf
    age: jax.Array | None
    direction: Callable[..., jax.Array]
    p: jax.Array
    rest: tuple[jax.Array, ...]

    @property
    def _both(self) -> Squares:
        return self.p, self.direction(self.p, *self.rest)

    def squares(self) -> Squares:
        """Squared norms of all of the leaf."""
        return squares_of(self.leaf, *self._both)

    def squares_exchanged(self, blocks: Blocks) -> Squares:
        """Squared norms of the exchanged blocks, from packed copies."""
        if blocks.starts is None:
            return self.squares()
        p, *rest = (blocks.pack(x) for x in (self.p, *self.rest))
        part = dataclasses.replace(self, p=p, rest=tuple(rest))
        return part._squares_where(blocks.used, layers=blocks.starts[:, 0])

    def squares_kept(self, age: jax.Array | None) -> Squares:
        """Squared norms of the other blocks, whose ages are not 0."""
        assert age is not None
        if len(age) < self.leaf.size or self.leaf.stacked:
            return self._squares_where(age[:, 0] > 0)
        there, zero = age.reshape(self.p.shape) > 0, jnp.float32(0)
        parts = tuple(jnp.where(there, jnp.square(x), zero) for x in self._both)
        # Row by row, both sums in one: XLA keeps the squares of a single sum in memory.
        rows = lax.reduce(parts, (zero, zero), _add, (self.p.ndim - 1,))
        p, u = (jnp.sum(x) for x in rows)
        return p, u

    def _squares_where(
        self, mask: jax.Array, layers: jax.Array | None = None
    ) -> Squares:
        """Squared norms of the blocks where ``mask``, of shape (blocks,), is true.

        In a stack ``layers`` are the blocks' layers; None if all blocks are there.
        """
        squares = tuple(jnp.square(x).reshape(len(mask), -1) for x in self._both)
        zero = jnp.float32(0)
        # Both sums in one reduction: XLA then reads the blocks in place, where for a
        # single sum it copies them first.
        sums = lax.reduce(squares, (zero, zero), _add, (1,))
        masked = (jnp.where(mask, x, zero) for x in sums)
        if not self.leaf.stacked:
            p, u = (jnp.sum(x) for x in masked)
        elif layers is None:
            p, u = (jnp.sum(x.reshape(self.leaf.layers, -1), 1) for x in masked)
        else:
            p, u = (jax.ops.segment_sum(x, layers, self.leaf.layers) for x in masked)
        return p, u


class Ratios(NamedTuple):
    """Trust ratios of a layer: one for fresh coordinates, one for stale ones.

    In a stack of layers there is one per block, (blocks, 1), or one per layer if the
    leaf is dense.
    """

    fresh: jax.Array
    stale: jax.Array | None  # None for a dense leaf

    def blend(self, form: Form, r: jax.Array, n: int, bounds: Bounds) -> jax.Array:
        r"""By freshness, one per block: :math:`r\phi_{hi} + w\phi_{lo}`.

        w is 1 - r in the product form, which clips, and :math:`(1-r)/\sqrt n` in the
        sum form.
        """
        assert self.stale is not None
        if form == "sum":
            return r * self.fresh + (1 - r) * (self.stale / n**0.5)
        return jnp.clip(r * self.fresh + (1 - r) * self.stale, *bounds)


def trust_ratios(
    terms: Sequence[LeafTerms], at_step: AtStep, form: Form, bounds: Bounds
) -> list[Ratios]:
    """The ratios of all leaves, clipped where the form does."""
    out = []
    for term, found in zip(terms, _squares(terms, at_step), strict=True):
        if term.age is None:
            ratio = _per_block(ratio_of(*found, otherwise=1.0), term.leaf)
            if form == "sum" or len(term.leaf.layer_shape) > 1:
                ratio = jnp.clip(ratio, *bounds)
            out.append(Ratios(ratio, None))
            continue
        exchanged, kept = (
            tuple(_per_block(x, term.leaf, len(term.age)) for x in part)
            for part in found
        )
        if form == "sum":
            fresh = jnp.clip(ratio_of(*exchanged, otherwise=1.0), *bounds)
            stale = jnp.minimum(ratio_of(*kept, otherwise=0.0), bounds[1])
        else:
            fresh = ratio_of(*exchanged, otherwise=1.0)
            stale = ratio_of(*kept, otherwise=1.0)
        out.append(Ratios(fresh, stale))
    return out


def _squares(terms: Sequence[LeafTerms], at_step: AtStep) -> list[Any]:
    """Squares of each leaf, or of its two parts, summed over all shards."""
    out: dict[int, Any] = {}
    # By how they are sharded, so that no branch that is taken varies over axes over
    # which the leaf does not.
    kinds = [(x.leaf.axes, x.leaf.sharded) for x in terms]
    for kind in dict.fromkeys(kinds):
        group = [(i, x) for i, x in enumerate(terms) if kinds[i] == kind]
        in_parts = iter(
            _squares_of_parts([x for _, x in group if x.age is not None], at_step)
        )
        out |= {i: x.squares() if x.age is None else next(in_parts) for i, x in group}
    squares = [out[i] for i in range(len(terms))]
    return _collectives.psum_each(squares, [x.leaf.axes for x in terms])


def _squares_of_parts(
    terms: Sequence[LeafTerms], at_step: AtStep
) -> list[tuple[Squares, Squares]]:
    """Squares of what each leaf exchanges at this step, and of the rest.

    The rest as the difference to the whole, unless so much was exchanged somewhere that
    digits would be lost: on a CPU the sum of the whole is vectorized and a masked one
    is not (1 ms against 14 for 9.4 M elements).
    """
    if not terms:
        return []
    exchanged = [x.squares_exchanged(at_step.blocks(x.leaf)) for x in terms]
    rest, safe = [], []
    for part, term in zip(exchanged, terms, strict=True):
        both = list(zip(term.squares(), part, strict=True))
        rest.append(tuple(whole - x for whole, x in both))
        safe += [jnp.all(x <= _NEARLY_ALL * whole) for whole, x in both]

    @jax.jit  # so that lax.cond and the look at its types trace it once
    def masked() -> list[Squares]:
        # Ages are computed here: from outside they would come as arrays.
        return [x.squares_kept(at_step.age(x.leaf)) for x in terms]

    all_safe = functools.reduce(jnp.logical_and, safe)
    kept = _axes.cond(all_safe, lambda: rest, masked)
    return list(zip(exchanged, kept, strict=True))


def _add(a: tuple[jax.Array, ...], b: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return tuple(x + y for x, y in zip(a, b, strict=True))


def _per_block(x: jax.Array, leaf: Leaf, blocks: int | None = None) -> jax.Array:
    """One value per layer of a stack as one per block; a single layer's as it is."""
    if not leaf.stacked:
        return x
    per_layer = 1 if blocks is None else blocks // leaf.layers
    return jnp.broadcast_to(x[:, None], (leaf.layers, per_layer)).reshape(-1, 1)
