"""Codes of three values: below, about and above zero."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from slamb_jax._checks import check_range
from slamb_jax._ex.payloads.codes import BlockQuantizer
from slamb_jax._ex.payloads.reductions import least_sent, scale_of, total

_NONE = np.float32(0)


@dataclasses.dataclass(frozen=True)
class Ternary(BlockQuantizer):
    r"""Three values, five to a byte: the sign of what is large in its block, and zero.

    With T the coordinates of a block whose magnitude is at least ``threshold`` times
    the mean magnitude, and s the mean magnitude of these:

    .. math::

      x_i \to s \operatorname{sign}(x_i) \text{ for } i \in T, \quad
      x_i \to 0 \text{ for others}

    so that the largest differences are communicated first, in 1.7 bits a coordinate
    with the scale. It is deterministic, and not right on average: as the ``payload`` of
    a momentum it needs ``error_feedback``, as an ``average_payload`` rarely. A block
    with a value that is not finite is decoded as NaN.

    Args:
      bits: 2, of which 1.6 are used.
      block_size: about how many elements share a scale of 4 bytes; at least 2.
      error_feedback: whether a worker keeps what rounding took, for one more float32
        copy of the parameters, and sends it with the next exchange of the coordinate.
      seed: has no effect.
      threshold: in units of the block's mean magnitude, not negative; 0 sends signs.

    Raises:
      ValueError: for a value out of range.

    Examples:
      >>> import jax.numpy as jnp, slamb_jax
      >>> ternary = slamb_jax.payloads.Ternary()
      >>> codes = ternary.encode(jnp.array([3.0, 0.1, -5.0, 0.0, 0.2]), jnp.uint32(0))
      >>> codes.nbytes
      5
      >>> print(ternary.decode(codes, 5))
      [ 4.  0. -4.  0.  0.]

    References:
      Li et al., `Ternary Weight Networks <https://arxiv.org/abs/1605.04711>`_, 2016:
      threshold and scale.
    """

    bits: int = 2
    block_size: int = 640
    threshold: float = 1.0

    _allowed_bits: ClassVar[tuple[int, ...]] = (2,)
    _scale_bytes: ClassVar[int] = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("threshold", self.threshold, 0.0, open_high=True)

    def quantize(
        self, planes: list[jax.Array], seed: jax.Array
    ) -> tuple[list[jax.Array], jax.Array]:
        del seed
        sizes = [jnp.abs(x) for x in planes]
        mean, least = least_sent(sizes, self.threshold)
        # Ones and zeros: a GPU would keep comparisons in memory for all that use them.
        large = [jnp.sign(jnp.maximum(size - least, _NONE)) for size in sizes]
        of_large = [is_large * x for is_large, x in zip(large, sizes, strict=True)]
        codes = [
            jnp.where(
                is_large > 0, jnp.where(x > 0, np.uint8(2), np.uint8(0)), np.uint8(1)
            )
            for is_large, x in zip(large, planes, strict=True)
        ]
        return codes, scale_of(of_large, total(large), mean)

    def dequantize(self, code: jax.Array, scales: jax.Array) -> jax.Array:
        scale = lax.bitcast_convert_type(scales[..., None, :], jnp.float32)
        return (code.astype(jnp.float32) - np.float32(1)) * scale
