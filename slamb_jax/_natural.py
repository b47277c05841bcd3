"""Codes by stochastic rounding to powers of two."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from slamb_jax._codes import Codes, noise


@dataclasses.dataclass(frozen=True)
class NaturalCompression(Codes):
    r"""Eight or four bits: a sign and a power of two, by stochastic rounding.

    .. math::

      \pm 2^e (1 + f) \to
      \begin{cases}
        \pm 2^{e+1} & \text{with probability } f \\
        \pm 2^e & \text{otherwise}
      \end{cases}

    so each element is right on average, a zero stays a zero, and the variance is at
    most :math:`x^2/8`, however small an element is beside others: seven bits hold the
    distance of the exponent to that of the block's largest, which takes a byte; what is
    :math:`2^{127}` times smaller than that is 0. Of four bits three do, and an element
    more than :math:`2^6` times smaller is rounded to that limit or to 0, right on
    average too. A block with something not finite (or rounded up to :math:`2^{128}`)
    comes out as NaN. Rounding is an addition of random bits to the mantissa; they are a
    hash, as in :class:`StochasticUniform`.

    Args:
      bits: 8 or 4 for each element; two of 4 share a byte.
      block_size: about how many elements share a byte for their largest exponent; at
        least 2.
      error_feedback: whether a worker keeps what rounding took, see :func:`slamb`.
      seed: changes the rounding.
      mean_bits: 8 or 4 for the means on their way back to the workers, whose rounding
        no further mean takes away; None for ``bits``.

    Raises:
      ValueError: for a value out of range.

    Examples:
      >>> import jax.numpy as jnp, slamb_jax
      >>> natural = slamb_jax.NaturalCompression()
      >>> codes = natural.encode(jnp.array([8.0, 0.0, -0.25, 2.0]), jnp.uint32(0))
      >>> codes.nbytes
      5
      >>> print(natural.decode(codes, 4))
      [ 8.    0.   -0.25  2.  ]

    References:
      Horváth et al., `Natural Compression for Distributed Deep Learning
      <https://arxiv.org/abs/1905.10988>`_, 2019.
    """

    _per_block = 1

    @property
    def _zero(self) -> np.uint32:
        """The distance that says 0: the largest there is."""
        return np.uint32(2 ** (self.bits - 1) - 1)

    def _code(self, blocks: jax.Array, salt: jax.Array) -> tuple[jax.Array, jax.Array]:
        words = lax.bitcast_convert_type(blocks, jnp.uint32)
        magnitude = words & np.uint32(0x7FFFFFFF)
        # The carry out of the mantissa, 23 bits, comes with probability f.
        random = noise(blocks.shape, salt) >> np.uint32(9)
        e = (magnitude + random) >> np.uint32(23)
        top = jnp.max(jnp.minimum(e, np.uint32(255)), -1, keepdims=True)
        below = jnp.minimum(top - jnp.minimum(e, top), self._zero)
        below = jnp.where(e == np.uint32(0), self._zero, below)
        if self.bits == 4:
            below = self._at_the_limit(magnitude, random, top, below)
        sign = (words >> np.uint32(31)) << np.uint32(self.bits - 1)
        return (sign | below).astype(jnp.uint8), top.astype(jnp.uint8)

    def _at_the_limit(
        self, magnitude: jax.Array, random: jax.Array, top: jax.Array, below: jax.Array
    ) -> jax.Array:
        """What is smaller than the smallest power: it, or 0, right on average."""
        smallest = self._zero - np.uint32(1)
        limit = (top - jnp.minimum(top, smallest)) << np.uint32(23)
        x, least = (
            lax.bitcast_convert_type(bits, jnp.float32) for bits in (magnitude, limit)
        )
        u = random.astype(jnp.float32) * np.float32(2**-23)
        rounded = jnp.where(u * least < x, smallest, self._zero)
        return jnp.where(magnitude < limit, rounded, below)

    def _value(self, code: jax.Array, heads: jax.Array) -> jax.Array:
        code, top = code.astype(jnp.uint32), heads.astype(jnp.uint32)
        below, sign = code & self._zero, code >> np.uint32(self.bits - 1)
        bits = (sign << np.uint32(31)) | ((top - below) << np.uint32(23))
        nothing = (below == self._zero) | (below >= top)
        bits = jnp.where(nothing, np.uint32(0), bits)
        bits = jnp.where(top == np.uint32(255), np.uint32(0x7FC00000), bits)
        return lax.bitcast_convert_type(bits, jnp.float32)
