"""Codes by stochastic rounding to powers of two."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from slamb_jax.exchange.payloads.codes import BlockQuantizer, random_bits
from slamb_jax.exchange.payloads.reductions import largest

_MAGNITUDE = np.uint32(0x7FFFFFFF)
_ZERO = np.uint32(127)  # the largest distance between exponents stands for 0


@dataclasses.dataclass(frozen=True)
class NaturalCompression(BlockQuantizer):
    r"""Eight bits: a sign and a power of two, by stochastic rounding.

    .. math::

      \pm 2^e (1 + f) \to
      \begin{cases}
        \pm 2^{e+1} & \text{with probability } f \\
        \pm 2^e & \text{otherwise}
      \end{cases}

    so each element is right on average, a zero stays a zero, and the variance is at
    most :math:`x^2/8`, however small an element is beside others: seven bits hold the
    distance of its exponent to the block's largest, which takes a byte; what is
    :math:`2^{127}` times smaller than that is 0. A block with a value that is not
    finite (or is rounded up to :math:`2^{128}`) is decoded as NaN. Rounding adds random
    bits, a hash as in :class:`StochasticUniform`, to the mantissa.

    Args:
      bits: 8. (Four bits were measured to be worse than uniform ones of equal size.)
      block_size: about how many elements share a byte for their largest exponent; at
        least 2.
      error_feedback: whether a worker keeps what rounding took, for one more float32
        copy of the parameters, and sends it with the next exchange of the coordinate.
      seed: changes the rounding.
      mean_bits: None or 8.

    Raises:
      ValueError: for a value out of range.

    Examples:
      >>> import jax.numpy as jnp, slamb_jax
      >>> natural = slamb_jax.payloads.NaturalCompression()
      >>> codes = natural.encode(jnp.array([8.0, 0.0, -0.25, 2.0]), jnp.uint32(0))
      >>> codes.nbytes
      5
      >>> print(natural.decode(codes, 4))
      [ 8.    0.   -0.25  2.  ]

    References:
      Horváth et al., `Natural Compression for Distributed Deep Learning
      <https://arxiv.org/abs/1905.10988>`_, 2019.
    """

    _allowed_bits: ClassVar[tuple[int, ...]] = (8,)
    _scale_bytes: ClassVar[int] = 1

    def quantize(
        self, planes: list[jax.Array], seed: jax.Array
    ) -> tuple[list[jax.Array], jax.Array]:
        words = [lax.bitcast_convert_type(x, jnp.uint32) for x in planes]
        # The carry out of the mantissa, 23 bits, has probability f.
        exponents = [
            ((word & _MAGNITUDE) + (bits >> np.uint32(9))) >> np.uint32(23)
            for word, bits in zip(words, random_bits(planes, seed), strict=True)
        ]
        top = jnp.minimum(largest(exponents), np.uint32(255))
        codes = []
        for word, exponent in zip(words, exponents, strict=True):
            below = jnp.minimum(top - jnp.minimum(exponent, top), _ZERO)
            below = jnp.where(exponent == np.uint32(0), _ZERO, below)
            sign = (word >> np.uint32(31)) << np.uint32(7)
            codes.append((sign | below).astype(jnp.uint8))
        return codes, top.astype(jnp.uint8)

    def dequantize(self, code: jax.Array, scales: jax.Array) -> jax.Array:
        code, top = code.astype(jnp.uint32), scales.astype(jnp.uint32)
        below, sign = code & _ZERO, code >> np.uint32(7)
        bits = (sign << np.uint32(31)) | ((top - below) << np.uint32(23))
        bits = jnp.where((below == _ZERO) | (below >= top), np.uint32(0), bits)
        bits = jnp.where(top == np.uint32(255), np.uint32(0x7FC00000), bits)
        return lax.bitcast_convert_type(bits, jnp.float32)
