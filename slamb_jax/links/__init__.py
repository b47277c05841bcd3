"""The links of an optimizer's chain, and their states."""

from slamb_jax.links.average import AverageParametersState as AverageParametersState
from slamb_jax.links.average import average_parameters_every as average_parameters_every
from slamb_jax.links.compression import RandkCompressState as RandkCompressState
from slamb_jax.links.compression import (
    randk_compress_with_error_feedback as randk_compress_with_error_feedback,
)
from slamb_jax.links.dense import average_gradients as average_gradients
from slamb_jax.links.dense import average_parameters as average_parameters
from slamb_jax.links.freshness import ElementwiseRescaleState as ElementwiseRescaleState
from slamb_jax.links.freshness import elementwise_rescale as elementwise_rescale
from slamb_jax.links.momentum import MaskMomentumState as MaskMomentumState
from slamb_jax.links.momentum import mask_momentum as mask_momentum
from slamb_jax.links.scale_by_slamb import ScaleBySlambState as ScaleBySlambState
from slamb_jax.links.scale_by_slamb import scale_by_slamb as scale_by_slamb
from slamb_jax.links.shards import on_shards as on_shards
from slamb_jax.links.trust_ratio import (
    LayerwiseTrustRatioState as LayerwiseTrustRatioState,
)
from slamb_jax.links.trust_ratio import layerwise_trust_ratio as layerwise_trust_ratio

__all__ = [
    "AverageParametersState",
    "ElementwiseRescaleState",
    "LayerwiseTrustRatioState",
    "MaskMomentumState",
    "RandkCompressState",
    "ScaleBySlambState",
    "average_gradients",
    "average_parameters",
    "average_parameters_every",
    "elementwise_rescale",
    "layerwise_trust_ratio",
    "mask_momentum",
    "on_shards",
    "randk_compress_with_error_feedback",
    "scale_by_slamb",
]
