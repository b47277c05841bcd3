"""Arrays in codes, cut into the slices that the workers own.

No array is padded for the number of workers: an array ends within a slice. A slice is
cut between rows of groups, and never between planes, whose digits share bytes.
"""

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from slamb_jax._core.platform import materialized, sum_of_rows
from slamb_jax._core.rounding import hash_u32, hash_words
from slamb_jax.exchange.codecs import BlockCodec, Group

_MANY_ROWS = 512  # of a slice: from so many on, filling groups costs under 1 %


class Cut(NamedTuple):
    """How arrays are cut into groups, and the groups among the owners.

    Attributes:
      group: the shape of one group.
      slice: the shape of an owner's slice of all groups.
      members: the places of the arrays that are cut so.
    """

    group: Group
    slice: Group
    members: list[int]


def cut_among(
    sizes: Sequence[int],
    codec: BlockCodec,
    owners: int,
    alike: Sequence[int | None] | None = None,
) -> list[Cut]:
    """Cuts arrays of these sizes into as many slices as there are owners.

    A long slice is of whole groups, a short one of some of their rows. No block is of
    two arrays, which may differ in scale. ``alike`` has the sizes of arrays that have
    blocks of the same size; None for the array's own.
    """
    kinds: dict[Group, list[int]] = {}
    for i, (size, like) in enumerate(zip(sizes, alike or sizes, strict=True)):
        if size:
            kinds.setdefault(codec.group_of(like or size), []).append(i)
    cuts = []
    # Sorted, since all workers, and the count of the bytes, must cut alike.
    for group in sorted(kinds, reverse=True):
        groups = sum(-(-sizes[i] // group.size) for i in kinds[group])
        rows = -(-groups * group.rows // owners)
        own = group._replace(rows=rows)
        if rows >= _MANY_ROWS:
            own = group._replace(groups=-(-rows // group.rows))
        cuts.append(Cut(group, own, kinds[group]))
    return cuts


class Place(NamedTuple):
    """Which device of how many this is."""

    n: int  # workers
    width: int  # devices of a worker
    worker: jax.Array
    device: jax.Array  # of its worker


class Part:
    """Arrays that are cut alike, in codes: what of them travels, and what it means.

    Attributes:
      shapes: of the arrays.
      ends: where the groups of each array end, from 0.
      is_joined: whether all arrays are encoded together.
      codes: of each array, or of all together.
    """

    def __init__(
        self,
        cut: Cut,
        arrays: Sequence[jax.Array],
        codec: BlockCodec,
        place: Place,
        seed: jax.Array,
    ) -> None:
        self.cut, self.codec, self.place, self.seed = cut, codec, place, seed
        group, none = cut.group, jnp.int32(0)
        self.shapes = [x.shape for x in arrays]
        self.ends = [0, *np.cumsum([-(-x.size // group.size) for x in arrays])]
        # Groups of one row are of small arrays, which share an encoding. A large one is
        # encoded in its place, since to concatenate would be to copy it.
        self.is_joined = group.rows == 1
        if self.is_joined:
            flat = [jnp.pad(x.reshape(-1), (0, -x.size % group.size)) for x in arrays]
            groups = jnp.concatenate(flat).reshape(-1, *group[1:])
            self.codes = [codec.encode(groups, self._seed(none, 3))]
        else:
            self.codes = [
                codec.encode_array(x, group, self._seed(none, 3 + i))
                for i, x in enumerate(arrays)
            ]

    def _seed(self, device: jax.Array, stage: int) -> jax.Array:
        """The seed of the random bits of one device of this worker at one stage.

        Devices of a worker hold the same arrays, and must round them alike: what is
        encoded by all has the seed of device 0, an owner's mean that of its own.
        """
        # Every device of all workers has a number, and every stage of it a seed.
        number = self.place.worker * jnp.int32(self.place.width) + device
        of_device = hash_u32(number.astype(jnp.uint32), self.seed)
        return hash_u32(of_device, hash_words(stage))

    def slices(self) -> jax.Array:
        """The codes in slices for their owners: uint8 (devices, workers, bytes)."""
        digits, scales = map(jnp.concatenate, zip(*self.codes, strict=True))
        # Scales travel behind the digits, in bytes: one collective has one dtype, and
        # each collective has a latency of its own.
        columns = [self._to_slices(x) for x in (digits, scales[:, None])]
        lead = self.place.width, self.place.n
        return jnp.concatenate([x.reshape(*lead, -1) for x in columns], -1)

    def sent(self) -> list[jax.Array]:
        """The arrays as the other workers decode them."""
        return self._arrays([self.codec.decode(*code) for code in self.codes])

    def mean(self, received: jax.Array) -> jax.Array:
        """The mean of this device's slice from the codes of all, (workers, bytes)."""
        mean = sum_of_rows(self.decode_slice, received) / np.float32(self.place.n)
        if self.codec.has_zero:
            return mean
        return jnp.where(self._is_element(), mean, jnp.zeros_like(mean))

    def encode_slice(self, mean: jax.Array) -> jax.Array:
        """The code of a slice, uint8 (bytes,)."""
        code = self.codec.encode(mean, self._seed(self.place.device, 2))
        return jnp.concatenate([x.reshape(-1) for x in code])

    def decode_slice(self, code: jax.Array) -> jax.Array:
        """The slice of groups whose code this is, (bytes,)."""
        return self.codec.decode(*self.codec.split_bytes(code, self.cut.slice))

    def decode_slices(self, codes: jax.Array) -> list[jax.Array]:
        """The arrays of all slices, from codes (devices, workers, bytes)."""
        digits, scales = self.codec.split_bytes(codes, self.cut.slice)
        # Put in the order of the arrays while they are bytes: a GPU would split all
        # digits first, and keep them.
        columns = [self._from_slices(x) for x in (digits, scales[..., None, :, :])]
        pairs = zip(*materialized(columns), strict=True)
        return self._arrays([self.codec.decode(x, y[:, 0]) for x, y in pairs])

    def own_arrays(self, slices: jax.Array) -> list[jax.Array]:
        """The arrays of this worker's slices (devices, ...), and 0 elsewhere."""
        # As if every worker's slices were these, and then zeros for all others'.
        shape = (len(slices), self.place.n, *slices.shape[1:])
        is_own = lax.broadcasted_iota(jnp.int32, shape, 1) == self.place.worker
        x = jnp.broadcast_to(slices[:, None], shape)
        return self._arrays(self._from_slices(jnp.where(is_own, x, jnp.float32(0))))

    def _is_element(self) -> jax.Array:
        """Which elements of this device's slice are of arrays, and no padding."""
        group, own = self.cut.group, self.cut.slice
        # The elements of each group, and of one behind them all.
        pairs = zip(self.shapes, np.diff(self.ends).tolist(), strict=True)
        rest = [math.prod(x) - i * group.size for x, n in pairs for i in range(n)]
        counts = jnp.asarray(np.minimum([*rest, 0], group.size), jnp.int32)
        # The row of all groups, and from it the group and the place in it.
        number = self.place.device * jnp.int32(self.place.n) + self.place.worker
        of, plane, of_row, column = (
            lax.broadcasted_iota(jnp.int32, own, i) for i in range(4)
        )
        row = (number * own.groups + of) * own.rows + of_row
        count = counts[jnp.minimum(row // group.rows, len(counts) - 1)]
        place = (plane * group.rows + row % group.rows) * group.width + column
        return place < count

    def _to_slices(self, groups: jax.Array) -> jax.Array:
        """(groups, planes, rows, ...) to (devices, workers, groups, planes, ...)."""
        own, place = self.cut.slice, self.place
        # All rows of all groups, one after the other, with those that fill the slices.
        x = groups.swapaxes(0, 1)
        x = x.reshape(len(x), -1, x.shape[-1])
        rest = place.width * place.n * own.groups * own.rows - x.shape[1]
        x = jnp.pad(x, ((0, 0), (0, rest), (0, 0)))
        x = x.reshape(len(x), place.width, place.n, own.groups, own.rows, x.shape[-1])
        return jnp.moveaxis(x, 0, 3)

    def _from_slices(self, slices: jax.Array) -> list[jax.Array]:
        """Undoes :meth:`_to_slices`: the groups of what was encoded together."""
        # All rows again, without what filled the slices.
        x, rows = jnp.moveaxis(slices, 3, 0), self.cut.group.rows
        x = x.reshape(len(x), -1, x.shape[-1])[:, : self.ends[-1] * rows]
        x = x.reshape(len(x), -1, rows, x.shape[-1]).swapaxes(0, 1)
        return [x] if self.is_joined else self._split(x)

    def _split(self, groups: jax.Array) -> list[jax.Array]:
        """The groups of each array."""
        return [groups[a:b] for a, b in itertools.pairwise(self.ends)]

    def _arrays(self, groups: Sequence[jax.Array]) -> list[jax.Array]:
        """The arrays that were cut into these groups, without their padding."""
        if self.is_joined:
            groups = self._split(groups[0])
        pairs = zip(groups, self.shapes, strict=True)
        return [x.reshape(-1)[: math.prod(s)].reshape(s) for x, s in pairs]
