"""What the quantizers share: how arrays are cut, random bits, several codes to a byte.

An array is cut so that no element changes its place within a tile of memory: a chip
reads and writes tiles of 8 rows of 128 (a TPU's), and neighbours in a byte come from
different tiles.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from slamb_jax._checks import check_bool, check_integer
from slamb_jax._rounding import hash_u32

_WIDTH = 128  # of a row
_ROWS = 8  # of a group of planes
_LARGE, _SMALL = 2**16, 2**11  # elements
_FEW, _MANY = 64, 512  # blocks: with many what is padded does not count
_DIGITS = {8: (256, 1), 4: (16, 2), 2: (3, 5)}  # of bits: base, and digits to a byte
# A byte over a power of the base, rounded down: a factor and a shift in 16 bits.
_OVER = {
    16: ((1, 0), (1, 4)),
    3: ((1, 0), (171, 9), (57, 9), (19, 9), (203, 14)),  # bytes below 243
}


class Shape(NamedTuple):
    """How an array is cut, with padding: a block is row r of all planes of a group."""

    groups: int
    planes: int
    rows: int
    width: int

    @property
    def size(self) -> int:
        return self.groups * self.planes * self.rows * self.width

    @property
    def blocks(self) -> int:
        return self.groups * self.rows


def shape_of(size: int, block_size: int, codes_per_byte: int) -> Shape:
    """Blocks of about ``block_size``; of a small array, as alike as they can be.

    With few blocks each is of neighbours: they may come from many small leaves.
    """
    planes, width = _block(block_size, codes_per_byte)
    blocks = max(1, -(-size // (planes * width)))
    rows = 1 if blocks < _FEW else _ROWS
    if _FEW <= blocks < _MANY:
        rows = min(range(_ROWS, 2 * _ROWS + 1), key=lambda rows: -blocks % rows)
    groups = -(-blocks // rows)
    if blocks < _MANY:
        width = max(1, -(-size // (groups * planes * rows)))
    return Shape(groups, planes, rows, width)


def _block(block_size: int, codes_per_byte: int) -> tuple[int, int]:
    """The planes of a block, and its elements in each."""
    planes = codes_per_byte * max(1, block_size // (codes_per_byte * _WIDTH))
    return planes, max(1, block_size // planes)


def random_bits(planes: Sequence[jax.Array], seed: jax.Array) -> list[jax.Array]:
    """Random uint32 for each element, by a hash of its place among them all."""
    *lead, rows, width = planes[0].shape
    shape = (*lead, len(planes), rows, width)
    place = lax.iota(jnp.uint32, int(np.prod(shape))).reshape(shape)
    return [hash_u32(place[..., i, :, :], seed) for i in range(len(planes))]


def pack(digits: Sequence[jax.Array], base: int) -> jax.Array:
    """Digits below ``base``, in uint8 arrays, to one byte; the first is the least."""
    packed = digits[-1]
    for digit in reversed(digits[:-1]):
        packed = np.uint8(base) * packed + digit
    return packed


def unpack(packed: jax.Array, base: int, count: int) -> jax.Array:
    """Undoes :func:`pack`: (..., rows, width) to (..., count, rows, width)."""
    *lead, rows, width = packed.shape

    def in_turn(packed: jax.Array) -> jax.Array:  # in vectors of bytes
        flat, digits = packed.reshape(*lead, rows * width), []
        for _ in range(count):
            digits.append(lax.rem(flat, np.uint8(base)))
            flat = lax.div(flat, np.uint8(base))
        return jnp.concatenate(digits, -1).reshape(*lead, count, rows, width)

    def at_once(packed: jax.Array) -> jax.Array:  # element by element
        wide = packed.astype(jnp.uint16)[..., None, :, :]
        each = (2, *(1 for _ in lead), count, 1, 1)
        factor, shift = np.array(_OVER[base], np.uint16).T.reshape(each)
        above = (wide * factor) >> shift
        factor, shift = np.array(_OVER[base][1], np.uint16)
        return (above - np.uint16(base) * ((above * factor) >> shift)).astype(jnp.uint8)

    if count == 1:
        return packed[..., None, :, :]
    return lax.platform_dependent(packed, cpu=in_turn, default=at_once)


@dataclasses.dataclass(frozen=True)
class BlockQuantizer:
    """The settings that the quantizers share, and what follows from them alone."""

    bits: int = 8
    block_size: int = 256
    error_feedback: bool = False
    seed: int = 0

    _allowed_bits: ClassVar[tuple[int, ...]] = (8, 4)
    _scale_bytes: ClassVar[int]  # of each block

    def __post_init__(self) -> None:
        check_integer("block_size", self.block_size, 2)
        check_bool("error_feedback", self.error_feedback)
        check_integer("seed", self.seed)
        if self.bits not in self._allowed_bits or isinstance(self.bits, bool):
            allowed = " or ".join(map(str, self._allowed_bits))
            raise ValueError(f"bits must be {allowed}, got {self.bits!r}")

    @property
    def per_digit(self) -> int:
        """The elements that one digit stands for."""
        return 1

    @property
    def per_byte(self) -> int:
        """The elements that share a byte."""
        return self.per_digit * _DIGITS[self.bits][1]

    def shape_of(self, size: int) -> Shape:
        """How an array of ``size`` elements is cut."""
        return shape_of(size, self.block_size, self.per_byte)

    def group_of(self, size: int) -> Shape:
        """How a group of one array is cut, on the way to the means and back.

        No block is of two arrays. Those of small arrays are small, so that little of
        them is padding; where there is some, a block's mean magnitude is less.
        """
        planes, width = _block(self.block_size, self.per_byte)
        if size >= _LARGE:
            return Shape(1, planes, _ROWS, width)
        return Shape(1, planes, 1, -(-width // (4 if size < _SMALL else 2)))

    def nbytes_of(self, shape: Shape) -> int:
        """Bytes of an array that is cut so, scales included."""
        codes = shape.size // self.per_byte
        return codes + shape.blocks * self._scale_bytes

    def nbytes(self, size: int) -> int:
        """Bytes of ``size`` elements, scales included."""
        return self.nbytes_of(self.shape_of(size))

    def encode(self, x: jax.Array, seed: jax.Array) -> jax.Array:
        """Float32 (..., size) to uint8 (..., nbytes(size))."""
        *lead, size = x.shape
        shape = self.shape_of(size)
        x = jnp.pad(x, [(0, 0)] * len(lead) + [(0, shape.size - size)])
        parts = self.encode_groups(x.reshape(*lead, *shape), seed)
        return jnp.concatenate([part.reshape(*lead, -1) for part in parts], axis=-1)

    def decode(self, codes: jax.Array, size: int) -> jax.Array:
        """Uint8 (..., nbytes(size)) to float32 (..., size)."""
        shape = self.shape_of(size)
        x = self.decode_groups(*self.parted(codes, shape))
        return x.reshape(*codes.shape[:-1], shape.size)[..., :size]

    def encode_groups(
        self, x: jax.Array, seed: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Float32 (..., groups, planes, rows, width) to codes and scales, in bytes."""
        base, count = _DIGITS[self.bits]
        planes = [x[..., i, :, :] for i in range(x.shape[-3])]
        codes, scales = self.quantize(planes, seed)
        packed = [pack(codes[i : i + count], base) for i in range(0, len(codes), count)]
        scales = scales.reshape(*x.shape[:-3], x.shape[-2], self._scale_bytes)
        # A barrier, or XLA flattens what stands in front of it, too.
        found = lax.optimization_barrier((jnp.stack(packed, -3), scales))
        return found[0], found[1]

    def decode_groups(self, packed: jax.Array, scales: jax.Array) -> jax.Array:
        """Undoes :meth:`encode_groups`."""
        base, count = _DIGITS[self.bits]
        *lead, planes, rows, width = packed.shape
        code = unpack(packed, base, count).reshape(*lead, planes * count, rows, width)
        return self.dequantize(code, scales[..., None, :, :])

    def parted(self, codes: jax.Array, shape: Shape) -> tuple[jax.Array, jax.Array]:
        """The codes and the scales in bytes (..., nbytes) of arrays of this shape."""
        groups, planes, rows, width = shape
        lead, count = codes.shape[:-1], self.per_byte
        end = shape.size // count
        packed = codes[..., :end].reshape(*lead, groups, planes // count, rows, width)
        return packed, codes[..., end:].reshape(*lead, groups, rows, self._scale_bytes)

    def quantize(
        self, planes: list[jax.Array], seed: jax.Array
    ) -> tuple[list[jax.Array], jax.Array]:
        """Float32 (..., groups, rows, width) to codes and the bytes of the scales.

        Codes of each plane (or of ``per_digit`` planes), uint8, below the base; bytes
        of shape (..., groups, rows, _scale_bytes).
        """
        raise NotImplementedError

    def dequantize(self, code: jax.Array, scales: jax.Array) -> jax.Array:
        """Undoes :meth:`quantize`, for codes (..., groups, planes, rows, width).

        The bytes of the scales have shape (..., groups, 1, rows, _scale_bytes).
        """
        raise NotImplementedError
