"""The links of an optimizer's chain, and their states."""

from slamb_jax.links.average import AverageParametersState, average_parameters_every
from slamb_jax.links.compression import (
    RandkCompressState,
    randk_compress_with_error_feedback,
)
from slamb_jax.links.decay import AddDecayedWeightsState, add_decayed_weights
from slamb_jax.links.dense import average_gradients, average_parameters
from slamb_jax.links.freshness import ElementwiseRescaleState, elementwise_rescale
from slamb_jax.links.mean_momentum import AverageMomentumState, average_momentum
from slamb_jax.links.momentum import MaskMomentumState, mask_momentum
from slamb_jax.links.scale_by_slamb import ScaleBySlambState, scale_by_slamb
from slamb_jax.links.shards import on_shards
from slamb_jax.links.trust_ratio import LayerwiseTrustRatioState, layerwise_trust_ratio

__all__ = [
    "AddDecayedWeightsState",
    "AverageMomentumState",
    "AverageParametersState",
    "ElementwiseRescaleState",
    "LayerwiseTrustRatioState",
    "MaskMomentumState",
    "RandkCompressState",
    "ScaleBySlambState",
    "add_decayed_weights",
    "average_gradients",
    "average_momentum",
    "average_parameters",
    "average_parameters_every",
    "elementwise_rescale",
    "layerwise_trust_ratio",
    "mask_momentum",
    "on_shards",
    "randk_compress_with_error_feedback",
    "scale_by_slamb",
]
