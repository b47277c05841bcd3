"""The wire format of a payload: ``slamb_jax.payloads``."""

from slamb_jax.exchange.payloads import NaturalCompression as NaturalCompression
from slamb_jax.exchange.payloads import Payload as Payload
from slamb_jax.exchange.payloads import Quantizer as Quantizer
from slamb_jax.exchange.payloads import StochasticUniform as StochasticUniform

__all__ = ["NaturalCompression", "Payload", "Quantizer", "StochasticUniform"]
