"""A small counter-based hash: no generator to seed, nothing to keep."""

import jax
import jax.numpy as jnp


def hash_u32(x: jax.Array, salt: int | jax.Array) -> jax.Array:
    """Hashes uint32 values, element by element (the finalizer of MurmurHash3)."""
    x = x ^ (jnp.uint32(salt) if isinstance(salt, int) else salt)
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def hash_words(*words: int) -> int:
    """Hashes Python integers into one in ``[0, 2**32)``, before anything is traced."""
    state = 0x9E3779B9
    for word in words:
        state ^= word & 0xFFFFFFFF
        state = (state ^ (state >> 16)) * 0x85EBCA6B & 0xFFFFFFFF
        state = (state ^ (state >> 13)) * 0xC2B2AE35 & 0xFFFFFFFF
        state = (state ^ (state >> 16)) + 0x9E3779B9 & 0xFFFFFFFF
    return state
