"""Large-batch training in JAX that exchanges a fraction of the bytes.

An :class:`Exchange` says between whom, what, how much and how often; :func:`slamb` is
the optimizer; :func:`replicate` and :func:`per_worker_step` run it on a mesh.
"""

from slamb_jax import jointspar as jointspar
from slamb_jax import payloads as payloads
from slamb_jax import recipes as recipes
from slamb_jax import selections as selections
from slamb_jax.advisor import Network as Network
from slamb_jax.advisor import advise as advise
from slamb_jax.checkpoint import Checkpoints as Checkpoints
from slamb_jax.checkpoint import resize as resize
from slamb_jax.exchange import Exchange as Exchange
from slamb_jax.links import average_gradients as average_gradients
from slamb_jax.links import average_parameters as average_parameters
from slamb_jax.links import average_parameters_every as average_parameters_every
from slamb_jax.links import elementwise_rescale as elementwise_rescale
from slamb_jax.links import layerwise_trust_ratio as layerwise_trust_ratio
from slamb_jax.links import mask_momentum as mask_momentum
from slamb_jax.links import on_shards as on_shards
from slamb_jax.links import (
    randk_compress_with_error_feedback as randk_compress_with_error_feedback,
)
from slamb_jax.links import scale_by_slamb as scale_by_slamb
from slamb_jax.optimizers import slamb as slamb
from slamb_jax.wire import WireReport as WireReport
from slamb_jax.wire import wire_report as wire_report
from slamb_jax.workers import Watchdog as Watchdog
from slamb_jax.workers import assert_replicas_agree as assert_replicas_agree
from slamb_jax.workers import consolidate as consolidate
from slamb_jax.workers import in_chunks as in_chunks
from slamb_jax.workers import per_worker_step as per_worker_step
from slamb_jax.workers import replicate as replicate
from slamb_jax.workers import simulated_replicas as simulated_replicas
from slamb_jax.workers import simulated_step as simulated_step
from slamb_jax.wrappers import accumulate as accumulate
from slamb_jax.wrappers import check_finite as check_finite
from slamb_jax.wrappers import skip_not_finite as skip_not_finite
from slamb_jax.wrappers import train_in_bfloat16 as train_in_bfloat16

__version__ = "0.1.0"

# In the order in which a reader meets them.
__all__ = [
    "Exchange",
    "slamb",
    "replicate",
    "per_worker_step",
    "consolidate",
    "recipes",
    "scale_by_slamb",
    "mask_momentum",
    "randk_compress_with_error_feedback",
    "layerwise_trust_ratio",
    "elementwise_rescale",
    "average_parameters_every",
    "average_parameters",
    "average_gradients",
    "on_shards",
    "selections",
    "payloads",
    "accumulate",
    "skip_not_finite",
    "check_finite",
    "train_in_bfloat16",
    "simulated_replicas",
    "simulated_step",
    "in_chunks",
    "assert_replicas_agree",
    "Watchdog",
    "Checkpoints",
    "resize",
    "wire_report",
    "WireReport",
    "Network",
    "advise",
    "jointspar",
]
