"""Hashes that need no generator, and rounding to 16 bits."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

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
    golden = np.uint32(0x9E3779B9)
    state = np.array([golden])  # numpy warns where a scalar overflows
    for word in words:
        state = hash_u32(state, int(word) & 0xFFFFFFFF) + golden
    return int(state[0])


def round_to(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """``x`` in ``dtype``, rounded before it is cast.

    XLA may remove a cast there and back, and with it the rounding; not this.
    """
    if x.dtype == dtype or jnp.finfo(dtype).bits >= jnp.finfo(x.dtype).bits:
        return x.astype(dtype)
    info = jnp.finfo(dtype)
    rounded = lax.reduce_precision(x, info.nexp, info.nmant)
    if info.minexp > jnp.finfo(x.dtype).minexp:  # reduce_precision has no subnormals
        tiny, least = x.dtype.type(info.tiny), x.dtype.type(info.smallest_subnormal)
        rounded = jnp.where(jnp.abs(x) < tiny, jnp.round(x / least) * least, rounded)
    return rounded.astype(dtype)


def upcast_f32(x: jax.Array) -> jax.Array:
    """``x`` in float32, or in its own dtype if that is wider."""
    return x.astype(jnp.float32) if x.dtype.itemsize < 4 else x


def copied(x: Any, dtype: DTypeLike) -> jax.Array:
    """A copy, since buffers may be donated; zeros for a ``ShapeDtypeStruct``."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return jnp.zeros_like(x, dtype=dtype)
    return jnp.array(x, dtype, copy=True)
