"""What travels: numbers of 16 or 32 bits, or codes of fewer."""

from typing import Any, Protocol, runtime_checkable

import jax

from slamb_jax._natural import NaturalCompression
from slamb_jax._uniform import StochasticUniform

NARROW = ("bfloat16", "float16")


@runtime_checkable
class Quantizer(Protocol):
    """What a payload must offer to be sent in codes; any object with these serves."""

    @property
    def error_feedback(self) -> bool:
        """Whether a worker keeps what rounding took of what it sent."""

    @property
    def seed(self) -> int:
        """Changes the rounding."""

    @property
    def for_means(self) -> "Quantizer":
        """What the means are sent back in, often itself; it has the same seed."""

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


def parse_payload(text: str) -> Payload:
    """A payload by its name on a command line."""
    if text not in PAYLOADS:
        raise ValueError(f"must be one of {', '.join(PAYLOADS)}, got {text!r}")
    return PAYLOADS[text]


def check_payload(name: str, payload: Any) -> Payload:
    """Raises unless ``payload`` is one of those there are."""
    # A dtype object is equal to its name, and would be sent as float32.
    good = payload is None or (isinstance(payload, str) and payload in NARROW)
    if isinstance(payload, type) or not (good or isinstance(payload, Quantizer)):
        raise ValueError(
            f"{name} must be None, {', '.join(map(repr, NARROW))} or an object with "
            f"the methods of slamb_jax.Quantizer, got {payload!r}"
        )
    return payload


PAYLOADS: dict[str, Payload] = {
    **{name: name for name in NARROW},
    "uniform8": StochasticUniform(bits=8),
    "uniform4": StochasticUniform(bits=4),
    "natural": NaturalCompression(bits=8),
    "natural4": NaturalCompression(bits=4),
}
"""Payloads by the names that a command line has for them."""
