"""The wire format of a payload: ``slamb_jax.payloads``."""

from slamb_jax.exchange.payloads import (
    NaturalCompression,
    Payload,
    Quantizer,
    StochasticUniform,
    Ternary,
)

__all__ = ["NaturalCompression", "Payload", "Quantizer", "StochasticUniform", "Ternary"]
