"""Codes by stochastic rounding to a uniform grid."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from slamb_jax._codes import Codes, noise

_TINY = float(np.finfo(np.float32).tiny)


@dataclasses.dataclass(frozen=True)
class StochasticUniform(Codes):
    r"""Eight or four bits by stochastic rounding to a uniform grid (QSGD).

    With L = 127 (or 7 for four bits) and s a block's largest magnitude over L,

    .. math::

      x \to s \left\lfloor x / s + U \right\rfloor, \qquad U \sim [0, 1)

    so each element is right on average, a zero stays a zero, and the error of each is
    less than s. (QSGD has the norm of the block for a scale; the largest magnitude
    gives a finer grid.) A block with something not finite comes out as NaN; one whose
    largest magnitude is below some :math:`10^{-36}` (s would not be normal) as zeros.

    U is a hash of (seed, step, worker, element): nothing is kept, and the same seed and
    step give the same bits.

    The grid is as fine for a small element as for the largest of its block: where m is
    divided by the root of v, :class:`NaturalCompression` costs less accuracy at as many
    bits.

    Args:
      bits: 8 or 4 for each element; two of 4 share a byte.
      block_size: about how many elements share a scale of 4 bytes; at least 2.
      error_feedback: whether a worker keeps what rounding took, see :func:`slamb`.
      seed: changes U.
      mean_bits: 8 or 4 for the means on their way back to the workers, whose rounding
        no further mean takes away; None for ``bits``.

    Raises:
      ValueError: for a value out of range.

    Examples:
      >>> import jax.numpy as jnp, slamb_jax
      >>> eight = slamb_jax.StochasticUniform(bits=8)
      >>> codes = eight.encode(jnp.array([1.0, 0.0, -0.3, 12.7]), jnp.uint32(0))
      >>> codes.nbytes
      8
      >>> print(eight.decode(codes, 4).round(1))
      [ 1.   0.  -0.3 12.7]

    References:
      Alistarh et al., `QSGD <https://arxiv.org/abs/1610.02132>`_, 2016.
    """

    _per_block = 4

    def _code(self, blocks: jax.Array, salt: jax.Array) -> tuple[jax.Array, jax.Array]:
        levels = np.float32(2 ** (self.bits - 1) - 1)
        largest = jnp.max(jnp.abs(blocks), -1, keepdims=True)
        small = largest < levels * np.float32(_TINY)
        scale = jnp.where(small, jnp.float32(0), largest / levels)
        known = ~small & jnp.isfinite(largest)  # NaN and infinity are in the scale
        y = jnp.where(known, blocks * (levels / largest), jnp.float32(0))
        low = jnp.floor(y)
        u = noise(blocks.shape, salt) >> np.uint32(8)
        up = u.astype(jnp.float32) * np.float32(2**-24) < y - low
        code = jnp.clip(low + up.astype(jnp.float32), -levels, levels)
        code = lax.bitcast_convert_type(code.astype(jnp.int8), jnp.uint8)
        return code, lax.bitcast_convert_type(scale, jnp.uint8)

    def _value(self, code: jax.Array, heads: jax.Array) -> jax.Array:
        scale = lax.bitcast_convert_type(heads[..., None, :], jnp.float32)
        up = 8 - self.bits  # the sign is in the upper bit
        code = lax.bitcast_convert_type(code << np.uint8(up), jnp.int8) >> np.int8(up)
        return code.astype(jnp.float32) * scale
