"""What the quantizers share: blocks, random bits, and two codes to a byte."""

import dataclasses
from typing import ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from slamb_jax._checks import check_integer
from slamb_jax._hashing import hash_u32


def division(size: int, block_size: int) -> tuple[int, int]:
    """How many blocks, and their length: even, and as alike as they can be."""
    count = max(1, -(-size // block_size))
    length = -(-size // count)
    return count, length + length % 2


def blocks_of(x: jax.Array, block_size: int) -> jax.Array:
    """(..., size) as (..., blocks, length), filled up with zeros."""
    *lead, size = x.shape
    count, length = division(size, block_size)
    fill = [(0, 0)] * len(lead) + [(0, count * length - size)]
    return jnp.pad(x, fill).reshape(*lead, count, length)


def noise(shape: tuple[int, ...], salt: jax.Array) -> jax.Array:
    """Random words, one for each place in ``shape``."""
    place = lax.iota(jnp.uint32, int(np.prod(shape))).reshape(shape)
    return hash_u32(place, salt)


def nibbles(code: jax.Array) -> jax.Array:
    """The lower halves of uint8 (..., length), two to a byte: (..., length / 2)."""
    first, second = jnp.split(code & np.uint8(15), 2, axis=-1)
    return first | (second << np.uint8(4))


def from_nibbles(packed: jax.Array) -> jax.Array:
    """Uint8 (..., length / 2) as it was packed: (..., length), the upper halves 0."""
    return jnp.concatenate([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1)


@dataclasses.dataclass(frozen=True)
class Codes:
    """The settings that the quantizers share, and what follows from them alone."""

    bits: int = 8
    block_size: int = 256
    error_feedback: bool = False
    seed: int = 0
    mean_bits: int | None = None

    _per_block: ClassVar[int]  # bytes beside the elements' codes

    def __post_init__(self) -> None:
        check_integer("block_size", self.block_size, 2)
        if not isinstance(self.error_feedback, bool):
            raise ValueError(
                f"error_feedback must be a bool, got {self.error_feedback!r}"
            )
        check_integer("seed", self.seed)
        for name in ("bits", "mean_bits"):
            bits = getattr(self, name)
            fits = bits in (8, 4) and not isinstance(bits, bool)
            if not fits and not (name == "mean_bits" and bits is None):
                raise ValueError(f"{name} must be 8 or 4, got {bits!r}")

    @property
    def for_means(self) -> Self:
        """What the means are sent back in."""
        bits = self.bits if self.mean_bits is None else self.mean_bits
        return dataclasses.replace(self, bits=bits, mean_bits=None)

    def nbytes(self, size: int) -> int:
        """Bytes of ``size`` elements, what each block takes besides included."""
        blocks, length = division(size, self.block_size)
        return blocks * (length * self.bits // 8 + self._per_block)

    def encode(self, x: jax.Array, salt: jax.Array) -> jax.Array:
        """Float32 (..., size) to uint8 (..., nbytes(size))."""
        code, heads = self._code(blocks_of(x, self.block_size), salt)
        if self.bits == 4:
            code = nibbles(code)
        parts = [part.reshape(*x.shape[:-1], -1) for part in (code, heads)]
        return jnp.concatenate(parts, axis=-1)

    def decode(self, codes: jax.Array, size: int) -> jax.Array:
        """Uint8 (..., nbytes(size)) to float32 (..., size)."""
        count, length = division(size, self.block_size)
        lead, end = codes.shape[:-1], count * length * self.bits // 8
        code = codes[..., :end].reshape(*lead, count, -1)
        if self.bits == 4:
            code = from_nibbles(code)
        heads = codes[..., end:].reshape(*lead, count, self._per_block)
        return self._value(code, heads).reshape(*lead, count * length)[..., :size]

    def _code(self, blocks: jax.Array, salt: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Of float32 (..., blocks, length) the codes, and each block's own bytes.

        Uint8 of the same shape, and of (..., blocks, _per_block).
        """
        raise NotImplementedError

    def _value(self, code: jax.Array, heads: jax.Array) -> jax.Array:
        """The float32 that :meth:`_code` stood for; of four bits the upper are 0."""
        raise NotImplementedError
