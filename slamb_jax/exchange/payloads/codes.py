"""What the quantizers share: blocks, random bits, and several codes to a byte."""

import dataclasses
from typing import ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from slamb_jax._tree.checks import check_bool, check_integer
from slamb_jax._tree.hashing import hash_u32


def block_shape(size: int, block_size: int, multiple: int = 2) -> tuple[int, int]:
    """The number of blocks and their length: a multiple, as alike as they can be."""
    count = max(1, -(-size // block_size))
    length = -(-size // count)
    return count, length + -length % multiple


def to_blocks(x: jax.Array, block_size: int, multiple: int = 2) -> jax.Array:
    """(..., size) as (..., blocks, length), padded with zeros."""
    *lead, size = x.shape
    count, length = block_shape(size, block_size, multiple)
    padding = [(0, 0)] * len(lead) + [(0, count * length - size)]
    return jnp.pad(x, padding).reshape(*lead, count, length)


def random_bits(shape: tuple[int, ...], seed: jax.Array) -> jax.Array:
    """Random uint32, by a hash of the place in ``shape``."""
    place = lax.iota(jnp.uint32, int(np.prod(shape))).reshape(shape)
    return hash_u32(place, seed)


def pack_uint4(code: jax.Array) -> jax.Array:
    """The lower halves of uint8 (..., length), two to a byte: (..., length / 2)."""
    first, second = jnp.split(code & np.uint8(15), 2, axis=-1)
    return first | (second << np.uint8(4))


def unpack_uint4(packed: jax.Array) -> jax.Array:
    """Undoes :func:`pack_uint4`: (..., length), the upper halves 0."""
    return jnp.concatenate([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1)


def pack_trits(code: jax.Array) -> jax.Array:
    """Codes 0, 1 and 2 of (..., length), five to a byte: (..., length / 5)."""
    parts = jnp.split(code, 5, axis=-1)
    packed = parts[-1]
    for part in reversed(parts[:-1]):
        packed = np.uint8(3) * packed + part
    return packed


def unpack_trits(packed: jax.Array) -> jax.Array:
    """Undoes :func:`pack_trits`."""
    parts = []
    for _ in range(5):
        parts.append(lax.rem(packed, np.uint8(3)))
        packed = lax.div(packed, np.uint8(3))
    return jnp.concatenate(parts, axis=-1)


_PACK = {4: pack_uint4, 2: pack_trits}
_UNPACK = {4: unpack_uint4, 2: unpack_trits}


@dataclasses.dataclass(frozen=True)
class BlockQuantizer:
    """The settings that the quantizers share, and what follows from them alone."""

    bits: int = 8
    block_size: int = 256
    error_feedback: bool = False
    seed: int = 0
    mean_bits: int | None = None

    _allowed_bits: ClassVar[tuple[int, ...]] = (8, 4)
    _scale_bytes: ClassVar[int]  # of each block

    def __post_init__(self) -> None:
        check_integer("block_size", self.block_size, 2)
        check_bool("error_feedback", self.error_feedback)
        check_integer("seed", self.seed)
        for name in ("bits", "mean_bits"):
            bits = getattr(self, name)
            fits = bits in self._allowed_bits and not isinstance(bits, bool)
            if not fits and not (name == "mean_bits" and bits is None):
                allowed = " or ".join(map(str, self._allowed_bits))
                raise ValueError(f"{name} must be {allowed}, got {bits!r}")

    @property
    def for_means(self) -> Self:
        """The quantizer of the means on their way back to the workers."""
        bits = self.bits if self.mean_bits is None else self.mean_bits
        return dataclasses.replace(self, bits=bits, mean_bits=None)

    @property
    def _codes_per_byte(self) -> int:
        return 5 if self.bits == 2 else 8 // self.bits

    @property
    def _multiple(self) -> int:
        return max(2, self._codes_per_byte)

    def nbytes(self, size: int) -> int:
        """Bytes of ``size`` elements, scales included."""
        count, length = block_shape(size, self.block_size, self._multiple)
        return count * (length // self._codes_per_byte + self._scale_bytes)

    def encode(self, x: jax.Array, seed: jax.Array) -> jax.Array:
        """Float32 (..., size) to uint8 (..., nbytes(size))."""
        blocks = to_blocks(x, self.block_size, self._multiple)
        code, scales = self.quantize(blocks, seed)
        code = _PACK.get(self.bits, lambda code: code)(code)
        parts = [part.reshape(*x.shape[:-1], -1) for part in (code, scales)]
        return jnp.concatenate(parts, axis=-1)

    def decode(self, codes: jax.Array, size: int) -> jax.Array:
        """Uint8 (..., nbytes(size)) to float32 (..., size)."""
        count, length = block_shape(size, self.block_size, self._multiple)
        lead, end = codes.shape[:-1], count * length // self._codes_per_byte
        code = codes[..., :end].reshape(*lead, count, -1)
        code = _UNPACK.get(self.bits, lambda code: code)(code)
        scales = codes[..., end:].reshape(*lead, count, self._scale_bytes)
        x = self.dequantize(code, scales)
        return x.reshape(*lead, count * length)[..., :size]

    def quantize(
        self, blocks: jax.Array, seed: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Float32 (..., blocks, length) to codes and the bytes of each block's scale.

        Both uint8: of the same shape, and of (..., blocks, _scale_bytes).
        """
        raise NotImplementedError

    def dequantize(self, code: jax.Array, scales: jax.Array) -> jax.Array:
        """Undoes :meth:`quantize`; of four bits the upper half of a code is 0."""
        raise NotImplementedError
