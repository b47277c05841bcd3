"""Large-batch training in JAX that exchanges a fraction of the bytes.

An :class:`Exchange` says between whom, what, how much and how often; :func:`slamb`,
:func:`adamw`, :func:`lamb`, :func:`lion`, :func:`muon` and :func:`sgd` are the
optimizers, chains of the links below; :func:`replicate` and :func:`per_worker_step` run
them on a mesh.
"""

# ``name as name`` imports it for users, here and in the packages below.
from slamb_jax import compressors as compressors
from slamb_jax import jointspar as jointspar
from slamb_jax.advisor import Network as Network
from slamb_jax.advisor import advise as advise
from slamb_jax.checkpoint import Checkpoints as Checkpoints
from slamb_jax.checkpoint import Snapshots as Snapshots
from slamb_jax.exchange import Exchange as Exchange
from slamb_jax.exchange import selections as selections
from slamb_jax.links import Sent as Sent
from slamb_jax.links import average_gradients as average_gradients
from slamb_jax.links import average_parameters as average_parameters
from slamb_jax.links import average_parameters_every as average_parameters_every
from slamb_jax.links import compress_with_error_feedback as compress_with_error_feedback
from slamb_jax.links import directions as directions
from slamb_jax.links import elementwise_rescale as elementwise_rescale
from slamb_jax.links import layerwise_trust_ratio as layerwise_trust_ratio
from slamb_jax.links import mask_momentum as mask_momentum
from slamb_jax.links import on_shards as on_shards
from slamb_jax.links import (
    randk_compress_with_error_feedback as randk_compress_with_error_feedback,
)
from slamb_jax.optimizers import adamw as adamw
from slamb_jax.optimizers import lamb as lamb
from slamb_jax.optimizers import lion as lion
from slamb_jax.optimizers import muon as muon
from slamb_jax.optimizers import sgd as sgd
from slamb_jax.optimizers import slamb as slamb
from slamb_jax.wire import wire_report as wire_report
from slamb_jax.workers.agreement import assert_replicas_agree as assert_replicas_agree
from slamb_jax.workers.agreement import exchange_metrics as exchange_metrics
from slamb_jax.workers.agreement import momentum_agreement as momentum_agreement
from slamb_jax.workers.on_workers import on_workers as on_workers
from slamb_jax.workers.replicas import consolidate as consolidate
from slamb_jax.workers.replicas import replicate as replicate
from slamb_jax.workers.replicas import simulated_replicas as simulated_replicas
from slamb_jax.workers.simulate import in_chunks as in_chunks
from slamb_jax.workers.simulate import simulated_step as simulated_step
from slamb_jax.workers.step import per_worker_step as per_worker_step
from slamb_jax.workers.watchdog import Watchdog as Watchdog
from slamb_jax.wrappers.accumulate import accumulate as accumulate
from slamb_jax.wrappers.bfloat16 import train_in_bfloat16 as train_in_bfloat16
from slamb_jax.wrappers.finite import check_finite as check_finite
from slamb_jax.wrappers.finite import skip_not_finite as skip_not_finite

__version__ = "0.3.0"
