"""Codes by stochastic rounding to a uniform grid."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from slamb_jax._ex.payloads.codes import BlockQuantizer, random_bits
from slamb_jax._ex.payloads.reductions import largest

_TINY = float(np.finfo(np.float32).tiny)


@dataclasses.dataclass(frozen=True)
class StochasticUniform(BlockQuantizer):
    r"""Eight or four bits by stochastic rounding to a uniform grid (QSGD).

    With L = 127 (7 for four bits) and s a block's largest magnitude over L,

    .. math::

      x \to s \left\lfloor x / s + U \right\rfloor, \qquad U \sim [0, 1)

    so each element is right on average, a zero stays a zero, and each error is less
    than s. (QSGD scales by the norm of the block; the largest magnitude gives a finer
    grid.) A block with a value that is not finite is decoded as NaN; one whose largest
    magnitude is below about :math:`10^{-36}` (s would not be normal) as zeros.

    U is a hash of (seed, step, worker, element): nothing is stored, and the same seed
    and step give the same bits.

    Args:
      bits: 8 or 4 for each element; two of 4 share a byte.
      block_size: about how many elements share a scale of 4 bytes; at least 2.
      error_feedback: whether a worker keeps what rounding took, for one more float32
        copy of the parameters, and sends it with the next exchange of the coordinate.
      seed: changes U.

    Raises:
      ValueError: for a value out of range.

    Examples:
      >>> import jax.numpy as jnp, slamb_jax
      >>> eight = slamb_jax.payloads.StochasticUniform(bits=8)
      >>> codes = eight.encode(jnp.array([1.0, 0.0, -0.3, 12.7]), jnp.uint32(0))
      >>> codes.nbytes
      8
      >>> print(eight.decode(codes, 4).round(1))
      [ 1.   0.  -0.3 12.7]

    References:
      Alistarh et al., `QSGD <https://arxiv.org/abs/1610.02132>`_, 2016.
    """

    _scale_bytes: ClassVar[int] = 4

    @property
    def _levels(self) -> int:
        return 2 ** (self.bits - 1) - 1

    def quantize(
        self, planes: list[jax.Array], seed: jax.Array
    ) -> tuple[list[jax.Array], jax.Array]:
        levels = np.float32(self._levels)
        top = largest([jnp.abs(x) for x in planes])
        small = top < levels * np.float32(_TINY)
        scale = jnp.where(small, jnp.float32(0), top / levels)
        usable = ~small & jnp.isfinite(top)  # the scale tells NaN and infinity
        codes = []
        for x, bits in zip(planes, random_bits(planes, seed), strict=True):
            y = jnp.where(usable, x * (levels / top), jnp.float32(0))
            low = jnp.floor(y)
            u = bits >> np.uint32(8)
            up = u.astype(jnp.float32) * np.float32(2**-24) < y - low
            code = jnp.clip(low + up.astype(jnp.float32), -levels, levels)
            codes.append((code + levels).astype(jnp.uint8))
        return codes, lax.bitcast_convert_type(scale, jnp.uint8)

    def dequantize(self, code: jax.Array, scales: jax.Array) -> jax.Array:
        scale = lax.bitcast_convert_type(scales[..., None, :], jnp.float32)
        return (code.astype(jnp.float32) - np.float32(self._levels)) * scale
