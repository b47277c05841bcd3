"""Workers on a mesh, or simulated on one device."""

from slamb_jax.workers.agreement import assert_replicas_agree, momentum_agreement
from slamb_jax.workers.metrics import exchange_metrics
from slamb_jax.workers.on_workers import on_workers
from slamb_jax.workers.replicas import consolidate, replicate
from slamb_jax.workers.simulate import in_chunks, simulated_replicas, simulated_step
from slamb_jax.workers.step import WorkersStep, per_worker_step
from slamb_jax.workers.watchdog import Watchdog

__all__ = [
    "Watchdog",
    "WorkersStep",
    "assert_replicas_agree",
    "consolidate",
    "exchange_metrics",
    "in_chunks",
    "momentum_agreement",
    "on_workers",
    "per_worker_step",
    "replicate",
    "simulated_replicas",
    "simulated_step",
]
