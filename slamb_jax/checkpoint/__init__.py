"""Saves, restores and resizes the state of all workers."""

from slamb_jax.checkpoint.checkpoints import Checkpoints, Restored
from slamb_jax.checkpoint.resizing import resize
from slamb_jax.checkpoint.snapshots import Recovered, Snapshots

__all__ = ["Checkpoints", "Recovered", "Restored", "Snapshots", "resize"]
