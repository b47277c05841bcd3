"""The links of optax chains, of which every optimizer is made."""

from slamb_jax.compressors.codec import Sent
from slamb_jax.links import directions
from slamb_jax.links.average_gradients import average_gradients
from slamb_jax.links.average_parameters import (
    average_parameters,
    average_parameters_every,
)
from slamb_jax.links.compress import (
    compress_with_error_feedback,
    randk_compress_with_error_feedback,
)
from slamb_jax.links.elementwise_rescale import elementwise_rescale
from slamb_jax.links.layerwise_trust_ratio import layerwise_trust_ratio
from slamb_jax.links.mask_momentum import mask_momentum
from slamb_jax.links.on_shards import on_shards

__all__ = [
    "Sent", "average_gradients", "average_parameters", "average_parameters_every",
    "compress_with_error_feedback", "directions", "elementwise_rescale",
    "layerwise_trust_ratio", "mask_momentum", "on_shards",
    "randk_compress_with_error_feedback",
]  # fmt: skip
