"""JointSpar: draw the layers to train before the backward pass."""

from slamb_jax.jointspar.distribution import JointSparState as JointSparState
from slamb_jax.jointspar.distribution import active_layers as active_layers
from slamb_jax.jointspar.distribution import layer_probabilities as layer_probabilities
from slamb_jax.jointspar.sampling import jointspar as jointspar
from slamb_jax.jointspar.train_if import train_if as train_if
