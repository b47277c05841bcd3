"""JointSpar: draw the layers to train before the backward pass."""

from slamb_jax.jointspar.distribution import (
    JointSparState,
    active_layers,
    layer_probabilities,
)
from slamb_jax.jointspar.sampling import jointspar
from slamb_jax.jointspar.train_if import train_if

__all__ = [
    "JointSparState", "active_layers", "jointspar", "layer_probabilities", "train_if",
]  # fmt: skip
