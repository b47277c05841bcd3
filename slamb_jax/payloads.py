"""The wire format of a payload: ``slamb_jax.payloads``."""

from slamb_jax._ex.payloads import (
    LargestOf,
    Payload,
    Quantizer,
    StochasticUniform,
    Ternary,
)

__all__ = [
    "LargestOf",
    "Payload",
    "Quantizer",
    "StochasticUniform",
    "Ternary",
]
