"""Saves, restores and resizes the state of all workers."""

from slamb_jax.checkpoint.checkpoints import Checkpoints, Restored
from slamb_jax.checkpoint.resizing import resize

__all__ = ["Checkpoints", "Restored", "resize"]
