"""Codes of the largest coordinate among several, the others zero."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from slamb_jax._checks import check_integer, check_range
from slamb_jax._ex.payloads.codes import BlockQuantizer
from slamb_jax._ex.payloads.reductions import least_sent, scale_of, total

_NONE = np.float32(0)
_IN_HALF_A_BYTE, _IN_A_BYTE = 7, 127


@dataclasses.dataclass(frozen=True, kw_only=True)
class LargestOf(BlockQuantizer):
    r"""The sign of the largest coordinate of each group, and zero for the others.

    A group is of ``count`` coordinates, a block of many groups. With T the coordinates
    of a block that are the largest of their group and at least the mean magnitude of
    the block, and s the mean magnitude of these:

    .. math::

      x_i \to s \operatorname{sign}(x_i) \text{ for } i \in T, \quad
      x_i \to 0 \text{ for others}

    A group takes half a byte if ``count`` is at most 7, otherwise a byte. The format is
    for the ``average_payload`` of an exchange that averages the momentum: there what is
    not sent waits in the momentum. It is deterministic, and not right on average. A
    block with a value that is not finite is decoded as NaN.

    Args:
      count: coordinates of a group, in [2, 127].
      block_size: about how many coordinates share a scale of 4 bytes; at least 2. None:
        128 for each that share a byte.
      error_feedback: whether a worker keeps what rounding took, where it does not wait
        in the momentum, for one more float32 copy of the parameters.
      seed: has no effect.

    Raises:
      ValueError: for a value out of range.

    Examples:
      >>> import jax.numpy as jnp, slamb_jax
      >>> largest = slamb_jax.payloads.LargestOf(count=4)
      >>> x = jnp.array([3.0, 0.1, -5.0, 0.0, 0.2])
      >>> print(largest.decode(largest.encode(x, jnp.uint32(0)), 5))
      [ 0.  0. -5.  0.  0.]

    References:
      Shi et al., `Understanding Top-k Sparsification in Distributed Deep Learning
      <https://arxiv.org/abs/1911.08772>`_, 2019; Peng et al., `DeMo
      <https://arxiv.org/abs/2411.19870>`_, 2024: the largest of the momentum's chunks.
    """

    count: int = 7
    bits: int = dataclasses.field(default=4, init=False)
    block_size: int | None = None  # type: ignore[assignment]  # until it is made

    _scale_bytes: ClassVar[int] = 4

    def __post_init__(self) -> None:
        check_integer("count", self.count, 2)
        check_range("count", self.count, 2, _IN_A_BYTE)
        object.__setattr__(self, "bits", 4 if self.count <= _IN_HALF_A_BYTE else 8)
        if self.block_size is None:
            object.__setattr__(self, "block_size", 128 * self.per_byte)
        super().__post_init__()

    @property
    def per_digit(self) -> int:
        return self.count

    def quantize(
        self, planes: list[jax.Array], seed: jax.Array
    ) -> tuple[list[jax.Array], jax.Array]:
        del seed
        sizes = [jnp.abs(x) for x in planes]
        mean, least = least_sent(sizes, 1.0)
        codes, chosen = [], []
        for i in range(0, len(planes), self.count):
            x = jnp.stack(planes[i : i + self.count], -3)
            top = jnp.max(jnp.abs(x), -3, keepdims=True)
            place = lax.broadcasted_iota(jnp.uint8, x.shape, x.ndim - 3)
            code = place + jnp.where(x > 0, np.uint8(1), np.uint8(1 + self.count))
            first = jnp.min(
                jnp.where(jnp.abs(x) == top, code, np.uint8(255)), -3, initial=255
            )
            top = top[..., 0, :, :]
            is_sent = (top >= least) & (top > _NONE)
            codes.append(jnp.where(is_sent, first, np.uint8(0)))
            chosen.append(jnp.where(is_sent, top, _NONE))
        count = total([jnp.sign(x) for x in chosen])
        return codes, scale_of(chosen, count, mean)

    def dequantize(self, code: jax.Array, scales: jax.Array) -> jax.Array:
        scale = lax.bitcast_convert_type(scales[..., None, :], jnp.float32)
        *lead, digits, rows, width = code.shape
        code = code[..., None, :, :]
        shape = (*lead, digits, self.count, rows, width)
        place = lax.broadcasted_iota(jnp.uint8, shape, len(shape) - 3)
        up = (code == place + np.uint8(1)).astype(jnp.float32)
        down = (code == place + np.uint8(1 + self.count)).astype(jnp.float32)
        signs = (up - down).reshape(*lead, digits * self.count, rows, width)
        return signs * scale
