"""The two ratios of norms of a layer: of what was exchanged, and of the rest."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from slamb_jax import _axes, _collectives
from slamb_jax._leaves import Leaf
from slamb_jax._selections import Rows, Selection, by_phase, rows_at

# From this share on, the rest as a difference would lose too many digits.
_DWARFS = 0.9


@dataclasses.dataclass(frozen=True)
class Rule:
    """What the ratios of all leaves have in common."""

    selection: Selection
    b3: Any
    form: str
    c_min: Any
    c_max: Any
    n: int


@dataclasses.dataclass(frozen=True)
class Layer:
    """A leaf: its parameters, and what gives the direction whose norm is taken.

    ``normed(p, *rest)`` is element-wise: it is asked for parts of the leaf too. ``age``
    is None where the whole leaf is exchanged.
    """

    leaf: Leaf
    age: jax.Array | None
    normed: Callable[..., jax.Array]
    p: jax.Array
    rest: tuple[jax.Array, ...]

    @property
    def kept(self) -> jax.Array:
        """Which rows of a part do not travel: bool, of shape (rows,)."""
        assert self.age is not None
        return self.age[:, 0] > 0

    def squares(self) -> tuple[jax.Array, jax.Array]:
        """Squared norms of the parameters and of the direction."""
        both = (self.p, self.normed(self.p, *self.rest))
        over = tuple(range(1, self.p.ndim)) if self.leaf.stacked else None
        p, u = (jnp.sum(jnp.square(x), over) for x in both)
        return p, u

    def squares_at(self, rows: Rows) -> tuple[jax.Array, jax.Array]:
        """Those of the rows that travel, from copies of them."""
        if rows.starts is None:
            return self.squares()
        p, *rest = (rows.pack(x) for x in (self.p, *self.rest))
        part = dataclasses.replace(self, p=p, rest=tuple(rest))
        return part.squares_of(rows.used, rows.starts[:, 0])

    def squares_of(
        self, keep: jax.Array, layers: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Those of the rows where ``keep``, of shape (rows,), is true.

        In a stack ``layers`` are the rows' layers; None where it has all its rows.
        """
        both = (self.p, self.normed(self.p, *self.rest))
        squares = tuple(jnp.square(x).reshape(len(keep), -1) for x in both)
        zero = jnp.float32(0)
        # Both sums in one reduction: XLA then reads rows where they lie, where for a
        # single sum it would copy them first.
        sums = lax.reduce(squares, (zero, zero), _add, (1,))
        kept = (jnp.where(keep, x, zero) for x in sums)
        if not self.leaf.stacked:
            p, u = (jnp.sum(x) for x in kept)
        elif layers is None:
            p, u = (jnp.sum(x.reshape(self.leaf.layers, -1), 1) for x in kept)
        else:
            p, u = (jax.ops.segment_sum(x, layers, self.leaf.layers) for x in kept)
        return p, u


@dataclasses.dataclass(frozen=True)
class Ratios:
    """Of a layer: what its fresh coordinates are scaled by, and its stale ones.

    ``stale`` is None where the whole leaf is exchanged. In a stack of layers both have
    a value for each row, (rows, 1), or for each layer where the leaf is sent whole.
    """

    fresh: jax.Array
    stale: jax.Array | None

    def blend(self, rule: Rule, r: jax.Array) -> jax.Array:
        r"""Both by freshness: :math:`r\phi_{hi} + w\phi_{lo}`, one per row.

        w is 1 - r in the product form and :math:`(1-r)/\sqrt n` in the sum form.
        """
        assert self.stale is not None
        if rule.form == "sum":
            return r * self.fresh + (1 - r) * (self.stale / rule.n**0.5)
        ratio = r * self.fresh + (1 - r) * self.stale
        return jnp.clip(ratio, *_clips(rule))


def ratios(rule: Rule, step: jax.Array, layers: Sequence[Layer]) -> list[Ratios]:
    """The ratios of all layers, clipped where the form wants it."""
    out = []
    for layer, found in zip(layers, _squares(rule, step, layers), strict=True):
        if layer.age is None:
            ratio = _spread(_ratio(*found, otherwise=1.0), layer.leaf)
            clipped = rule.form == "sum" or len(layer.leaf.layer_shape) > 1
            out.append(
                Ratios(jnp.clip(ratio, *_clips(rule)) if clipped else ratio, None)
            )
            continue
        rows = len(layer.age)
        sent, kept = (tuple(_spread(x, layer.leaf, rows) for x in xs) for xs in found)
        if rule.form == "sum":
            low, high = _clips(rule)
            fresh = jnp.clip(_ratio(*sent, otherwise=1.0), low, high)
            stale = jnp.minimum(_ratio(*kept, otherwise=0.0), high)
            out.append(Ratios(fresh, stale))
        else:
            out.append(
                Ratios(_ratio(*sent, otherwise=1.0), _ratio(*kept, otherwise=1.0))
            )
    return out


def _squares(rule: Rule, step: jax.Array, layers: Sequence[Layer]) -> list[Any]:
    """For each layer its squares, or those of its two parts, of all shards together."""
    out: dict[int, Any] = {}
    for axes in dict.fromkeys(x.leaf.axes for x in layers):
        # By axes, so that no type varies over more of them than its leaf does.
        group = [(i, x) for i, x in enumerate(layers) if x.leaf.axes == axes]
        parts = [x for _, x in group if x.age is not None]
        of_parts = iter(_squares_of_parts(rule, step, parts))
        found = {i: x.squares() if x.age is None else next(of_parts) for i, x in group}
        out |= _collectives.sum_over(found, axes)
    return [out[i] for i in range(len(layers))]


def _squares_of_parts(rule: Rule, step: jax.Array, layers: Sequence[Layer]) -> Any:
    """For each layer the squares of what is sent at this step, and of what is not.

    The latter are the differences to the whole, whose sum is one vectorized pass where
    a masked one is not, unless so much was sent somewhere that digits would be lost.
    """
    if not layers:
        return []

    def squares_sent(selection: Selection) -> list[tuple[jax.Array, jax.Array]]:
        return [x.squares_at(rows_at(selection, step, x.leaf)) for x in layers]

    sent = by_phase(rule.selection, step, squares_sent)
    rest, safe = [], []
    for mine, layer in zip(sent, layers, strict=True):
        whole = layer.squares()
        rest.append(tuple(w - s for w, s in zip(whole, mine, strict=True)))
        safe += [
            less if less.ndim == 0 else jnp.all(less)
            for less in (s <= _DWARFS * w for w, s in zip(whole, mine, strict=True))
        ]

    @jax.jit  # so that lax.cond and the look at its types before trace it once
    def masked() -> list[Any]:
        return [x.squares_of(x.kept) for x in layers]

    all_safe = functools.reduce(jnp.logical_and, safe)
    kept = _axes.cond(all_safe, lambda: rest, masked)
    return list(zip(sent, kept, strict=True))


def _add(a: tuple[jax.Array, ...], b: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return tuple(x + y for x, y in zip(a, b, strict=True))


def _spread(x: jax.Array, leaf: Leaf, rows: int | None = None) -> jax.Array:
    """One value per layer of a stack as one per row; a single layer's as it is."""
    if not leaf.stacked:
        return x
    rows_per_layer = 1 if rows is None else rows // leaf.layers
    return jnp.broadcast_to(x[:, None], (leaf.layers, rows_per_layer)).reshape(-1, 1)


def _ratio(p: jax.Array, u: jax.Array, *, otherwise: float) -> jax.Array:
    """Root of p over u; ``otherwise`` where one of them is 0."""
    # In operations of lax: tracing a layer's ratios costs as much as compiling them.
    zero, other = jnp.float32(0), jnp.float32(otherwise)
    ratio = lax.div(lax.sqrt(p), lax.sqrt(u))
    if p.ndim:
        return jnp.where(lax.min(p, u) > zero, ratio, other)
    return lax.select(lax.gt(lax.min(p, u), zero), ratio, other)


def _clips(rule: Rule) -> tuple[jax.Array, jax.Array]:
    return jnp.asarray(rule.c_min, jnp.float32), jnp.asarray(rule.c_max, jnp.float32)
