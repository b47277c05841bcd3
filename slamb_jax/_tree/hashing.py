"""A small counter-based hash: no generator to seed, nothing to keep."""

from typing import TypeVar

import jax
import numpy as np

Array = TypeVar("Array", np.ndarray, jax.Array)


def hash_u32(x: Array, salt: int | Array) -> Array:
    """Hashes uint32 values, element by element (the finalizer of MurmurHash3)."""
    shift13, shift16 = np.uint32(13), np.uint32(16)
    x = x ^ (np.uint32(salt) if isinstance(salt, int) else salt)
    x = (x ^ (x >> shift16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> shift13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> shift16)


def hash_words(*words: int) -> int:
    """Hashes Python integers into one in ``[0, 2**32)``, before anything is traced."""
    state = 0x9E3779B9
    for word in words:
        state ^= word & 0xFFFFFFFF
        state = (state ^ (state >> 16)) * 0x85EBCA6B & 0xFFFFFFFF
        state = (state ^ (state >> 13)) * 0xC2B2AE35 & 0xFFFFFFFF
        state = (state ^ (state >> 16)) + 0x9E3779B9 & 0xFFFFFFFF
    return state
