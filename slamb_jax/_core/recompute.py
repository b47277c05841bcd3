"""What the mathematics may ask of the machine: to compute something again.

``links`` and ``optimizers`` import this of ``platform``, and nothing else.
"""

from slamb_jax._core.platform import recompute

__all__ = ["recompute"]
