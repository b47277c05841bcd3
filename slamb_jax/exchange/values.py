"""The values that codes stand for, and the default's: three of them."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from slamb_jax._core.platform import reduce_blocks
from slamb_jax._core.rounding import hash_u32

# Of a row: the lanes of a TPU, and whole cache lines elsewhere, are read at once.
WIDTH = 128
ZERO, NAN = np.float32(0), np.float32(np.nan)
Norm: TypeAlias = tuple[Callable[..., jax.Array], Callable[..., jax.Array]]
SUM: Norm = (jnp.add, jnp.sum)  # of two arrays, and of an axis of one
LARGEST: Norm = (jnp.maximum, jnp.max)


class Draw(NamedTuple):
    """What the random bits of an element are a hash of, beside its place."""

    seed: jax.Array
    first: jax.Array  # the number of the first group, uint32

    def bits(self, planes: Sequence[jax.Array]) -> list[jax.Array]:
        """Random uint32 for each element, by a hash of its place among them all."""
        # Not from a key: a hash needs no state, is part of the kernel that rounds, and
        # is the same under every mapping.
        *lead, rows, width = planes[0].shape
        shape = (*lead, len(planes), rows, width)
        place = lax.iota(jnp.uint32, math.prod(shape)).reshape(shape)
        before = self.first * np.uint32(math.prod(shape[-3:]))
        of_planes = [place[..., i, :, :] + before for i in range(len(planes))]
        return [hash_u32(x, self.seed) for x in of_planes]


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
        self, planes: list[jax.Array], size: jax.Array, draw: Draw
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
    norm: Norm = SUM

    def encode(
        self, planes: list[jax.Array], size: jax.Array, draw: Draw
    ) -> tuple[list[jax.Array], jax.Array]:
        del draw
        # Ternary Weight Networks have 0.7 of the mean for a bound, where nothing waits.
        mean, least = least_sent(size, planes)
        sizes = [jnp.abs(x) for x in planes]
        # Ones and zeros: a GPU would keep comparisons in memory for all that use them.
        large = [jnp.sign(jnp.maximum(x - least, ZERO)) for x in sizes]
        chosen = [is_large * x for is_large, x in zip(large, sizes, strict=True)]
        codes = [
            jnp.where(
                is_large > 0, jnp.where(x > 0, np.uint8(2), np.uint8(0)), np.uint8(1)
            )
            for is_large, x in zip(large, planes, strict=True)
        ]
        return codes, scale_of(chosen, total(large), mean)

    def decode(self, digits: jax.Array, scales: jax.Array) -> jax.Array:
        return (digits.astype(jnp.float32) - np.float32(1)) * scales


def least_sent(
    size: jax.Array, planes: Sequence[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Each block's mean magnitude, and the least magnitude that counts as large.

    The bound is slightly below the mean, whose sum may be rounded upwards: where all
    magnitudes are equal, all are large.
    """
    mean = size / np.float32(len(planes) * planes[0].shape[-1])
    return mean, np.float32(1 - 2**-16) * mean


def scale_of(
    chosen: Sequence[jax.Array], count: jax.Array, mean: jax.Array
) -> jax.Array:
    """The mean of the chosen magnitudes of each block, which are zero elsewhere.

    It is 0 where none is chosen, and NaN where the ``mean`` of all is not finite.
    """
    scale = jnp.where(count > 0, total(chosen) / jnp.maximum(count, 1), ZERO)
    return jnp.where(jnp.isfinite(mean), scale, NAN)


def total(planes: Sequence[jax.Array]) -> jax.Array:
    """The sum of each block, over all of its planes."""
    return reduce_blocks(planes, *SUM)
