"""Small leaves as one array: a program takes long to compile for hundreds of leaves.

Each is padded with zeros to whole units, such as blocks of codes, so that what is sent
of it is what it would be by itself. Large leaves stay in place: to concatenate them
would be to copy them.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from slamb_jax._core.axes import varying_axes
from slamb_jax._core.leaves import Leaf
from slamb_jax._core.platform import hidden, materialized, opaque, slices

SMALL = 2**16  # elements: a leaf with fewer is joined with others
Row: TypeAlias = Any  # a named tuple that begins with a Leaf, ``leaf``
Column: TypeAlias = Sequence[Any]  # an array for each row, or None


class ArrayRow(NamedTuple):
    """A row of one array alone."""

    leaf: Leaf
    x: jax.Array


class Joined(NamedTuple):
    """Rows of leaves, of which small ones share a row.

    Attributes:
      places: for each row, the places of its leaves among all.
      rows: that of several leaves has one :class:`Leaf` with them as its ``parts``.
    """

    places: list[list[int]]
    rows: list[Row]

    def join(self, column: Column) -> list[Any]:
        """One array for each row, from one of each leaf."""
        pairs = zip(self.places, self.rows, strict=True)
        return [_join([column[i] for i in places], row.leaf) for places, row in pairs]

    def split(self, *columns: Column) -> list[list[Any]]:
        """Undoes :meth:`join` of several columns."""
        out: list[list[Any]] = [[None] * sum(map(len, self.places)) for _ in columns]
        for places, row, *arrays in zip(self.places, self.rows, *columns, strict=True):
            is_alone = len(places) == 1  # though it may have parts since before
            pieces = [[x] for x in arrays] if is_alone else _split(row.leaf, arrays)
            for column, parts in zip(out, pieces, strict=True):
                for place, x in zip(places, parts, strict=True):
                    column[place] = x
        return out

    def split_values(self, values: Column) -> list[Any]:
        """A column of one value for each leaf, from one with a stack for each row."""
        out: list[Any] = [None] * sum(map(len, self.places))
        for places, x in zip(self.places, values, strict=True):
            each = [x] * len(places)  # of one leaf, or None for all
            if len(places) > 1 and x is not None:
                each = slices(opaque(x), hidden(range(len(each))), [()] * len(each))
            for place, value in zip(places, each, strict=True):
                out[place] = value
        return out


def join_rows(
    rows: Sequence[Row],
    unit_of: Callable[[Leaf], int | None],
    *,
    same: Sequence[str] = (),
    values: Sequence[str] = (),
) -> Joined:
    """Joins the rows of small leaves whose arrays have the same types.

    Args:
      rows: one for each leaf. Stacks and shards stay by themselves: they have sums of
        layers and over devices. So do leaves that were joined before.
      unit_of: the elements to a multiple of which a leaf is padded; None for one that
        stays by itself.
      same: the fields that leaves of one row have in common, such as a decay rate.
      values: the fields with one value for each leaf, which are stacked. All others are
        arrays of the leaf's shape, or None.
    """
    kinds: dict[tuple[Any, ...], list[int]] = {}
    fixed = "leaf", *same, *values
    for i, row in enumerate(rows):
        leaf: Leaf = row.leaf
        is_small = 0 < leaf.size < SMALL and not leaf.parts
        fits = is_small and not leaf.sharded and not leaf.stacked
        unit = unit_of(leaf) if fits else None
        # Two arrays may have the same value, but a trace does not know it.
        common = [getattr(row, name) for name in same]
        common = [id(x) if isinstance(x, jax.Array) else x for x in common]
        others = [x for x in zip(row._fields, row, strict=True) if x[0] not in fixed]
        types = [x if x is None else (x.dtype.name, varying_axes(x)) for _, x in others]
        kind = (None, i) if unit is None else (unit, *common, *types)
        kinds.setdefault(kind, []).append(i)
    # In reverse: so XLA keeps what was sent where momenta were, and a step of twelve
    # matrices on a GPU has a third of the temporary memory.
    groups = list(kinds.items())
    if any(unit is not None for (unit, *_), _ in groups):
        groups.reverse()
    joined = []
    for (unit, *_), places in groups:
        group = [rows[i] for i in places]
        one = len(group) == 1
        joined.append(group[0] if one else _join_rows(group, unit, same, values))
    return Joined([places for _, places in groups], joined)


def _join_rows(
    rows: list[Row], unit: int, same: Sequence[str], values: Sequence[str]
) -> Row:
    """One row of several."""
    parts = tuple(row.leaf for row in rows)
    size = sum(-(-part.size // unit) * unit for part in parts)
    leaf = Leaf(parts[0].index, (size,), parts=parts, unit=unit)
    fields = {}
    for name in rows[0]._fields[1:]:
        column = [getattr(row, name) for row in rows]
        if name in same or column[0] is None:
            fields[name] = column[0]
        else:
            fields[name] = jnp.stack(column) if name in values else _join(column, leaf)
    return type(rows[0])(leaf, **fields)


def sum_parts(leaf: Leaf, x: jax.Array) -> jax.Array:
    """The sum of each part of a joined leaf, or of each layer of a stack; else of all.

    ``x`` has one value for each element, or one for each block.
    """
    if leaf.stacked:
        layers = x if len(x) == leaf.layers else x.reshape(leaf.layers, -1)
        return jnp.sum(layers, tuple(range(1, layers.ndim)))
    if not leaf.parts:
        return jnp.sum(x)
    # By a table of places, since a GPU's scatter adds in any order. Behind the sums of
    # all units stands a 0, for parts of fewer units than the largest.
    counts = np.array(_units_of(leaf), np.int32)[:, None]
    ends = np.cumsum(counts, 0, np.int32)
    of_units = jnp.append(x.reshape(ends[-1, 0], -1).sum(1), np.float32(0))
    places = ends - counts + np.arange(counts.max(), dtype=np.int32)
    return of_units[np.where(places < ends, places, -1)].sum(1)


def spread_parts(leaf: Leaf, values: jax.Array, blocks: int) -> jax.Array:
    """One value for each part or layer as one for each block, (blocks, 1)."""
    if not values.ndim:
        return values
    counts = _units_of(leaf) if leaf.parts else [1] * leaf.layers
    each = values[np.repeat(np.arange(len(counts)), counts)]
    shape = (len(each), blocks // len(each))
    return jnp.broadcast_to(each[:, None], shape).reshape(-1, 1)


def spread_over(leaf: Leaf, values: jax.Array) -> jax.Array:
    """One value for each part or layer, as it broadcasts over the array."""
    if not values.ndim:
        return values
    if leaf.stacked:  # a reshape would gather a leaf on a mesh with explicit axes
        return values.reshape(-1, *(1,) * (len(leaf.shape) - 1))
    return spread_parts(leaf, values, leaf.size).reshape(leaf.shape)


def spread_blocks(leaf: Leaf, values: jax.Array) -> jax.Array:
    """One value for each block, (blocks, 1), as one for each element."""
    if not values.ndim:
        return values
    size = leaf.size // len(values)
    if size > 1:  # kept in memory, or it would be computed anew for each element
        values = materialized(values)
    return jnp.broadcast_to(values, (len(values), size)).reshape(leaf.shape)


def _units_of(leaf: Leaf) -> list[int]:
    """The units of each part."""
    return [-(-part.size // leaf.unit) for part in leaf.parts]


def _join(arrays: Column, leaf: Leaf) -> Any:
    if not leaf.parts or arrays[0] is None:
        return arrays[0]
    pieces = []
    for x in arrays:
        rest = -x.size % leaf.unit
        pieces += [x.reshape(-1), *([jnp.zeros(rest, x.dtype)] if rest else [])]
    # Otherwise XLA looks for each element's part wherever it is read.
    return materialized(jnp.concatenate(pieces))


def _split(leaf: Leaf, arrays: Column) -> list[list[Any]]:
    """The parts of each array."""
    starts = hidden((np.cumsum([0, *_units_of(leaf)[:-1]]) * leaf.unit).tolist())
    shapes = [part.shape for part in leaf.parts]
    # Opaque, or a CPU would compute the whole array again in each part's kernel.
    given = iter(opaque([x for x in arrays if x is not None]))
    return [
        [None] * len(shapes) if x is None else slices(next(given), starts, shapes)
        for x in arrays
    ]
