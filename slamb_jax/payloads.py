"""The wire format of a payload: ``slamb_jax.payloads``."""

from slamb_jax.exchange.payloads import (
    LargestOf,
    NaturalCompression,
    Payload,
    Quantizer,
    StochasticUniform,
    Ternary,
)

__all__ = [
    "LargestOf",
    "NaturalCompression",
    "Payload",
    "Quantizer",
    "StochasticUniform",
    "Ternary",
]
