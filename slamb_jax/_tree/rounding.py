"""Rounding to 16 bits: to nearest and at random, and back to 32."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from slamb_jax._tree.hashing import hash_u32, hash_words


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


def step_seed(step: jax.Array, *words: int) -> jax.Array:
    """A uint32 seed for the hashes of a step."""
    return hash_u32(step.astype(jnp.uint32), hash_words(*words))


def stochastic_round(x: jax.Array, seed: jax.Array) -> jax.Array:
    """Float32 to bfloat16 at random, unbiased, by a hash of the element's index."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    random = hash_u32(_element_index(x.shape), seed) >> np.uint32(16)
    up = jnp.where(jnp.isfinite(x), bits + random, bits)
    # Keep NaN: its upper 16 bits alone may encode infinity.
    up = jnp.where(jnp.isnan(x), np.uint32(0x7FC00000), up)
    upper = (up >> np.uint32(16)).astype(jnp.uint16)
    return lax.bitcast_convert_type(upper, jnp.bfloat16)


def _element_index(shape: tuple[int, ...]) -> jax.Array:
    """Row-major index of each element modulo 2**32, without reshaping a shard."""
    index = jnp.zeros(shape, jnp.uint32)
    stride = 1
    for axis in reversed(range(len(shape))):
        along = lax.broadcasted_iota(jnp.uint32, shape, axis)
        index += along * np.uint32(stride % 2**32)
        stride *= shape[axis]
    return index
