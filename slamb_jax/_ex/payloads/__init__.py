"""The wire format of a payload: 16 or 32 bits for a number, or codes of fewer."""

from typing import Protocol, runtime_checkable

import jax

from slamb_jax._ex.payloads.largest import LargestOf
from slamb_jax._ex.payloads.ternary import Ternary
from slamb_jax._ex.payloads.uniform import StochasticUniform


@runtime_checkable
class Quantizer(Protocol):
    """The interface of a payload in codes; any object with these members serves."""

    @property
    def error_feedback(self) -> bool:
        """Whether a worker keeps what rounding took of what it sent."""

    @property
    def seed(self) -> int:
        """Changes the rounding."""

    def nbytes(self, size: int) -> int:
        """Bytes of an array of ``size`` elements, scales included (static)."""

    def encode(self, x: jax.Array, seed: jax.Array) -> jax.Array:
        """Codes of the last axis: float32 (..., size) to uint8 (..., nbytes(size)).

        Random in the hash of ``seed`` (uint32, shape ()) and the place in ``x``. What
        is not finite must be decoded as not finite.
        """

    def decode(self, codes: jax.Array, size: int) -> jax.Array:
        """Undoes :meth:`encode`: uint8 (..., nbytes(size)) to float32 (..., size)."""


Payload = str | Quantizer | None

QUANTIZERS: dict[str, Quantizer] = {
    "uniform8": StochasticUniform(bits=8),
    "uniform4": StochasticUniform(bits=4),
    "ternary": Ternary(),
    "largest_of_7": LargestOf(count=7),
    "largest_of_31": LargestOf(count=31),
    "largest_of_127": LargestOf(count=127),
}
NAMES = ("bfloat16", *QUANTIZERS)


def resolve_payload(payload: Payload) -> Payload:
    """A quantizer for its name; other payloads as they are."""
    return QUANTIZERS.get(payload, payload) if isinstance(payload, str) else payload


def check_payload(name: str, payload: object) -> None:
    """Raises unless ``payload`` is None, a name or a quantizer."""
    # A dtype is equal to its name, and would be exchanged as float32.
    known = payload is None or (isinstance(payload, str) and payload in NAMES)
    if isinstance(payload, type) or not (known or isinstance(payload, Quantizer)):
        raise ValueError(
            f"{name} must be None, {', '.join(map(repr, NAMES))} or an object with "
            f"the members of slamb_jax.payloads.Quantizer, got {payload!r}"
        )
