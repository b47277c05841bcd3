"""Large-batch training in JAX that exchanges a fraction of the bytes.

An :class:`Exchange` says between whom, what, how much and how often; :func:`adamw`,
:func:`slamb`, :func:`lion`, :func:`muon` and :func:`sgd` are the optimizers;
:func:`replicate` and :func:`per_worker_step` run them on a mesh.
"""

from slamb_jax import jointspar
from slamb_jax.advisor import Network, advise
from slamb_jax.checkpoint import Checkpoints, Snapshots
from slamb_jax.exchange import Exchange, selections
from slamb_jax.links import directions
from slamb_jax.links.average_parameters import (
    average_gradients,
    average_parameters,
    average_parameters_every,
)
from slamb_jax.links.layerwise_trust_ratio import layerwise_trust_ratio
from slamb_jax.links.mask_momentum import average_momentum
from slamb_jax.links.on_shards import on_shards
from slamb_jax.links.scale_by_slamb import scale_by_slamb
from slamb_jax.optimizers import adamw, lion, muon, sgd, slamb
from slamb_jax.wire import wire_report
from slamb_jax.workers import (
    Watchdog,
    assert_replicas_agree,
    consolidate,
    exchange_metrics,
    in_chunks,
    momentum_agreement,
    on_workers,
    per_worker_step,
    replicate,
    simulated_replicas,
    simulated_step,
)
from slamb_jax.wrappers import (
    accumulate,
    check_finite,
    skip_not_finite,
    train_in_bfloat16,
)

__version__ = "0.2.0"

# In the order in which a reader meets them.
__all__ = [
    "Exchange",
    "adamw",
    "slamb",
    "lion",
    "muon",
    "sgd",
    "replicate",
    "per_worker_step",
    "consolidate",
    "on_workers",
    "average_momentum",
    "scale_by_slamb",
    "layerwise_trust_ratio",
    "average_parameters_every",
    "average_parameters",
    "average_gradients",
    "on_shards",
    "directions",
    "selections",
    "accumulate",
    "skip_not_finite",
    "check_finite",
    "train_in_bfloat16",
    "simulated_replicas",
    "simulated_step",
    "in_chunks",
    "assert_replicas_agree",
    "momentum_agreement",
    "exchange_metrics",
    "Watchdog",
    "Checkpoints",
    "Snapshots",
    "wire_report",
    "Network",
    "advise",
    "jointspar",
]
