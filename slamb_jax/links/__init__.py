"""The links of optax chains, of which every optimizer is made."""

from slamb_jax.compressors.codec import Sent as Sent
from slamb_jax.links import directions as directions
from slamb_jax.links.average_gradients import average_gradients as average_gradients
from slamb_jax.links.average_parameters import average_parameters as average_parameters
from slamb_jax.links.average_parameters import (
    average_parameters_every as average_parameters_every,
)
from slamb_jax.links.compress import (
    compress_with_error_feedback as compress_with_error_feedback,
)
from slamb_jax.links.compress import (
    randk_compress_with_error_feedback as randk_compress_with_error_feedback,
)
from slamb_jax.links.elementwise_rescale import (
    elementwise_rescale as elementwise_rescale,
)
from slamb_jax.links.layerwise_trust_ratio import (
    layerwise_trust_ratio as layerwise_trust_ratio,
)
from slamb_jax.links.mask_momentum import mask_momentum as mask_momentum
from slamb_jax.links.on_shards import on_shards as on_shards
