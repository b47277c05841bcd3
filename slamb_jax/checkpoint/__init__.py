"""Saves, restores and resizes the state of all workers."""

from slamb_jax.checkpoint.checkpoints import Checkpoints as Checkpoints
from slamb_jax.checkpoint.checkpoints import Restored as Restored
from slamb_jax.checkpoint.resizing import resize as resize
from slamb_jax.checkpoint.snapshots import Recovered as Recovered
from slamb_jax.checkpoint.snapshots import Snapshots as Snapshots
