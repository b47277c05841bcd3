"""Large-batch training in JAX that exchanges a fraction of the bytes.

An :class:`Exchange` says between whom, what, how much and how often; :func:`slamb`,
:func:`adamw`, :func:`lamb`, :func:`lion`, :func:`muon` and :func:`sgd` are the
optimizers, chains of the links below; :func:`replicate` and :func:`per_worker_step` run
them on a mesh.
"""

from slamb_jax import compressors, jointspar
from slamb_jax.advisor import Network, advise
from slamb_jax.checkpoint import Checkpoints, Snapshots
from slamb_jax.exchange import Exchange, selections
from slamb_jax.links import (
    Sent,
    average_gradients,
    average_parameters,
    average_parameters_every,
    compress_with_error_feedback,
    directions,
    elementwise_rescale,
    layerwise_trust_ratio,
    mask_momentum,
    on_shards,
    randk_compress_with_error_feedback,
)
from slamb_jax.optimizers import adamw, lamb, lion, muon, sgd, slamb
from slamb_jax.wire import wire_report
from slamb_jax.workers.agreement import (
    assert_replicas_agree,
    exchange_metrics,
    momentum_agreement,
)
from slamb_jax.workers.replicas import consolidate, replicate, simulated_replicas
from slamb_jax.workers.simulate import simulated_step
from slamb_jax.workers.step import on_workers, per_worker_step
from slamb_jax.wrappers.accumulate import accumulate
from slamb_jax.wrappers.finite import check_finite, skip_not_finite

__version__ = "0.3.0"

__all__ = [
    "Checkpoints", "Exchange", "Network", "Sent", "Snapshots", "accumulate",
    "adamw", "advise", "assert_replicas_agree", "average_gradients",
    "average_parameters", "average_parameters_every", "check_finite",
    "compress_with_error_feedback", "compressors", "consolidate", "directions",
    "elementwise_rescale", "exchange_metrics", "jointspar", "lamb",
    "layerwise_trust_ratio", "lion", "mask_momentum", "momentum_agreement", "muon",
    "on_shards", "on_workers", "per_worker_step", "randk_compress_with_error_feedback",
    "replicate", "selections", "sgd", "simulated_replicas", "simulated_step",
    "skip_not_finite", "slamb", "wire_report",
]  # fmt: skip
