"""Quantizers: arrays as codes of few bits, with one scale for each block.

An array is cut into groups of shape (planes, rows, width). A block is row r of all
planes of a group. So no element changes its place within a tile of memory, whose rows a
GPU or TPU reads and writes whole, and the codes that share a byte come from different
planes.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from slamb_jax._core.platform import materialized, opaque, split_digits
from slamb_jax._core.platform_groups import in_groups, of_rows
from slamb_jax._core.platform_tiles import block_sizes, digits_by_tiles, planes_of
from slamb_jax.exchange.other_values import (
    LargestOf,
    Natural,
    Sign,
    TernGrad,
    Uniform,
)
from slamb_jax.exchange.values import WIDTH, Draw, Ternary, Values

_ROWS = 8  # of a group of a large array
_LARGE, _SMALL = 2**16, 2**11  # elements of an array
_SCALE_BYTES = 4
_MANY_ROWS = 512  # of a slice: from so many on, filling groups costs under 1 %
# The factor and the shift that divide a byte by each power of a base, in 16 bits.
_RECIPROCALS = {
    16: ((1, 0), (1, 4)),
    2: tuple((1, i) for i in range(8)),
    3: ((1, 0), (171, 9), (57, 9), (19, 9), (203, 14)),  # bytes below 243
}


_VALUES: dict[str, Values] = {
    "ternary": Ternary(),
    "uniform8": Uniform(8),
    "uniform4": Uniform(4),
    "natural": Natural(),
    "terngrad": TernGrad(),
    "sign": Sign(),
}


Coded: TypeAlias = tuple[jax.Array, jax.Array]  # digits and scales, in bytes


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


@dataclasses.dataclass(frozen=True)
class Quantizer:
    """Encodes groups as bytes: digits of the values, several to a byte, and scales."""

    values: Values

    @property
    def has_zero(self) -> bool:
        """Whether a zero, such as a block is filled up with, is sent as one."""
        return not isinstance(self.values, Sign)

    def group_of(self, size: int) -> Group:
        """How an array of so many elements is cut: the shape of one group.

        Blocks of small arrays are small, so that little of them is padding.
        """
        per_byte = self.values.planes * self.values.digits
        planes = per_byte * max(1, self.values.block_size // (per_byte * WIDTH))
        width = max(1, self.values.block_size // planes)
        if size >= _LARGE:
            return Group(1, planes, _ROWS, width)
        return Group(1, planes, 1, -(-width // (4 if size < _SMALL else 2)))

    def nbytes(self, shape: Group) -> int:
        """Bytes of groups of this shape, scales included."""
        per_byte = self.values.planes * self.values.digits
        return shape.size // per_byte + shape.blocks * _SCALE_BYTES

    def encode(self, x: jax.Array, seed: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Float32 (..., groups, planes, rows, width) to digits and scales, in bytes."""
        return _kept(self._encode(x, x, Draw(seed, jnp.uint32(0))))

    def encode_array(
        self, x: jax.Array, group: Group, seed: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The same of the groups that an array of any shape is cut into."""

        def code(groups: jax.Array, flat: jax.Array, first: jax.Array) -> Coded:
            return self._encode(groups, flat, Draw(seed, first))

        return _kept(in_groups(code, x, group[1:]))

    def _encode(self, x: jax.Array, flat: jax.Array, draw: Draw) -> Coded:
        size = block_sizes(x, flat, *self.values.norm)
        # A base of 256 has one digit to a byte, and is never multiplied by.
        base, count = np.uint8(self.values.base % 256), self.values.digits
        planes = planes_of(x, flat)
        codes, scales = self.values.encode(planes, size, draw)
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
        return jnp.stack(packed, -3), in_bytes

    def decode(
        self, packed: jax.Array, scales: jax.Array, *, whole: bool = False
    ) -> jax.Array:
        """Undoes :meth:`encode`; ``whole``: of all that a large array was cut into."""
        base, count = self.values.base, self.values.digits
        *lead, planes, rows, width = packed.shape
        digits = packed
        if count > 1:
            digits = split_digits(packed, base, count, _RECIPROCALS[base])
            digits = digits.reshape(*lead, planes * count, rows, width)
        if whole:
            digits = digits_by_tiles(digits)
        # The scales came as bytes among bytes, without a cast that XLA could widen.
        floats = lax.bitcast_convert_type(scales[..., None, :, None, :], jnp.float32)
        if self.values.planes > 1:
            return self.values.decode(digits, floats)
        return of_rows(self.values.decode, digits, floats)

    def parted(self, codes: jax.Array, shape: Group) -> tuple[jax.Array, jax.Array]:
        """The digits and the scales of groups of this shape, from (..., nbytes)."""
        groups, planes, rows, width = shape
        lead, per_byte = codes.shape[:-1], self.values.planes * self.values.digits
        end = shape.size // per_byte
        packed = codes[..., :end].reshape(
            *lead, groups, planes // per_byte, rows, width
        )
        return packed, codes[..., end:].reshape(*lead, groups, rows, _SCALE_BYTES)


def _kept(coded: Coded) -> Coded:
    """Codes that no reader computes again.

    A CPU would, for each of the digits that a byte is split into. And XLA would flatten
    what stands in front of them, too.
    """
    out: Coded = opaque(materialized(coded))
    return out


def quantizer_of(payload: str | None) -> Quantizer | None:
    """The quantizer of a payload by name; None for float32 and bfloat16."""
    if payload is None or payload == "bfloat16":
        return None
    if payload in _VALUES:
        return Quantizer(_VALUES[payload])
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


def cut_among(
    sizes: Sequence[int],
    quantizer: Quantizer,
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
            kinds.setdefault(quantizer.group_of(like or size), []).append(i)
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
