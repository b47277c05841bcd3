"""Arrays in codes, cut into the slices that the workers own."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from slamb_jax._core.platform import materialized, sum_of_rows
from slamb_jax._core.platform_tiles import flat_size, flatten, unflatten
from slamb_jax._core.rounding import hash_u32, hash_words
from slamb_jax.exchange.codes import Cut, Group, Quantizer


class Place(NamedTuple):
    """Which device of how many this is."""

    n: int  # workers
    width: int  # devices of a worker
    worker: jax.Array
    device: jax.Array  # of its worker

    def seed(self, seed: jax.Array, device: jax.Array, stage: int) -> jax.Array:
        """The seed of the random bits of one device of this worker at one stage.

        Devices of a worker hold the same arrays, and must round them alike: what is
        encoded by all has the seed of device 0, an owner's mean that of its own.
        """
        number = self.worker * jnp.int32(self.width) + device
        return hash_u32(hash_u32(number.astype(jnp.uint32), seed), hash_words(stage))


class Encoded(NamedTuple):
    """Arrays whose groups have the same shape, their codes and their slices."""

    cut: Cut
    quantizer: Quantizer
    place: Place
    seed: jax.Array
    shapes: list[tuple[int, ...]]  # of the arrays
    ends: list[int]  # where the groups of each array end, from 0
    coded: list[tuple[jax.Array, jax.Array]]  # digits and scales, for the worker itself
    codes: jax.Array  # uint8 (devices of a worker, workers, bytes)

    @property
    def is_batched(self) -> bool:
        """Whether all arrays are encoded at once.

        Groups of one row are of small arrays, which share an encoding. A large one is
        encoded in its place, since to concatenate would be to copy it.
        """
        return self.cut.group.rows == 1

    def sent(self) -> list[jax.Array]:
        """The arrays as the other workers decode them."""
        return self._decoded(self.coded)

    def decode_slice(self, codes: jax.Array) -> jax.Array:
        """The slice of groups whose codes these are, (bytes,)."""
        return self.quantizer.decode(*self.quantizer.parted(codes, self.cut.slice))

    def mean(self, codes: jax.Array) -> jax.Array:
        """The mean of this device's slice from the codes of all, (workers, bytes)."""
        mean = sum_of_rows(self.decode_slice, codes) / np.float32(self.place.n)
        if self.quantizer.has_zero:
            return mean
        return jnp.where(self._filled(), mean, jnp.zeros_like(mean))

    def _filled(self) -> jax.Array:
        """Which elements of this device's slice are of arrays, and no padding."""
        group, own = self.cut.group, self.cut.slice
        arrays = list(zip(self.shapes, np.diff(self.ends).tolist(), strict=True))

        def counts(size_of: Callable[[tuple[int, ...]], int]) -> jax.Array:
            """Elements of each group, and of one behind them all."""
            rest = [size_of(x) - i * group.size for x, n in arrays for i in range(n)]
            return jnp.asarray(np.minimum([*rest, 0], group.size), jnp.int32)

        # On a TPU the rows that fill up a tile stand among the others, and count.
        table = lax.platform_dependent(
            tpu=lambda: counts(flat_size), default=lambda: counts(math.prod)
        )
        number = self.place.device * jnp.int32(self.place.n) + self.place.worker
        of, plane, of_row, column = (
            lax.broadcasted_iota(jnp.int32, own, i) for i in range(4)
        )
        row = (number * own.groups + of) * own.rows + of_row
        count = table[jnp.minimum(row // group.rows, len(table) - 1)]
        place = (plane * group.rows + row % group.rows) * group.width + column
        return place < count

    def encode_mean(self, mean: jax.Array) -> jax.Array:
        """The codes of a slice, uint8 (bytes,)."""
        seed = self.place.seed(self.seed, self.place.device, 2)
        parts = self.quantizer.encode(mean, seed)
        return jnp.concatenate([x.reshape(-1) for x in parts])

    def decode_means(self, codes: jax.Array) -> list[jax.Array]:
        """The arrays of all slices, from codes (devices, workers, bytes)."""
        digits, scales = self.quantizer.parted(codes, self.cut.slice)
        # Put in the order of the arrays while they are bytes: a GPU would split all
        # digits first, and keep them.
        columns = materialized(
            (self._joined(digits), self._joined(scales[..., None, :, :]))
        )
        pairs = zip(*columns, strict=True)
        return self._decoded([(x, y[:, 0]) for x, y in pairs])

    def mine(self, slices: jax.Array) -> list[jax.Array]:
        """The arrays of this worker's slices (devices, ...), and 0 elsewhere."""
        x = slices[:, None]
        is_me = jnp.arange(self.place.n, dtype=jnp.int32) == self.place.worker
        is_me = is_me.reshape(1, -1, *(1,) * (x.ndim - 2))
        return self._as_arrays(self._joined(jnp.where(is_me, x, jnp.zeros_like(x))))

    def _joined(self, slices: jax.Array) -> list[jax.Array]:
        """Undoes :func:`_cut_up`: the groups of what was encoded together."""
        x, rows = jnp.moveaxis(slices, 3, 0), self.cut.group.rows
        x = x.reshape(len(x), -1, x.shape[-1])[:, : self.ends[-1] * rows]
        x = x.reshape(len(x), -1, rows, x.shape[-1]).swapaxes(0, 1)
        return [x] if self.is_batched else self._of_each(x)

    def _of_each(self, groups: jax.Array) -> list[jax.Array]:
        return [groups[a:b] for a, b in itertools.pairwise(self.ends)]

    def _decoded(self, coded: Sequence[tuple[jax.Array, jax.Array]]) -> list[jax.Array]:
        return self._as_arrays([self.quantizer.decode(*x, whole=True) for x in coded])

    def _as_arrays(self, groups: Sequence[jax.Array]) -> list[jax.Array]:
        if self.is_batched:
            groups = self._of_each(groups[0])
        pairs = zip(groups, self.shapes, strict=True)
        return [unflatten(x.reshape(-1), shape) for x, shape in pairs]


def encode(
    cut: Cut,
    arrays: list[jax.Array],
    quantizer: Quantizer,
    place: Place,
    seed: jax.Array,
) -> Encoded:
    """The codes of arrays that are cut alike, and the slices of their owners.

    No array is padded for the number of workers: an array ends within a slice.
    """
    group = cut.group
    counts = [-(-flat_size(x.shape) // group.size) for x in arrays]

    def seed_of(i: int) -> jax.Array:
        return place.seed(seed, jnp.int32(0), 3 + i)

    if group.rows == 1:  # see is_batched
        groups = [
            flatten(x, count * group.size).reshape(group._replace(groups=count))
            for x, count in zip(arrays, counts, strict=True)
        ]
        coded = [quantizer.encode(jnp.concatenate(groups), seed_of(0))]
    else:
        coded = [
            quantizer.encode_array(x, group, seed_of(i)) for i, x in enumerate(arrays)
        ]
    digits, scales = map(jnp.concatenate, zip(*coded, strict=True))
    # Scales travel behind the digits, in bytes: one collective has one dtype, and each
    # collective has a latency of its own.
    slices = [_cut_up(x, cut.slice, place) for x in (digits, scales[:, None])]
    codes = jnp.concatenate([x.reshape(place.width, place.n, -1) for x in slices], -1)
    shapes, ends = [x.shape for x in arrays], [0, *np.cumsum(counts)]
    return Encoded(cut, quantizer, place, seed, shapes, ends, coded, codes)


def _cut_up(groups: jax.Array, own: Group, place: Place) -> jax.Array:
    """(groups, planes, rows, ...) as slices (devices, workers, groups, ...).

    Cut between rows, which a tile of a chip's memory keeps together, and never between
    the planes, whose digits share bytes.
    """
    x = groups.swapaxes(0, 1)
    x = x.reshape(len(x), -1, x.shape[-1])
    rest = place.width * place.n * own.groups * own.rows - x.shape[1]
    x = jnp.pad(x, ((0, 0), (0, rest), (0, 0)))
    x = x.reshape(len(x), place.width, place.n, own.groups, own.rows, x.shape[-1])
    return jnp.moveaxis(x, 0, 3)
