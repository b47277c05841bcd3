"""What the workers exchange, between whom, and how."""

from slamb_jax.exchange.settings import Exchange

__all__ = ["Exchange"]
