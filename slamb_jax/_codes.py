"""What the quantizers share: blocks, random bits, and two codes to a byte."""

from typing import Any

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


def check_quantizer(quantizer: Any) -> None:
    """Raises unless the settings that all quantizers have are in range."""
    check_integer("block_size", quantizer.block_size, 2)
    if not isinstance(quantizer.error_feedback, bool):
        raise ValueError(
            f"error_feedback must be a bool, got {quantizer.error_feedback!r}"
        )
    check_integer("seed", quantizer.seed)
    for name in ("bits", "mean_bits"):
        bits = getattr(quantizer, name)
        fits = bits in (8, 4) and not isinstance(bits, bool)
        if not fits and not (name == "mean_bits" and bits is None):
            raise ValueError(f"{name} must be 8 or 4, got {bits!r}")
