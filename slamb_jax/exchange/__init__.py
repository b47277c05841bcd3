"""What the workers exchange, in which format, and how it is sent."""

from slamb_jax.exchange.settings import Exchange

__all__ = ["Exchange"]
