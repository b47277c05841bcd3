"""What the workers exchange, between whom, and how."""

from slamb_jax.exchange.settings import Exchange as Exchange

__all__ = ["Exchange"]
