"""Codes of eight and four bits for what travels, and which payloads there are."""

import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from slamb_jax._checks import check_integer
from slamb_jax._hashing import hash_u32

NARROW = ("bfloat16", "float16")
_TINY = float(np.finfo(np.float32).tiny)


@runtime_checkable
class Quantizer(Protocol):
    """What a payload must offer to be sent in codes; any object with these serves."""

    @property
    def error_feedback(self) -> bool:
        """Whether a worker keeps what rounding took of what it sent."""

    @property
    def seed(self) -> int:
        """Changes the rounding."""

    def nbytes(self, size: int) -> int:
        """Bytes of an array of ``size`` elements, scales included (static)."""

    def encode(self, x: jax.Array, salt: jax.Array) -> jax.Array:
        """Codes of the last axis: float32 (..., size) to uint8 (..., nbytes(size)).

        Random in the hash of ``salt`` (uint32, of shape ()) and the place in ``x``.
        What is not finite must come out of ``decode`` as not finite.
        """

    def decode(self, codes: jax.Array, size: int) -> jax.Array:
        """What was encoded: uint8 (..., nbytes(size)) to float32 (..., size)."""


Payload = str | Quantizer | None


@dataclasses.dataclass(frozen=True)
class StochasticUniform:
    r"""Eight or four bits by stochastic rounding to a uniform grid (QSGD).

    With L = 127 (or 7 for four bits) and s a block's largest magnitude over L,

    .. math::

      x \to s \left\lfloor x / s + U \right\rfloor, \qquad U \sim [0, 1)

    so each element is right on average, a zero stays a zero, and the error of each is
    less than s. (QSGD has the norm of the block for a scale; the largest magnitude
    gives a finer grid.) A block with something not finite comes out as NaN; one whose
    largest magnitude is below :math:`10^{-35}` as zeros.

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

    bits: int = 8
    block_size: int = 256
    error_feedback: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.bits not in (8, 4) or isinstance(self.bits, bool):
            raise ValueError(f"bits must be 8 or 4, got {self.bits!r}")
        _check_quantizer(self)

    def nbytes(self, size: int) -> int:
        """Bytes of ``size`` elements, scales included."""
        blocks, length = _division(size, self.block_size)
        return blocks * (length * self.bits // 8 + 4)

    def encode(self, x: jax.Array, salt: jax.Array) -> jax.Array:
        """Float32 (..., size) to uint8 (..., nbytes(size))."""
        levels = np.float32(2 ** (self.bits - 1) - 1)
        blocks = _blocks(x, self.block_size)
        largest = jnp.max(jnp.abs(blocks), -1, keepdims=True)
        small = largest < levels * np.float32(_TINY)
        scale = jnp.where(small, jnp.float32(0), largest / levels)
        known = ~small & jnp.isfinite(largest)  # NaN and infinity are in the scale
        y = jnp.where(known, blocks * (levels / largest), jnp.float32(0))
        low = jnp.floor(y)
        u = _noise(blocks.shape, salt) >> np.uint32(8)
        up = u.astype(jnp.float32) * np.float32(2**-24) < y - low
        code = jnp.clip(low + up.astype(jnp.float32), -levels, levels)
        code = code.astype(jnp.int8)
        if self.bits == 4:
            first, second = jnp.split(code & np.int8(15), 2, axis=-1)
            code = first | (second << np.int8(4))
        code = lax.bitcast_convert_type(code, jnp.uint8)
        words = lax.bitcast_convert_type(scale, jnp.uint8)
        lead = x.shape[:-1]
        return jnp.concatenate(
            [code.reshape(*lead, -1), words.reshape(*lead, -1)], axis=-1
        )

    def decode(self, codes: jax.Array, size: int) -> jax.Array:
        """Uint8 (..., nbytes(size)) to float32 (..., size)."""
        count, length = _division(size, self.block_size)
        lead, end = codes.shape[:-1], count * length * self.bits // 8
        words = codes[..., end:].reshape(*lead, count, 1, 4)
        scale = lax.bitcast_convert_type(words, jnp.float32)
        code = lax.bitcast_convert_type(codes[..., :end], jnp.int8)
        code = code.reshape(*lead, count, -1)
        if self.bits == 4:
            four = np.int8(4)
            code = jnp.concatenate([(code << four) >> four, code >> four], axis=-1)
        x = code.astype(jnp.float32) * scale
        return x.reshape(*lead, count * length)[..., :size]


@dataclasses.dataclass(frozen=True)
class NaturalCompression:
    r"""Eight bits: a sign and a power of two, by stochastic rounding.

    .. math::

      \pm 2^e (1 + f) \to
      \begin{cases}
        \pm 2^{e+1} & \text{with probability } f \\
        \pm 2^e & \text{otherwise}
      \end{cases}

    so each element is right on average, a zero stays a zero, and the variance is at
    most :math:`x^2/8`, however small an element is beside others: seven bits hold the
    distance of the exponent to that of the block's largest, which takes a byte; what is
    :math:`2^{127}` times smaller than that is 0. A block with something not finite (or
    rounded up to :math:`2^{128}`) comes out as NaN. Rounding is an addition of random
    bits to the mantissa; they are a hash, as in :class:`StochasticUniform`.

    Args:
      block_size: about how many elements share a byte for their largest exponent; at
        least 2.
      error_feedback: whether a worker keeps what rounding took, see :func:`slamb`.
      seed: changes the rounding.

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

    block_size: int = 256
    error_feedback: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        _check_quantizer(self)

    def nbytes(self, size: int) -> int:
        """Bytes of ``size`` elements, exponents included."""
        blocks, length = _division(size, self.block_size)
        return blocks * (length + 1)

    def encode(self, x: jax.Array, salt: jax.Array) -> jax.Array:
        """Float32 (..., size) to uint8 (..., nbytes(size))."""
        blocks = lax.bitcast_convert_type(_blocks(x, self.block_size), jnp.uint32)
        # The carry out of the mantissa, 23 bits, comes with probability f.
        random = _noise(blocks.shape, salt) >> np.uint32(9)
        e = ((blocks & np.uint32(0x7FFFFFFF)) + random) >> np.uint32(23)
        top = jnp.max(jnp.minimum(e, np.uint32(255)), -1, keepdims=True)
        below = jnp.minimum(top - jnp.minimum(e, top), np.uint32(127))
        below = jnp.where(e == np.uint32(0), np.uint32(127), below)
        code = ((blocks >> np.uint32(31)) << np.uint32(7)) | below
        lead = x.shape[:-1]
        parts = [part.astype(jnp.uint8).reshape(*lead, -1) for part in (code, top)]
        return jnp.concatenate(parts, axis=-1)

    def decode(self, codes: jax.Array, size: int) -> jax.Array:
        """Uint8 (..., nbytes(size)) to float32 (..., size)."""
        count, length = _division(size, self.block_size)
        lead, end = codes.shape[:-1], count * length
        wide = codes.astype(jnp.uint32)
        code = wide[..., :end].reshape(*lead, count, length)
        top = wide[..., end:].reshape(*lead, count, 1)
        below = code & np.uint32(127)
        bits = ((code >> np.uint32(7)) << np.uint32(31)) | ((top - below) << 23)
        nothing = (below == np.uint32(127)) | (below >= top)
        bits = jnp.where(nothing, np.uint32(0), bits)
        bits = jnp.where(top == np.uint32(255), np.uint32(0x7FC00000), bits)
        x = lax.bitcast_convert_type(bits, jnp.float32)
        return x.reshape(*lead, end)[..., :size]


def parse_payload(text: str) -> Payload:
    """A payload by its name on a command line."""
    if text not in PAYLOADS:
        raise ValueError(f"must be one of {', '.join(PAYLOADS)}, got {text!r}")
    return PAYLOADS[text]


def check_payload(name: str, payload: Any) -> Payload:
    """Raises unless ``payload`` is one of those there are."""
    good = payload is None or payload in NARROW
    if isinstance(payload, type) or not (good or isinstance(payload, Quantizer)):
        raise ValueError(
            f"{name} must be None, {', '.join(map(repr, NARROW))} or an object with "
            f"the methods of slamb_jax.Quantizer, got {payload!r}"
        )
    return payload


def _check_quantizer(quantizer: Any) -> None:
    check_integer("block_size", quantizer.block_size, 2)
    if not isinstance(quantizer.error_feedback, bool):
        raise ValueError(
            f"error_feedback must be a bool, got {quantizer.error_feedback!r}"
        )
    check_integer("seed", quantizer.seed)


def _division(size: int, block_size: int) -> tuple[int, int]:
    """How many blocks, and their length: even, and as alike as they can be."""
    count = max(1, -(-size // block_size))
    length = -(-size // count)
    return count, length + length % 2


def _blocks(x: jax.Array, block_size: int) -> jax.Array:
    """(..., size) as (..., blocks, length), filled up with zeros."""
    *lead, size = x.shape
    count, length = _division(size, block_size)
    fill = [(0, 0)] * len(lead) + [(0, count * length - size)]
    return jnp.pad(x, fill).reshape(*lead, count, length)


def _noise(shape: tuple[int, ...], salt: jax.Array) -> jax.Array:
    """Random words, one for each place in ``shape``."""
    place = lax.iota(jnp.uint32, int(np.prod(shape))).reshape(shape)
    return hash_u32(place, salt)


PAYLOADS: dict[str, Payload] = {
    **{name: name for name in NARROW},
    "uniform8": StochasticUniform(bits=8),
    "uniform4": StochasticUniform(bits=4),
    "natural": NaturalCompression(),
}
"""Payloads by the names that a command line has for them."""
