"""Values of fewer codes than the default's, and of finer ones."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from slamb_jax._core.rounding import hash_u32
from slamb_jax.exchange.values import (
    LARGEST,
    SUM,
    WIDTH,
    ZERO,
    Norm,
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
        self, planes: list[jax.Array], size: jax.Array, seed: jax.Array
    ) -> tuple[list[jax.Array], jax.Array]:
        del seed
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
        self, planes: list[jax.Array], size: jax.Array, seed: jax.Array
    ) -> tuple[list[jax.Array], jax.Array]:
        levels = np.float32(self._levels)
        small = size < levels * np.float32(_TINY)
        usable = ~small & jnp.isfinite(size)  # the scale tells NaN and infinity
        codes = []
        for x, bits in zip(planes, _random_bits(planes, seed), strict=True):
            y = jnp.where(usable, x * (levels / size), ZERO)
            low = jnp.floor(y)
            # 24 bits are what a float32 holds exactly: u is uniform, and below 1.
            u = bits >> np.uint32(8)
            up = u.astype(jnp.float32) * np.float32(2**-24) < y - low
            # x * (L / size) may be rounded to above L.
            code = jnp.clip(low + up.astype(jnp.float32), -levels, levels)
            codes.append((code + levels).astype(jnp.uint8))
        return codes, jnp.where(small, ZERO, size / levels)

    def decode(self, digits: jax.Array, scales: jax.Array) -> jax.Array:
        return (digits.astype(jnp.float32) - np.float32(self._levels)) * scales


def _random_bits(planes: Sequence[jax.Array], seed: jax.Array) -> list[jax.Array]:
    """Random uint32 for each element, by a hash of its place among them all."""
    # Not from a key: a hash needs no state, is part of the kernel that rounds, and is
    # the same under every mapping.
    *lead, rows, width = planes[0].shape
    shape = (*lead, len(planes), rows, width)
    place = lax.iota(jnp.uint32, int(np.prod(shape))).reshape(shape)
    return [hash_u32(place[..., i, :, :], seed) for i in range(len(planes))]
