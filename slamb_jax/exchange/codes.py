"""Quantizers: arrays as codes of few bits, with one scale for each block.

An array is cut into groups of shape (planes, rows, width). A block is row r of all
planes of a group. So no element changes its place within a tile of memory, whose rows a
GPU or TPU reads and writes whole, and the codes that share a byte come from different
planes.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from slamb_jax._core.platform import (
    block_sizes,
    materialized,
    reduce_blocks,
    split_digits,
)
from slamb_jax._core.rounding import hash_u32

# Of a row: the lanes of a TPU, and whole cache lines elsewhere, are read at once.
_WIDTH = 128
_ROWS = 8  # of a group of a large array
_LARGE, _SMALL = 2**16, 2**11  # elements of an array
_SCALE_BYTES = 4
_MANY_ROWS = 512  # of a slice: from so many on, filling groups costs under 1 %
_TINY = float(np.finfo(np.float32).tiny)
_ZERO, _NAN = np.float32(0), np.float32(np.nan)
Norm: TypeAlias = tuple[Callable[..., jax.Array], Callable[..., jax.Array]]
_SUM: Norm = (jnp.add, jnp.sum)  # of two arrays, and of an axis of one
_LARGEST: Norm = (jnp.maximum, jnp.max)
# The factor and the shift that divide a byte by each power of a base, in 16 bits.
_RECIPROCALS = {
    16: ((1, 0), (1, 4)),
    3: ((1, 0), (171, 9), (57, 9), (19, 9), (203, 14)),  # bytes below 243
}


class Group(NamedTuple):
    """The shape of a group, or of several groups."""

    groups: int
    planes: int
    rows: int
    width: int

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.groups * self.planes * self.rows * self.width

    @property
    def blocks(self) -> int:
        """The number of blocks, each with a scale."""
        return self.groups * self.rows


class Values(Protocol):
    """The values that codes stand for: what distinguishes one quantizer from another.

    Attributes:
      base: a digit is less than this.
      digits: how many digits share a byte.
      planes: how many elements, of as many planes, one digit stands for.
      block_size: about how many elements share a scale.
      norm: of the magnitudes of a block, what ``encode`` needs: their sum or largest.
    """

    @property
    def base(self) -> int: ...
    @property
    def digits(self) -> int: ...
    @property
    def planes(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def norm(self) -> Norm: ...

    def encode(
        self, planes: list[jax.Array], size: jax.Array, seed: jax.Array
    ) -> tuple[list[jax.Array], jax.Array]:
        """Float32 planes (..., groups, rows, width) to digits and scales.

        ``size`` is the norm of each block, (..., groups, rows, 1). The digits are uint8
        arrays of the shape of a plane, the scales float32 of that of ``size``. A block
        with a value that is not finite gets a scale of NaN.
        """

    def decode(self, digits: jax.Array, scales: jax.Array) -> jax.Array:
        """Digits (..., planes of digits, rows, width) to float32 (..., planes, ...)."""


@dataclasses.dataclass(frozen=True)
class Ternary:
    """Three values: the sign of each large coordinate times a scale, and zero.

    A coordinate is large if it is at least the mean magnitude of its block. The scale
    is the mean magnitude of the large ones. Li et al., Ternary Weight Networks, 2016.
    """

    base: int = 3
    digits: int = 5  # 3**5 is 243: five to a byte, 1.6 bits each
    planes: int = 1
    block_size: int = 640  # a scale adds 0.05 bits to each; smaller blocks cost more
    norm: Norm = _SUM

    def encode(
        self, planes: list[jax.Array], size: jax.Array, seed: jax.Array
    ) -> tuple[list[jax.Array], jax.Array]:
        del seed
        # Ternary Weight Networks have 0.7 of the mean for a bound, where nothing waits.
        mean, least = _least_sent(size, planes)
        sizes = [jnp.abs(x) for x in planes]
        # Ones and zeros: a GPU would keep comparisons in memory for all that use them.
        large = [jnp.sign(jnp.maximum(x - least, _ZERO)) for x in sizes]
        chosen = [is_large * x for is_large, x in zip(large, sizes, strict=True)]
        codes = [
            jnp.where(
                is_large > 0, jnp.where(x > 0, np.uint8(2), np.uint8(0)), np.uint8(1)
            )
            for is_large, x in zip(large, planes, strict=True)
        ]
        return codes, _scale_of(chosen, _total(large), mean)

    def decode(self, digits: jax.Array, scales: jax.Array) -> jax.Array:
        return (digits.astype(jnp.float32) - np.float32(1)) * scales


@dataclasses.dataclass(frozen=True)
class LargestOf:
    """The sign of the largest of ``planes`` coordinates times a scale; zero elsewhere.

    It is sent if it is at least the mean magnitude of the block. The scale is the mean
    magnitude of those that are sent. A digit of half a byte is enough for 7
    coordinates, one of a byte for 127.
    """

    planes: int
    norm: Norm = _SUM

    @property
    def base(self) -> int:
        return 16 if self.planes <= 7 else 256

    @property
    def digits(self) -> int:
        return 2 if self.planes <= 7 else 1

    @property
    def block_size(self) -> int:
        return _WIDTH * self.planes * self.digits

    def encode(
        self, planes: list[jax.Array], size: jax.Array, seed: jax.Array
    ) -> tuple[list[jax.Array], jax.Array]:
        del seed
        count = self.planes
        mean, least = _least_sent(size, planes)
        codes, chosen = [], []
        for i in range(0, len(planes), count):
            x = jnp.stack(planes[i : i + count], -3)
            top = jnp.max(jnp.abs(x), -3, keepdims=True)
            place = lax.broadcasted_iota(jnp.uint8, x.shape, x.ndim - 3)
            code = place + jnp.where(x > 0, np.uint8(1), np.uint8(1 + count))
            # The first of equals: a tie must not send two, nor depend on the platform.
            first = jnp.min(
                jnp.where(jnp.abs(x) == top, code, np.uint8(255)), -3, initial=255
            )
            top = top[..., 0, :, :]
            is_sent = (top >= least) & (top > _ZERO)
            codes.append(jnp.where(is_sent, first, np.uint8(0)))
            chosen.append(jnp.where(is_sent, top, _ZERO))
        return codes, _scale_of(chosen, _total([jnp.sign(x) for x in chosen]), mean)

    def decode(self, digits: jax.Array, scales: jax.Array) -> jax.Array:
        *lead, number, rows, width = digits.shape
        shape = (*lead, number, self.planes, rows, width)
        place = lax.broadcasted_iota(jnp.uint8, shape, len(shape) - 3)
        code = digits[..., None, :, :]
        up = (code == place + np.uint8(1)).astype(jnp.float32)
        down = (code == place + np.uint8(1 + self.planes)).astype(jnp.float32)
        return (up - down).reshape(*lead, number * self.planes, rows, width) * scales


@dataclasses.dataclass(frozen=True)
class Uniform:
    r"""8 or 4 bits by stochastic rounding to a uniform grid, as in QSGD.

    With L = 127 (7 for 4 bits) and s the largest magnitude of the block over L,
    :math:`x \to s \lfloor x / s + U \rfloor`, where U, uniform in [0, 1), is a hash of
    the seed and the element's place. So each element is right on average. (QSGD scales
    by the norm of the block; the largest magnitude gives a finer grid.) A block whose
    largest magnitude is below about 1e-36 is sent as zeros. Alistarh et al., QSGD,
    2016.
    """

    bits: int
    planes: int = 1
    block_size: int = 256
    norm: Norm = _LARGEST

    @property
    def base(self) -> int:
        return 2**self.bits

    @property
    def digits(self) -> int:
        return 8 // self.bits

    @property
    def _levels(self) -> int:
        return 2 ** (self.bits - 1) - 1

    def encode(
        self, planes: list[jax.Array], size: jax.Array, seed: jax.Array
    ) -> tuple[list[jax.Array], jax.Array]:
        levels = np.float32(self._levels)
        small = size < levels * np.float32(_TINY)
        usable = ~small & jnp.isfinite(size)  # the scale tells NaN and infinity
        codes = []
        for x, bits in zip(planes, _random_bits(planes, seed), strict=True):
            y = jnp.where(usable, x * (levels / size), _ZERO)
            low = jnp.floor(y)
            # 24 bits are what a float32 holds exactly: u is uniform, and below 1.
            u = bits >> np.uint32(8)
            up = u.astype(jnp.float32) * np.float32(2**-24) < y - low
            # x * (L / size) may be rounded to above L.
            code = jnp.clip(low + up.astype(jnp.float32), -levels, levels)
            codes.append((code + levels).astype(jnp.uint8))
        return codes, jnp.where(small, _ZERO, size / levels)

    def decode(self, digits: jax.Array, scales: jax.Array) -> jax.Array:
        return (digits.astype(jnp.float32) - np.float32(self._levels)) * scales


@dataclasses.dataclass(frozen=True)
class Quantizer:
    """Encodes groups as bytes: digits of the values, several to a byte, and scales."""

    values: Values

    def group_of(self, size: int) -> Group:
        """How an array of so many elements is cut: the shape of one group.

        Blocks of small arrays are small, so that little of them is padding.
        """
        per_byte = self.values.planes * self.values.digits
        planes = per_byte * max(1, self.values.block_size // (per_byte * _WIDTH))
        width = max(1, self.values.block_size // planes)
        if size >= _LARGE:
            return Group(1, planes, _ROWS, width)
        return Group(1, planes, 1, -(-width // (4 if size < _SMALL else 2)))

    def nbytes(self, shape: Group) -> int:
        """Bytes of groups of this shape, scales included."""
        per_byte = self.values.planes * self.values.digits
        return shape.size // per_byte + shape.blocks * _SCALE_BYTES

    def encode(
        self, x: jax.Array, seed: jax.Array, flat: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Float32 (..., groups, planes, rows, width) to digits and scales, in bytes.

        ``flat`` is the array that was padded to ``x``, if it was.
        """
        size = block_sizes(x, x if flat is None else flat, *self.values.norm)
        # A base of 256 has one digit to a byte, and is never multiplied by.
        base, count = np.uint8(self.values.base % 256), self.values.digits
        planes = [x[..., i, :, :] for i in range(x.shape[-3])]
        codes, scales = self.values.encode(planes, size, seed)
        # Digits of a byte come from different planes, so that packing is arithmetic
        # between whole arrays and no element moves.
        packed = []
        for i in range(0, len(codes), count):
            byte = codes[i + count - 1]
            for digit in reversed(codes[i : i + count - 1]):
                byte = base * byte + digit
            packed.append(byte)
        in_bytes = lax.bitcast_convert_type(scales, jnp.uint8)
        in_bytes = in_bytes.reshape(*x.shape[:-3], x.shape[-2], _SCALE_BYTES)
        # Otherwise XLA flattens what stands in front of it, too.
        out: tuple[jax.Array, jax.Array] = materialized(
            (jnp.stack(packed, -3), in_bytes)
        )
        return out

    def decode(self, packed: jax.Array, scales: jax.Array) -> jax.Array:
        """Undoes :meth:`encode`."""
        base, count = self.values.base, self.values.digits
        *lead, planes, rows, width = packed.shape
        digits = packed
        if count > 1:
            digits = split_digits(packed, base, count, _RECIPROCALS[base])
            digits = digits.reshape(*lead, planes * count, rows, width)
        # The scales came as bytes among bytes, without a cast that XLA could widen.
        floats = lax.bitcast_convert_type(scales[..., None, :, None, :], jnp.float32)
        return self.values.decode(digits, floats)

    def parted(self, codes: jax.Array, shape: Group) -> tuple[jax.Array, jax.Array]:
        """The digits and the scales of groups of this shape, from (..., nbytes)."""
        groups, planes, rows, width = shape
        lead, per_byte = codes.shape[:-1], self.values.planes * self.values.digits
        end = shape.size // per_byte
        packed = codes[..., :end].reshape(
            *lead, groups, planes // per_byte, rows, width
        )
        return packed, codes[..., end:].reshape(*lead, groups, rows, _SCALE_BYTES)


def quantizer_of(payload: str | None) -> Quantizer | None:
    """The quantizer of a payload by name; None for float32 and bfloat16."""
    if payload is None or payload == "bfloat16":
        return None
    if payload == "ternary":
        return Quantizer(Ternary())
    if payload in ("uniform8", "uniform4"):
        return Quantizer(Uniform(int(payload[-1])))
    return Quantizer(LargestOf(int(payload.removeprefix("largest_of_"))))


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


def cut_among(sizes: Sequence[int], quantizer: Quantizer, owners: int) -> list[Cut]:
    """Cuts arrays of these sizes into as many slices as there are owners.

    A long slice is of whole groups, a short one of some of their rows. No block is of
    two arrays, which may differ in scale.
    """
    kinds: dict[Group, list[int]] = {}
    for i, size in enumerate(sizes):
        if size:
            kinds.setdefault(quantizer.group_of(size), []).append(i)
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


def _least_sent(
    size: jax.Array, planes: Sequence[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Each block's mean magnitude, and the least magnitude that counts as large.

    The bound is slightly below the mean, whose sum may be rounded upwards: where all
    magnitudes are equal, all are large.
    """
    mean = size / np.float32(len(planes) * planes[0].shape[-1])
    return mean, np.float32(1 - 2**-16) * mean


def _scale_of(
    chosen: Sequence[jax.Array], count: jax.Array, mean: jax.Array
) -> jax.Array:
    """The mean of the chosen magnitudes of each block, which are zero elsewhere.

    It is 0 where none is chosen, and NaN where the ``mean`` of all is not finite.
    """
    scale = jnp.where(count > 0, _total(chosen) / jnp.maximum(count, 1), _ZERO)
    return jnp.where(jnp.isfinite(mean), scale, _NAN)


def _total(planes: Sequence[jax.Array]) -> jax.Array:
    return reduce_blocks(planes, *_SUM)


def _random_bits(planes: Sequence[jax.Array], seed: jax.Array) -> list[jax.Array]:
    """Random uint32 for each element, by a hash of its place among them all."""
    # Not from a key: a hash needs no state, is part of the kernel that rounds, and is
    # the same under every mapping.
    *lead, rows, width = planes[0].shape
    shape = (*lead, len(planes), rows, width)
    place = lax.iota(jnp.uint32, int(np.prod(shape))).reshape(shape)
    return [hash_u32(place[..., i, :, :], seed) for i in range(len(planes))]
