"""Values of fewer codes than the default's, and of finer ones."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from slamb_jax.exchange.values import (
    LARGEST,
    NAN,
    SUM,
    WIDTH,
    ZERO,
    Draw,
    Norm,
    Ternary,
    least_sent,
    scale_of,
    total,
)

_TINY = float(np.finfo(np.float32).tiny)


@dataclasses.dataclass(frozen=True)
class LargestOf:
    """The sign of the largest of ``planes`` coordinates times a scale; zero elsewhere.

    It is sent if it is at least the mean magnitude of the block. The scale is the mean
    magnitude of those that are sent. A digit of half a byte is enough for 7
    coordinates, one of a byte for 127.
    """

    planes: int
    norm: Norm = SUM

    @property
    def base(self) -> int:
        return 16 if self.planes <= 7 else 256

    @property
    def digits(self) -> int:
        return 2 if self.planes <= 7 else 1

    @property
    def block_size(self) -> int:
        return WIDTH * self.planes * self.digits

    def encode(
        self, planes: list[jax.Array], size: jax.Array, draw: Draw
    ) -> tuple[list[jax.Array], jax.Array]:
        del draw
        count = self.planes
        mean, least = least_sent(size, planes)
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
            is_sent = (top >= least) & (top > ZERO)
            codes.append(jnp.where(is_sent, first, np.uint8(0)))
            chosen.append(jnp.where(is_sent, top, ZERO))
        return codes, scale_of(chosen, total([jnp.sign(x) for x in chosen]), mean)

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
    norm: Norm = LARGEST

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
        self, planes: list[jax.Array], size: jax.Array, draw: Draw
    ) -> tuple[list[jax.Array], jax.Array]:
        levels = np.float32(self._levels)
        small = size < levels * np.float32(_TINY)
        usable = ~small & jnp.isfinite(size)  # the scale tells NaN and infinity
        codes = []
        for x, bits in zip(planes, draw.bits(planes), strict=True):
            y = jnp.where(usable, x * (levels / size), ZERO)
            low = jnp.floor(y)
            up = _uniform(bits) < y - low
            # x * (L / size) may be rounded to above L.
            code = jnp.clip(low + up.astype(jnp.float32), -levels, levels)
            codes.append((code + levels).astype(jnp.uint8))
        return codes, jnp.where(small, ZERO, size / levels)

    def decode(self, digits: jax.Array, scales: jax.Array) -> jax.Array:
        return (digits.astype(jnp.float32) - np.float32(self._levels)) * scales


@dataclasses.dataclass(frozen=True)
class Natural:
    r"""8 bits by stochastic rounding to a power of two, as in natural compression.

    With s the power of two at or above the largest magnitude of the block,
    :math:`x \to \pm s 2^{-e}` with e from 0 to 126, so that each element is right on
    average; what is smaller is 0. Horváth et al., Natural compression, 2019.
    """

    base: int = 256
    digits: int = 1
    planes: int = 1
    block_size: int = 256
    norm: Norm = LARGEST

    def encode(
        self, planes: list[jax.Array], size: jax.Array, draw: Draw
    ) -> tuple[list[jax.Array], jax.Array]:
        whole = np.uint32(0x7F800000)  # the exponent; below it are 23 bits of fraction
        top = (_bits_of(size) + np.uint32(0x7FFFFF)) & whole
        usable = (size >= np.float32(_TINY)) & (top < whole)
        scale = jnp.where(usable, lax.bitcast_convert_type(top, jnp.float32), ZERO)
        codes = []
        for x, random in zip(planes, draw.bits(planes), strict=True):
            # A carry out of the fraction is as likely as the fraction is large.
            up = _bits_of(jnp.abs(x)) + (random >> np.uint32(9))
            # It wraps above the top.
            below = (top >> np.uint32(23)) - (up >> np.uint32(23))
            is_sent = usable & (jnp.abs(x) >= np.float32(_TINY)) & (below < 127)
            code = below.astype(jnp.uint8) + jnp.where(
                x > 0, np.uint8(1), np.uint8(128)
            )
            codes.append(jnp.where(is_sent, code, np.uint8(0)))
        return codes, jnp.where(jnp.isfinite(size), scale, NAN)

    def decode(self, digits: jax.Array, scales: jax.Array) -> jax.Array:
        below = (digits - np.uint8(1)) % np.uint8(127)
        power = (np.uint32(127) - below.astype(jnp.uint32)) << np.uint32(23)
        size = lax.bitcast_convert_type(power, jnp.float32)  # 2 ** -below
        sign = jnp.where(digits < 128, np.float32(1), np.float32(-1))
        return jnp.where(digits == 0, ZERO, sign * size) * scales


@dataclasses.dataclass(frozen=True)
class TernGrad(Ternary):
    """Three values by stochastic rounding: zero, and the block's largest magnitude.

    So each element is right on average. Wen et al., TernGrad, 2017.
    """

    norm: Norm = LARGEST

    def encode(
        self, planes: list[jax.Array], size: jax.Array, draw: Draw
    ) -> tuple[list[jax.Array], jax.Array]:
        codes = []
        for x, random in zip(planes, draw.bits(planes), strict=True):
            is_sent = _uniform(random) * size < jnp.abs(x)
            code = jnp.where(x > 0, np.uint8(2), np.uint8(0))
            codes.append(jnp.where(is_sent, code, np.uint8(1)))
        return codes, jnp.where(jnp.isfinite(size), size, NAN)


@dataclasses.dataclass(frozen=True)
class Sign:
    """One bit: the sign times the mean magnitude of the block's elements but zeros.

    A zero has the sign of a positive number. Karimireddy et al., EF-signSGD, 2019.
    """

    base: int = 2
    digits: int = 8
    planes: int = 1
    block_size: int = 1024
    norm: Norm = SUM

    def encode(
        self, planes: list[jax.Array], size: jax.Array, draw: Draw
    ) -> tuple[list[jax.Array], jax.Array]:
        del draw
        # What a block is filled up with is zero.
        count = total([jnp.abs(jnp.sign(x)) for x in planes])
        scale = size / jnp.maximum(count, np.float32(1))
        codes = [jnp.where(x >= 0, np.uint8(1), np.uint8(0)) for x in planes]
        return codes, jnp.where(jnp.isfinite(scale), scale, NAN)

    def decode(self, digits: jax.Array, scales: jax.Array) -> jax.Array:
        signs = np.float32(2) * digits.astype(jnp.float32) - np.float32(1)
        return signs * scales


def _bits_of(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.uint32)


def _uniform(bits: jax.Array) -> jax.Array:
    """In [0, 1), of the 24 bits that a float32 holds exactly."""
    return (bits >> np.uint32(8)).astype(jnp.float32) * np.float32(2**-24)
