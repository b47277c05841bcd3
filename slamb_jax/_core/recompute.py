"""What the mathematics may ask of the machine: to compute something again, or apart.

``links`` and ``optimizers`` import this of ``platform``, and nothing else.
"""

from slamb_jax._core.platform import computed_apart, recompute

__all__ = ["computed_apart", "recompute"]
