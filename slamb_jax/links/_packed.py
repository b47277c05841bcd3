"""Small leaves as one array: a program takes long to compile for hundreds of leaves.

Each is padded with zeros to whole blocks of codes, so that its codes are the same as by
itself. Large leaves stay in place: to concatenate them would be to copy them.
"""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from slamb_jax._core.axes import varying_axes
from slamb_jax._core.leaves import Leaf
from slamb_jax._core.platform import hidden, materialized, opaque, slices
from slamb_jax.exchange.codecs import BlockCodec


class Pack(NamedTuple):
    """The leaves in one array, one after the other; a single leaf is as it is."""

    places: tuple[int, ...]
    leaves: tuple[Leaf, ...]
    block: int  # elements: each leaf is padded to a multiple of it

    @property
    def counts(self) -> list[int]:
        """The blocks of each leaf."""
        return [-(-leaf.size // self.block) for leaf in self.leaves]

    @property
    def leaf(self) -> Leaf:
        """The array, as a leaf."""
        first = self.leaves[0]
        if len(self.leaves) == 1:
            return first
        shape = (sum(self.counts) * self.block,)
        return Leaf(first.index, shape, alike=first.size)

    def join(self, arrays: Sequence[jax.Array]) -> jax.Array:
        """The array of these leaves, from those of all leaves."""
        if len(self.places) == 1:
            return arrays[self.places[0]]
        parts = []
        for i, leaf, count in zip(self.places, self.leaves, self.counts, strict=True):
            x = arrays[i].reshape(-1)
            parts.append(x)
            if rest := count * self.block - leaf.size:
                parts.append(jnp.zeros(rest, x.dtype))
        # Otherwise XLA looks for each element's part wherever it is read.
        return materialized(jnp.concatenate(parts))

    def split(
        self, arrays: Sequence[jax.Array], values: jax.Array | None
    ) -> tuple[list[list[jax.Array]], list[jax.Array]]:
        """Undoes :meth:`join` of several arrays, and :meth:`gather` of values."""
        if len(self.places) == 1:
            return [[x] for x in arrays], [] if values is None else [values]
        ends = np.cumsum(self.counts) * self.block
        starts = hidden([0, *ends[:-1]])
        shapes = [leaf.shape for leaf in self.leaves]
        # Opaque, or a CPU would compute the whole array again in each leaf's kernel.
        columns = [slices(x, starts, shapes) for x in opaque(list(arrays))]
        if values is None:
            return columns, []
        places = hidden(range(len(shapes)))
        return columns, slices(opaque(values), places, [()] * len(shapes))

    def gather(self, values: Sequence[jax.Array]) -> jax.Array:
        """The values of these leaves, from those of all leaves."""
        if len(self.places) == 1:
            return values[self.places[0]]
        return jnp.stack([values[i] for i in self.places])

    @property
    def sizes(self) -> jax.Array:
        """The elements of each leaf, float32."""
        if len(self.places) == 1:
            return jnp.float32(self.leaves[0].size)
        return jnp.array([leaf.size for leaf in self.leaves], jnp.float32)

    def sums(self, x: jax.Array) -> jax.Array:
        """The sum of each leaf, from the array."""
        if len(self.places) == 1:
            return jnp.sum(x)
        # By a table of places, since a GPU's scatter adds in any order. Behind the sums
        # of all blocks stands a 0, for leaves of fewer blocks than the largest.
        of_blocks = jnp.append(x.reshape(-1, self.block).sum(1), np.float32(0))
        width, start, rows = max(self.counts), 0, []
        for count in self.counts:
            rows.append([*range(start, start + count), *[-1] * (width - count)])
            start += count
        return of_blocks[np.array(rows, np.int32)].sum(1)

    def spread(self, values: jax.Array) -> jax.Array:
        """One value for each leaf, as one for each element of the array."""
        if len(self.places) == 1:
            return values
        of_blocks = values[np.repeat(np.arange(len(self.counts)), self.counts)]
        shape = (len(of_blocks), self.block)
        return jnp.broadcast_to(of_blocks[:, None], shape).reshape(-1)


def packs_by_type(
    leaves: Sequence[Leaf],
    columns: Sequence[Sequence[jax.Array]],
    rates: Sequence[ArrayLike],
    codec: BlockCodec,
) -> list[Pack]:
    """Packs of small leaves whose arrays in each column have the same type.

    Their decay rates are the same, too: a number, or the very same array.
    """
    kinds: dict[tuple[Hashable, ...], list[int]] = {}
    groups = [codec.group_of(leaf.size) for leaf in leaves]
    for i, (leaf, rate, group) in enumerate(zip(leaves, rates, groups, strict=True)):
        kind: tuple[Hashable, ...] = (i,)  # by itself
        # A sharded leaf has sums over its shards, which others of its array have not.
        if leaf.size and group.rows == 1 and not leaf.sharded:
            types = [(x[i].dtype.name, varying_axes(x[i])) for x in columns]
            # Two arrays may have the same value, but that is not known in a trace.
            of_rate = rate if isinstance(rate, int | float) else id(rate)
            kind = (group, of_rate, *types)
        kinds.setdefault(kind, []).append(i)
    # In reverse: so XLA keeps what was sent where momenta were, and a step of twelve
    # matrices on a GPU has a third of the temporary memory.
    return [
        Pack(tuple(places), tuple(leaves[i] for i in places), groups[places[0]].size)
        for places in reversed(kinds.values())
    ]


def alone(leaves: Sequence[Leaf]) -> list[Pack]:
    """Each leaf by itself."""
    return [Pack((i,), (leaf,), 1) for i, leaf in enumerate(leaves)]


def split(
    packs: Sequence[Pack],
    columns: Sequence[Sequence[jax.Array]],
    values: Sequence[jax.Array] | None,
) -> tuple[list[list[jax.Array]], list[jax.Array]]:
    """Columns of arrays, and of values, with one for each leaf, in their order."""
    out: list[dict[int, jax.Array]] = [{} for _ in columns]
    out_values: dict[int, jax.Array] = {}
    for i, pack in enumerate(packs):
        of_pack = None if values is None else values[i]
        arrays, each = pack.split([column[i] for column in columns], of_pack)
        for column, xs in zip(out, arrays, strict=True):
            column |= zip(pack.places, xs, strict=True)
        out_values |= zip(pack.places, each, strict=False)
    return [_in_order(x) for x in out], _in_order(out_values)


def _in_order(numbered: dict[int, jax.Array]) -> list[jax.Array]:
    """The arrays of leaves 0, 1, ... of a dict by their numbers."""
    return [numbered[i] for i in range(len(numbered))]
