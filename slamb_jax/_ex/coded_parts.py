"""Arrays cut so that each worker owns a slice of their codes."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from slamb_jax import _collectives as collectives
from slamb_jax._axes import AxisName
from slamb_jax._ex.flat import flat_size, flatten, unflatten
from slamb_jax._ex.payloads import Quantizer
from slamb_jax._ex.payloads.codes import BlockQuantizer, Shape
from slamb_jax._ex.slices import own_slice, slices_of
from slamb_jax._rounding import hash_u32, hash_words


@dataclasses.dataclass(frozen=True)
class Place:
    """Which device of how many this is."""

    n: int  # workers
    width: int  # devices of each, the group
    group: AxisName | None
    me: jax.Array  # this worker's number
    device: jax.Array  # this device's, in its group
    seed: jax.Array  # of the step

    def seed_of(self, device: jax.Array, stage: int) -> jax.Array:
        """That of the random bits of one device of this worker, at one stage."""
        number = self.me * jnp.int32(self.width) + device
        return hash_u32(
            hash_u32(number.astype(jnp.uint32), self.seed), hash_words(stage)
        )

    def of_part(self, number: int) -> "Place":
        """With random bits of its own for each of several parts."""
        seed = hash_u32(self.seed, hash_words(number))
        return dataclasses.replace(self, seed=seed)

    def only_mine(self, mine: jax.Array, others: jax.Array) -> jax.Array:
        """``mine`` where this worker is the owner, in (width, n, ...)."""
        numbers = jnp.arange(self.n, dtype=jnp.int32)
        is_me = (numbers == self.me).reshape(1, -1, *(1,) * (mine.ndim - 2))
        return jnp.where(is_me, mine, others)


class Part(Protocol):
    """Arrays whose codes are cut into slices, of which each device owns one.

    Attributes:
      codes: this worker's, uint8 (devices of a worker, workers, bytes).
    """

    codes: jax.Array

    def sent(self) -> list[jax.Array]:
        """The arrays as the others decode them."""

    def mean(self, rows: jax.Array) -> jax.Array:
        """The mean of the workers' codes of this device's slice, (workers, bytes)."""

    def encode_mean(self, mean: jax.Array) -> jax.Array:
        """The codes of a mean, uint8 (bytes,)."""

    def decode_mean(self, codes: jax.Array) -> jax.Array:
        """Undoes :meth:`encode_mean`."""

    def decode_means(self, codes: jax.Array) -> list[jax.Array]:
        """The arrays of all slices' means, in codes (devices, workers, bytes)."""

    def put(self, means: jax.Array) -> list[jax.Array]:
        """The arrays that are the slice of this worker's devices, and 0 elsewhere."""


class Slices:
    """Arrays as one, cut into slices that a quantizer of the user's own encodes."""

    def __init__(
        self, arrays: Sequence[jax.Array], quantizer: Quantizer, at: Place, exact: bool
    ) -> None:
        """``exact``: what a worker owns it does not round on the way to itself."""
        self._arrays, self._at, self._exact = arrays, at, exact
        self._quantizer = quantizer
        slices = slices_of(collectives.ravel(arrays), at.width * at.n)
        self._slices = slices.reshape(at.width, at.n, -1)
        self._size = slices.shape[1]

        def encode(x: jax.Array, device: jax.Array) -> jax.Array:
            return quantizer.encode(x, at.seed_of(device, 0))

        devices = jnp.arange(at.width, dtype=jnp.int32)
        self.codes = jax.vmap(encode)(self._slices, devices)

    def sent(self) -> list[jax.Array]:
        decoded = self._quantizer.decode(self.codes, self._size)
        return self._apart(self._at.only_mine(self._slices, decoded))

    def mean(self, rows: jax.Array) -> jax.Array:
        at = self._at

        def decoded(codes: jax.Array, number: jax.Array) -> jax.Array:
            x = self._quantizer.decode(codes, self._size)
            if not self._exact:
                return x
            own = lax.dynamic_index_in_dim(mine, at.me, keepdims=False)
            return jnp.where(number == at.me, own, x)

        mine = own_slice(self._slices, at.group)[0]
        return _mean_of_rows(decoded, rows)

    def encode_mean(self, mean: jax.Array) -> jax.Array:
        seed = self._at.seed_of(self._at.device, 1)
        return self._quantizer.encode(mean, seed)

    def decode_mean(self, codes: jax.Array) -> jax.Array:
        return self._quantizer.decode(codes, self._size)

    def decode_means(self, codes: jax.Array) -> list[jax.Array]:
        return self._apart(self.decode_mean(codes))

    def put(self, means: jax.Array) -> list[jax.Array]:
        x = means[:, None]
        return self._apart(self._at.only_mine(x, jnp.zeros_like(x)))

    def _apart(self, slices: jax.Array) -> list[jax.Array]:
        size = sum(x.size for x in self._arrays)
        return collectives.unravel(slices.reshape(-1)[:size], self._arrays)


class Groups:
    """Arrays of one kind, encoded by groups, and the codes of all cut into slices.

    No block is of two arrays, which may differ in scale. A large array is encoded in
    its place, small ones together. None is padded for the number of workers, and what
    an owner does with its slice, it does once.
    """

    def __init__(
        self,
        arrays: Sequence[jax.Array],
        quantizer: BlockQuantizer,
        at: Place,
        cut: Shape,
        each: Shape,
    ) -> None:
        """``cut`` is the shape of a group, ``each`` that of a slice; both as cut_of."""
        self._arrays, self._at = arrays, at
        self._quantizer = quantizer
        self._group, self._slice = cut, each
        counts = [-(-flat_size(x.shape) // cut.size) for x in arrays]
        self._ends = [0, *np.cumsum(counts)]
        self._together = cut.rows == 1
        groups = [
            flatten(x, count * cut.size).reshape(cut._replace(groups=count))
            for x, count in zip(arrays, counts, strict=True)
        ]
        if self._together:
            groups = [jnp.concatenate(groups)]
        self._coded = [
            quantizer.encode_groups(x, at.seed_of(jnp.int32(0), 3 + i))
            for i, x in enumerate(groups)
        ]
        packed, scales = map(jnp.concatenate, zip(*self._coded, strict=True))
        slices = [self._cut(packed), self._cut(scales[:, None])]
        self.codes = jnp.concatenate(
            [x.reshape(at.width, at.n, -1) for x in slices], -1
        )

    def sent(self) -> list[jax.Array]:
        return self._apart([self._quantizer.decode_groups(*x) for x in self._coded])

    def mean(self, rows: jax.Array) -> jax.Array:
        def decoded(codes: jax.Array, number: jax.Array) -> jax.Array:
            del number
            return self._quantizer.decode_groups(
                *self._quantizer.parted(codes, self._slice)
            )

        return _mean_of_rows(decoded, rows)

    def encode_mean(self, mean: jax.Array) -> jax.Array:
        seed = self._at.seed_of(self._at.device, 2)
        parts = self._quantizer.encode_groups(mean, seed)
        return jnp.concatenate([x.reshape(-1) for x in parts])

    def decode_mean(self, codes: jax.Array) -> jax.Array:
        return self._quantizer.decode_groups(
            *self._quantizer.parted(codes, self._slice)
        )

    def decode_means(self, codes: jax.Array) -> list[jax.Array]:
        packed, scales = self._quantizer.parted(codes, self._slice)
        columns = self._joined(packed), self._joined(scales[..., None, :, :])
        pairs = zip(*columns, strict=True)
        return self._apart(
            [self._quantizer.decode_groups(x, y[:, 0]) for x, y in pairs]
        )

    def put(self, means: jax.Array) -> list[jax.Array]:
        x = means[:, None]
        return self._apart(self._joined(self._at.only_mine(x, jnp.zeros_like(x))))

    def _cut(self, groups: jax.Array) -> jax.Array:
        """(groups, planes, rows, ...) as slices (devices, workers, groups, ...)."""
        at, each = self._at, self._slice
        x = groups.swapaxes(0, 1)
        x = x.reshape(len(x), -1, x.shape[-1])
        rest = at.width * at.n * each.groups * each.rows - x.shape[1]
        x = jnp.pad(x, ((0, 0), (0, rest), (0, 0)))
        x = x.reshape(len(x), at.width, at.n, each.groups, each.rows, x.shape[-1])
        return jnp.moveaxis(x, 0, 3)

    def _joined(self, slices: jax.Array) -> list[jax.Array]:
        """Undoes :meth:`_cut`: the groups that were encoded together."""
        x, rows = jnp.moveaxis(slices, 3, 0), self._group.rows
        x = x.reshape(len(x), -1, x.shape[-1])[:, : self._ends[-1] * rows]
        x = x.reshape(len(x), -1, rows, x.shape[-1]).swapaxes(0, 1)
        return [x] if self._together else self._of_arrays(x)

    def _of_arrays(self, groups: jax.Array) -> list[jax.Array]:
        return [groups[a:b] for a, b in itertools.pairwise(self._ends)]

    def _apart(self, groups: Sequence[jax.Array]) -> list[jax.Array]:
        if self._together:
            groups = self._of_arrays(groups[0])
        pairs = zip(groups, self._arrays, strict=True)
        return [unflatten(x.reshape(-1), y.shape) for x, y in pairs]


def _mean_of_rows(
    decoded: Callable[[jax.Array, jax.Array], jax.Array], codes: jax.Array
) -> jax.Array:
    """The mean of the workers' rows, each ``decoded`` with its number.

    On a CPU in a loop: to decode all rows and sum columns takes it six times as long.
    """
    n = len(codes)

    def in_a_loop(codes: jax.Array) -> jax.Array:
        def row(i: jax.Array) -> jax.Array:
            return decoded(lax.dynamic_index_in_dim(codes, i, keepdims=False), i)

        return lax.fori_loop(1, n, lambda i, total: total + row(i), row(jnp.int32(0)))

    def at_once(codes: jax.Array) -> jax.Array:
        numbers = jnp.arange(n, dtype=jnp.int32)
        return jnp.sum(jax.vmap(decoded)(codes, numbers), 0)

    total = lax.platform_dependent(codes, cpu=in_a_loop, default=at_once)
    return total / np.float32(n)
