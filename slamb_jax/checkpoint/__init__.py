"""Saves, restores and resizes the state of all workers."""

from slamb_jax.checkpoint.checkpoints import Checkpoints, Restored, resize_checkpoint
from slamb_jax.checkpoint.resizing import resize

__all__ = ["Checkpoints", "Restored", "resize", "resize_checkpoint"]
