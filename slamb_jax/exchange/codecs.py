r"""Codecs of few bits: arrays as digits, several to a byte, and a scale for each block.

A payload of :class:`slamb_jax.Exchange` is the name of a codec:

* ``"ternary"``: :class:`Ternary`, -1, 0 or 1 times the scale, five digits to a byte;
* ``"sign"``: :class:`Sign`, -1 or 1 times the scale, eight to a byte;
* ``"largest_of_N"``: :class:`LargestOf`, which of N elements is sent, and its sign;
* ``"uniform8"`` and ``"uniform4"``: :class:`Uniform`, a grid of 255 or 15 values.

An array, in row-major order, is padded with zeros and cut into groups of shape (planes,
rows, width). A block is row r of all planes of a group. Each codec encodes an array in
three steps:

1. cut it into the planes of its groups;
2. quantize each block: its scale, and a digit for each element;
3. pack the digits of several planes in a byte. So packing is arithmetic between whole
   arrays, and no element moves.

A new codec says how a block is quantized and what its digits stand for
(:class:`BlockCodec`); how often a value is sent, and to whom, is not its business.
"""

import abc
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from slamb_jax._core import platform as _platform
from slamb_jax._core.rounding import hash_u32

_WIDTH = 128  # of a row: whole cache lines are read at once
_ROWS = 8  # of a group of a large array
_LARGE, _SMALL = 2**16, 2**11  # elements of an array
_SCALE_BYTES = 4
_MANY_ROWS = 512  # of a slice: from so many on, filling groups costs under 1 %
_ZERO, _NAN = np.float32(0), np.float32(np.nan)
_TINY = np.finfo(np.float32).tiny

#: Digits (..., groups, planes, rows, width) and scales (..., groups, 1, rows, 4).
#:
#: Both in bytes, uint8; the digits of several planes share one.
Code: TypeAlias = tuple[jax.Array, jax.Array]
#: Digits of each plane, uint8, and float32 scales (..., rows, 1).
Quantized: TypeAlias = tuple[list[jax.Array], jax.Array]
#: Uint32; None where nothing is drawn.
Seed: TypeAlias = jax.Array | None
#: Random uint32 for each element of the planes.
Draw: TypeAlias = Callable[[Sequence[jax.Array]], list[jax.Array]]


class Group(NamedTuple):
    """The shape of a group, or of several groups."""

    groups: int
    planes: int
    rows: int
    width: int

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self)

    @property
    def blocks(self) -> int:
        """The number of blocks, each with a scale."""
        return self.groups * self.rows


class BlockCodec(abc.ABC):
    """Encodes groups as bytes, and decodes them.

    Attributes:
      base: a digit is less than this.
      digits: how many digits share a byte.
      planes: how many elements, of as many planes, one digit stands for.
      block_size: about how many elements share a scale.
      has_zero: whether a zero, such as a block is filled up with, is sent as one.
      draws: whether it rounds at random, and so needs a seed.
    """

    base: int
    digits: int
    planes: int = 1
    block_size: int
    has_zero: bool = True
    draws: bool = False

    @abc.abstractmethod
    def quantize(self, planes: list[jax.Array], draw: Draw) -> Quantized:
        """Float32 planes (..., groups, rows, width) to digits and scales.

        A block with a value that is not finite gets a scale of NaN.
        """

    @abc.abstractmethod
    def dequantize(self, digits: jax.Array, scales: jax.Array) -> jax.Array:
        """Digits (..., planes of digits, rows, width) to float32 (..., planes, ...)."""

    def group_of(self, size: int) -> Group:
        """How an array of so many elements is cut: the shape of one group.

        Blocks of small arrays are small, so that little of them is padding.
        """
        per_byte = self.planes * self.digits
        planes = per_byte * max(1, self.block_size // (per_byte * _WIDTH))
        width = max(1, self.block_size // planes)
        if size >= _LARGE:
            return Group(1, planes, _ROWS, width)
        return Group(1, planes, 1, -(-width // (4 if size < _SMALL else 2)))

    def nbytes(self, shape: Group) -> int:
        """Bytes of groups of this shape, scales included."""
        per_byte = self.planes * self.digits
        return shape.size // per_byte + shape.blocks * _SCALE_BYTES

    def encode(self, groups: jax.Array, first: Any = 0, seed: Seed = None) -> Code:
        """The code of float32 groups, (..., groups, planes, rows, width).

        ``first`` is the number of the first of them, uint32 or an integer.
        """
        # 1. The planes. Nothing is copied: they are read where they stand.
        planes = [groups[..., i, :, :] for i in range(groups.shape[-3])]
        # 2. Digits and scales.
        draw = functools.partial(_random_bits, seed=seed, first=jnp.uint32(first))
        digits, scales = self.quantize(planes, draw)
        # 3. Bytes: the first plane's digit is the least. A base of 256 has one digit to
        # a byte, and is never multiplied by.
        base, packed = np.uint8(self.base % 256), []
        for i in range(0, len(digits), self.digits):
            *lower, byte = digits[i : i + self.digits]
            for digit in reversed(lower):
                byte = base * byte + digit
            packed.append(byte)
        in_bytes = lax.bitcast_convert_type(scales, jnp.uint8)
        shape = (*groups.shape[:-3], 1, groups.shape[-2], _SCALE_BYTES)
        # Kept: a CPU would compute the code again for each of the digits that a byte is
        # split into. And XLA would flatten what stands in front of it, too.
        code = jnp.stack(packed, -3), in_bytes.reshape(shape)
        out: Code = _platform.opaque(_platform.materialized(code))
        return out

    def decode(self, packed: jax.Array, scales: jax.Array) -> jax.Array:
        """Undoes :meth:`encode`."""
        *lead, planes, rows, width = packed.shape
        digits = packed
        if self.digits > 1:
            digits = _platform.split_digits(packed, self.base, self.digits)
            digits = digits.reshape(*lead, planes * self.digits, rows, width)
        # The scales came as bytes among bytes, without a cast that XLA could widen.
        floats = lax.bitcast_convert_type(scales[..., None, :], jnp.float32)
        return self.dequantize(digits, floats)

    def split_bytes(self, in_bytes: jax.Array, shape: Group) -> Code:
        """The code of groups of this shape, from (..., nbytes)."""
        groups, planes, rows, width = shape
        lead, per_byte = in_bytes.shape[:-1], self.planes * self.digits
        digits, scales = jnp.split(in_bytes, [shape.size // per_byte], -1)
        digits = digits.reshape(*lead, groups, planes // per_byte, rows, width)
        return digits, scales.reshape(*lead, groups, 1, rows, _SCALE_BYTES)


class Ternary(BlockCodec):
    """Three values: the sign of each large coordinate times a scale, and zero.

    A coordinate is large if it is at least the mean magnitude of its block. The scale
    is the mean magnitude of the large ones. Li et al., Ternary Weight Networks, 2016.
    """

    base = 3
    digits = 5  # 3**5 is 243: five to a byte, 1.6 bits each
    block_size = 640  # a scale adds 0.05 bits to each; smaller blocks cost more

    def quantize(self, planes: list[jax.Array], draw: Draw) -> Quantized:
        del draw
        sizes = [jnp.abs(x) for x in planes]
        # Ternary Weight Networks have 0.7 of the mean for a bound, without a residual.
        mean, least = _mean_and_least(sizes)
        # Ones and zeros: a GPU would keep comparisons in memory for all that use them.
        large = [jnp.sign(jnp.maximum(x - least, _ZERO)) for x in sizes]
        sent = [is_large * x for is_large, x in zip(large, sizes, strict=True)]
        digits = []
        for is_large, x in zip(large, planes, strict=True):
            signed = jnp.where(x > 0, np.uint8(2), np.uint8(0))
            digits.append(jnp.where(is_large > 0, signed, np.uint8(1)))
        return digits, _scale(sent, large, mean)

    def dequantize(self, digits: jax.Array, scales: jax.Array) -> jax.Array:
        return (digits.astype(jnp.float32) - np.float32(1)) * scales


class Sign(BlockCodec):
    """One bit: the sign times the mean magnitude of the block's elements but zeros.

    A zero has the sign of a positive number. Karimireddy et al., EF-signSGD, 2019.
    """

    base = 2
    digits = 8
    block_size = 1024
    has_zero = False

    def quantize(self, planes: list[jax.Array], draw: Draw) -> Quantized:
        del draw
        # What a block is filled up with is zero, and does not count.
        count = _block_sum([jnp.abs(jnp.sign(x)) for x in planes])
        total = _block_sum([jnp.abs(x) for x in planes])
        scale = total / jnp.maximum(count, np.float32(1))
        digits = [jnp.where(x >= 0, np.uint8(1), np.uint8(0)) for x in planes]
        return digits, jnp.where(jnp.isfinite(scale), scale, _NAN)

    def dequantize(self, digits: jax.Array, scales: jax.Array) -> jax.Array:
        signs = np.float32(2) * digits.astype(jnp.float32) - np.float32(1)
        return signs * scales


class LargestOf(BlockCodec):
    """The sign of the largest of ``planes`` coordinates times a scale; zero elsewhere.

    It is sent if it is at least the mean magnitude of the block. The scale is the mean
    magnitude of those that are sent. A digit of half a byte is enough for 7
    coordinates, one of a byte for 127.
    """

    def __init__(self, planes: int) -> None:
        self.planes = planes
        self.base, self.digits = (16, 2) if planes <= 7 else (256, 1)
        self.block_size = _WIDTH * planes * self.digits

    def quantize(self, planes: list[jax.Array], draw: Draw) -> Quantized:
        del draw
        count = self.planes
        mean, least = _mean_and_least([jnp.abs(x) for x in planes])
        digits, sent = [], []
        for i in range(0, len(planes), count):
            x = jnp.stack(planes[i : i + count], -3)
            top = jnp.max(jnp.abs(x), -3, keepdims=True)
            place = lax.broadcasted_iota(jnp.uint8, x.shape, x.ndim - 3)
            digit = place + jnp.where(x > 0, np.uint8(1), np.uint8(1 + count))
            # The first of equals: a tie must not send two, nor depend on the platform.
            first = jnp.min(
                jnp.where(jnp.abs(x) == top, digit, np.uint8(255)), -3, initial=255
            )
            top = top[..., 0, :, :]
            is_sent = (top >= least) & (top > _ZERO)
            digits.append(jnp.where(is_sent, first, np.uint8(0)))
            sent.append(jnp.where(is_sent, top, _ZERO))
        return digits, _scale(sent, [jnp.sign(x) for x in sent], mean)

    def dequantize(self, digits: jax.Array, scales: jax.Array) -> jax.Array:
        *lead, number, rows, width = digits.shape
        shape = (*lead, number, self.planes, rows, width)
        place = lax.broadcasted_iota(jnp.uint8, shape, len(shape) - 3)
        digit = digits[..., None, :, :]
        up = (digit == place + np.uint8(1)).astype(jnp.float32)
        down = (digit == place + np.uint8(1 + self.planes)).astype(jnp.float32)
        return (up - down).reshape(*lead, number * self.planes, rows, width) * scales


class Uniform(BlockCodec):
    r"""8 or 4 bits by stochastic rounding to a uniform grid, as in QSGD.

    With L = 127 (7 for 4 bits) and s the largest magnitude of the block over L,
    :math:`x \to s \lfloor x / s + U \rfloor`, where U, uniform in [0, 1), is a hash of
    the seed and the element's place. So each element is right on average. (QSGD scales
    by the norm of the block; the largest magnitude gives a finer grid.) A block whose
    largest magnitude is below about 1e-36 is sent as zeros. Alistarh et al., QSGD,
    2016.
    """

    block_size = 256
    draws = True

    def __init__(self, bits: int) -> None:
        self.base, self.digits = 2**bits, 8 // bits
        self.levels = np.float32(2 ** (bits - 1) - 1)

    def quantize(self, planes: list[jax.Array], draw: Draw) -> Quantized:
        levels = self.levels
        # As integers magnitudes have the same order, and NaN is the largest: in floats
        # XLA's maximum loses it on a CPU, from 32 rows on.
        sizes = [lax.bitcast_convert_type(jnp.abs(x), jnp.int32) for x in planes]
        most = jnp.max(functools.reduce(jnp.maximum, sizes), -1, keepdims=True)
        size = lax.bitcast_convert_type(most, jnp.float32)
        is_small = size < levels * _TINY
        usable = ~is_small & jnp.isfinite(size)  # the scale tells NaN and infinity
        digits = []
        for x, bits in zip(planes, draw(planes), strict=True):
            y = jnp.where(usable, x * (levels / size), _ZERO)
            low = jnp.floor(y)
            # In [0, 1), of the 24 bits that a float32 holds exactly.
            uniform = (bits >> np.uint32(8)).astype(jnp.float32) * np.float32(2**-24)
            up = (uniform < y - low).astype(jnp.float32)
            # x * (L / size) may be rounded to above L.
            digit = jnp.clip(low + up, -levels, levels) + levels
            digits.append(digit.astype(jnp.uint8))
        return digits, jnp.where(is_small, _ZERO, size / levels)

    def dequantize(self, digits: jax.Array, scales: jax.Array) -> jax.Array:
        return (digits.astype(jnp.float32) - self.levels) * scales


#: The codecs by the payloads that name them; a dtype, or None for one, has none.
CODECS: dict[str | None, BlockCodec] = {
    "uniform8": Uniform(8),
    "uniform4": Uniform(4),
    "ternary": Ternary(),
    "sign": Sign(),
    **{f"largest_of_{count}": LargestOf(count) for count in range(2, 128)},
}


def is_summed(wire: str) -> bool:
    """Whether an all-reduce sums the numbers on the way: a payload's, or a dtype's.

    Codes have no sum, and one in 16 bits would lose what is small.
    """
    return wire not in CODECS and jnp.dtype(wire).itemsize != 2


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
    alike: Sequence[int] | None = None,
) -> list[Cut]:
    """Cuts arrays of these sizes into as many slices as there are owners.

    A long slice is of whole groups, a short one of some of their rows. No block is of
    two arrays, which may differ in scale. ``alike`` has the sizes of arrays that have
    blocks of the same size; None for the arrays' own.
    """
    kinds: dict[Group, list[int]] = {}
    for i, (size, like) in enumerate(zip(sizes, alike or sizes, strict=True)):
        if size:
            kinds.setdefault(codec.group_of(like), []).append(i)
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


def _mean_and_least(sizes: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Each block's mean magnitude, and the least magnitude that counts as large.

    The bound is slightly below the mean, whose sum may be rounded upwards: where all
    magnitudes are equal, all are large.
    """
    mean = _block_sum(sizes) / np.float32(len(sizes) * sizes[0].shape[-1])
    return mean, np.float32(1 - 2**-16) * mean


def _scale(
    sent: Sequence[jax.Array], is_sent: Sequence[jax.Array], mean: jax.Array
) -> jax.Array:
    """The mean magnitude of each block's elements that are sent; the others are zeros.

    It is 0 where none is sent, and NaN where the ``mean`` of all is not finite.
    """
    total, count = _block_sum(sent), _block_sum(is_sent)
    scale = jnp.where(count > 0, total / jnp.maximum(count, 1), _ZERO)
    return jnp.where(jnp.isfinite(mean), scale, _NAN)


def _random_bits(
    planes: Sequence[jax.Array], seed: Seed, first: jax.Array
) -> list[jax.Array]:
    """Random uint32 for each element, by a hash of its place among those of all groups.

    ``first`` is the number of the first group, uint32.
    """
    assert seed is not None
    # Not from a key: a hash needs no state, is part of the kernel that rounds, and is
    # the same under every mapping.
    *lead, rows, width = planes[0].shape
    shape = (*lead, len(planes), rows, width)
    place = lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
    before = first * np.uint32(math.prod(shape[-3:]))
    return [hash_u32(place[..., i, :, :] + before, seed) for i in range(len(planes))]


def _block_sum(planes: Sequence[jax.Array]) -> jax.Array:
    """The sum of each block, over all of its planes."""
    return jnp.sum(functools.reduce(jnp.add, planes), -1, keepdims=True)
